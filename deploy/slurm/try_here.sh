#!/usr/bin/env bash
# Run both job scripts with the embedded demo under Slurm, on two nodes that are network namespaces of this machine:
# deploy/slurm/try_here.sh, as root, with Debian's packages slurmctld, slurmd and munge. The status is that of the jobs.
set -euo pipefail
cd "$(dirname "$0")/../.."
# files, processes and network of its own: nothing of the machine's own Slurm is touched, and nothing stays
[ "${1:-}" = inside ] || exec unshare --mount --net --uts --pid --fork --mount-proc --kill-child "$0" inside

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for folder in /etc/slurm /etc/munge /run/munge /var/lib/munge /var/log/munge /run/netns /sys/fs/cgroup; do
    mkdir -p "$folder"
    mount -t tmpfs -o mode=755 tmpfs "$folder"
done
mkdir /sys/fs/cgroup/systemd
mount -t cgroup -o none,name=slurm_try cgroup /sys/fs/cgroup/systemd # slurmd looks for itself there

# a switch, the controller's host at it, and two nodes
printf '127.0.0.1 localhost\n10.99.0.1 head\n10.99.0.2 node1\n10.99.0.3 node2\n' >"$work/hosts"
mount --bind "$work/hosts" /etc/hosts
hostname head
ip link set lo up
ip link add switch type bridge
ip address add 10.99.0.1/24 dev switch
ip link set switch up
for number in 1 2; do
    node=node$number
    ip netns add "$node"
    ip link add "$node" type veth peer name eth0 netns "$node"
    ip link set "$node" master switch up
    ip -n "$node" address add "10.99.0.$((number + 1))/24" dev eth0
    ip -n "$node" link set eth0 up
    ip -n "$node" link set lo up
done

head -c 1024 /dev/urandom >/etc/munge/munge.key
chmod 400 /etc/munge/munge.key
chown -R munge: /etc/munge /run/munge /var/lib/munge /var/log/munge
runuser -u munge -- munged

cat >/etc/slurm/slurm.conf <<END
ClusterName=here
SlurmctldHost=head
SlurmUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MailProg=/bin/true
# more than is here: the jobs ask for nodes of a cluster
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=32 RealMemory=420000
PartitionName=all Nodes=node[1-2] Default=YES State=UP
END
mkdir "$work/state"
slurmctld -D >"$work/slurmctld.log" 2>&1 &
for node in node1 node2; do
    nsenter --net="/run/netns/$node" unshare --uts sh -c "hostname $node && exec slurmd -D -N $node" >"$work/$node.log" 2>&1 &
done
for _ in $(seq 60); do
    [ "$(sinfo --noheader --Node --states=idle 2>/dev/null | wc -l)" = 2 ] && break
    sleep 1
done
sinfo --Node --long || { tail -n 20 "$work"/*.log >&2; exit 1; }

# the tiny model needs no GPU, and takes short steps
cat >"$work/demo.yaml" <<END
group_size: 2
groups_per_batch: 1
max_steps: 2
save_every: 1
eval_tasks: null
skip_baseline: true
monitor: {show: false}
END
export CONFIG=$work/demo.yaml MODEL=$PWD/cua_rl/models/tiny_qwen3_vl
export SERVER_SETTINGS="max_model_len=none max_pixels=none dtype=float32 log_path=$work/vllm.log"
submit() {
    local name=$1
    shift
    echo "== $name: sbatch $*"
    sbatch --parsable --gpus-per-node=0 --output="$work/$name.out" "$@" log_path="$work/$name"
}
require() {
    [ -e "$work/$1/summary.json" ] || { cat "$work/$1.out" >&2; exit 1; }
    tail -n 20 "$work/$1.out"
}

failed=0
submit one --wait deploy/slurm/one_node.sbatch || failed=1
require one
submit two --wait deploy/slurm/two_nodes.sbatch || failed=1
require two

# as if the time were up: the job is queued again, which takes Slurm a minute or two, and goes on after its last step,
# although no checkpoint is due before the end
again() {
    submit "$1" "$2" max_steps=8 save_every=0
    until grep -qs "Step 2/" "$work/$1.out"; do sleep 1; done
    scancel --signal=USR1 --batch "$(squeue --noheader --format=%i)"
    for _ in $(seq 300); do
        [ -e "$work/$1/summary.json" ] && break
        sleep 1
    done
    require "$1"
    grep -E "Step|resum" "$work/$1.out"
    grep -qE "resumes .* after step [2-7] " "$work/$1.out" || failed=1
}
again one-again deploy/slurm/one_node.sbatch
again two-again deploy/slurm/two_nodes.sbatch
exit "$failed"

"""Files for containers and clusters are valid for the validators of their formats: `make test-ship`.

Every validator is also shown to fail on a file that was broken on purpose, in a way in which such files break.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cua_rl.command_line.recipe import EXIT_CONFIG, EXIT_SIGNAL

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv-ship" / "bin"
MANIFESTS = sorted(path for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml") if path.stem != "kustomization")
JOBS = sorted((ROOT / "deploy" / "slurm").glob("*.sbatch"))
SKYPILOT = "import sky, sys; sky.Task.from_yaml(sys.argv[1])"


Validator = Callable[[Path], Sequence[str | Path]]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)


def hadolint(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "hadolint", path)


def compose(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path)


def kubernetes(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "kubernetes-validate", "--strict", path)


def ray_up(path: Path) -> Sequence[str | Path]:
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return (
        TOOLS / "check-jsonschema",
        "--schemafile",
        Path(ray.origin).parent / "autoscaler" / "ray-schema.json",
        path,
    )


def skypilot(path: Path) -> Sequence[str | Path]:
    return (TOOLS / "python", "-c", SKYPILOT, path)


def shell(path: Path) -> Sequence[str | Path]:
    return ("bash", "-n", path)


VALIDATED: Sequence[tuple[Validator, Path]] = [
    (hadolint, ROOT / "Dockerfile"),
    (compose, ROOT / "compose.yaml"),
    *((kubernetes, path) for path in MANIFESTS),
    (skypilot, ROOT / "deploy" / "skypilot.yaml"),
    (ray_up, ROOT / "deploy" / "ray" / "on_premises.yaml"),
    *((shell, path) for path in JOBS),
]
BROKEN: Sequence[tuple[Validator, str, str, str, str]] = [
    (hadolint, "Dockerfile", "USER 1000:1000", "USER root", "DL3002"),
    (hadolint, "Dockerfile", "--no-install-recommends ", "", "DL3015"),
    (compose, "compose.yaml", "interval: 5s", "intervall: 5s", "intervall"),
    (compose, "compose.yaml", "condition: service_healthy", "condition: service_well", "service_well"),
    (kubernetes, "deploy/kubernetes/trainer.yaml", "backoffLimit: 6", "backofLimit: 6", "backofLimit"),
    (kubernetes, "deploy/kubernetes/trainer.yaml", "onExitCodes", "onExitCode", "onExitCode"),
    (kubernetes, "deploy/kubernetes/vllm.yaml", "containerPort: 8000", "containerPort: eight", "eight"),
    (skypilot, "deploy/skypilot.yaml", "accelerators: H100:2", "acelerators: H100:2", "acelerators"),
    (skypilot, "deploy/skypilot.yaml", "disk_size: 300", "disk_size: much", "much"),
    (ray_up, "deploy/ray/on_premises.yaml", "provider:", "providers:", "providers"),
    (shell, "deploy/slurm/two_nodes.sbatch", "done\n", "\n", "syntax error"),
]
"""Validator, file, what is in it, what breaks it, and what the validator says then."""


@pytest.mark.parametrize(("validator", "path"), VALIDATED, ids=[path.name for _, path in VALIDATED])
def test_the_file_is_valid(validator: Validator, path: Path) -> None:
    done = run(*validator(path))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("validator", "name", "good", "bad", "says"), BROKEN, ids=[f"{one[1]}: {one[3]}" for one in BROKEN]
)
def test_a_file_broken_on_purpose_is_not(
    validator: Validator, name: str, good: str, bad: str, says: str, tmp_path: Path
) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert good in text
    broken = tmp_path / Path(name).name
    broken.write_text(text.replace(good, bad), encoding="utf-8")

    done = run(*validator(broken))

    assert done.returncode != 0
    assert says in done.stdout + done.stderr


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")


def ray_groups() -> dict[str, Any]:
    """The groups of the Ray cluster, by name."""
    (cluster,) = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "cluster.yaml").read_text(encoding="utf-8"))
    others = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {"head": cluster["spec"]["headGroupSpec"], **others}


def pod_of(name: str) -> dict[str, Any]:
    if name in ray_groups():
        return ray_groups()[name]["template"]["spec"]
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8"))
    (pod,) = [one["spec"]["template"]["spec"] for one in documents if "template" in one["spec"]]
    return pod


@pytest.mark.parametrize("name", ["monitor", "postgres", "trainer", "vllm", "head", "rollouts", "trainers", "servers"])
def test_a_pod_writes_only_into_volumes_under_the_seccomp_profile_of_the_runtime(name: str) -> None:
    pod = pod_of(name)

    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security["allowPrivilegeEscalation"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts.values()
        claims = {"data"} if name == "postgres" else set()
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]} | claims


@pytest.mark.parametrize("name", ["head", "rollouts", "trainers", "servers"])
def test_a_node_of_the_ray_cluster_is_valid_asks_for_the_token_and_may_be_reached_by_this_application(
    name: str, tmp_path: Path
) -> None:
    template = ray_groups()[name]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name} | template["metadata"],
        "spec": template["spec"],
    }
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))

    done = run(*kubernetes(tmp_path / "pod.yaml"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "cua-rl"
    (container,) = pod["spec"]["containers"]
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]
    assert "RAY_AUTH_TOKEN" in [variable["name"] for variable in container["env"]]
    # KubeRay's own probes ask a dashboard that is not there
    assert container["livenessProbe"]["tcpSocket"] == container["readinessProbe"]["tcpSocket"]


def kustomize(folder: str) -> list[dict[str, Any]]:
    done = run("kubectl", "kustomize", folder)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def run_container(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = [one for one in documents if one["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


@needs_kubectl
def test_the_run_joins_the_ray_cluster_and_leaves_its_gpu_to_the_nodes_that_train() -> None:
    documents = kustomize("deploy/kuberay")
    container = run_container(documents)

    assert "RayCluster" in [one["kind"] for one in documents]
    assert 'ray start --address "$RAY_ADDRESS"' in container["command"][4]
    assert container["args"][-2:] == ["rollout_workers=32", "trainer.num_nodes=2"]
    assert {"name": "RAY_ADDRESS", "value": "cua-rl-head-svc:6379"} in container["env"]
    assert "nvidia.com/gpu" not in container["resources"]["requests"] | container["resources"]["limits"]


@needs_kubectl
def test_the_run_with_replicas_has_nodes_for_them_in_place_of_the_server_for_one() -> None:
    documents = kustomize("deploy/kuberay-replicas")
    (cluster,) = [one for one in documents if one["kind"] == "RayCluster"]
    (servers,) = [one for one in cluster["spec"]["workerGroupSpecs"] if one["groupName"] == "servers"]
    (node,) = servers["template"]["spec"]["containers"]
    groups = {one["groupName"]: one["replicas"] for one in cluster["spec"]["workerGroupSpecs"]}
    container = run_container(documents)
    script = container["command"][4]

    # Ray would put model servers on nodes that train
    assert groups == {"rollouts": 4, "trainers": 0, "servers": 2}
    assert container["args"][-1] == "rollout_workers=32"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "--num-gpus 0" in script
    assert "vllm" not in [one["metadata"]["name"] for one in documents]
    assert not [word for word in container["args"] if word.startswith("base_url=")]
    num_gpus = servers["replicas"] * int(node["resources"]["limits"]["nvidia.com/gpu"])
    assert f" num_replicas={num_gpus} " in script
    assert f"= {num_gpus} ]" in script


REPLICAS = """
for port in 1 2 3 2 4 5 6 7 8; do echo "model server: http://10.0.0.$port:8000, which asks for a key"; done
exec tail --pid=$PPID -f /dev/null 2>/dev/null
"""


@needs_kubectl
@pytest.mark.parametrize("serves", [True, False])
def test_the_run_with_replicas_gets_the_address_of_each_or_the_status_of_servers_that_cannot_start(
    serves: bool, tmp_path: Path
) -> None:
    container = run_container(kustomize("deploy/kuberay-replicas"))
    for name, does in {
        "ray": "exit 0",
        "python": REPLICAS if serves else f"exit {EXIT_CONFIG}",
        "sleep": "exit 0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "RAY_ADDRESS": "head:6379"}
    command = [*container["command"][2:], "echo", "train"]

    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    if serves:
        addresses = ",".join(f"http://10.0.0.{host}:8000" for host in range(1, 9))
        assert done.stdout == f"train base_url={addresses}\n"
    else:
        assert (done.stdout, done.returncode) == ("", EXIT_CONFIG)


def test_the_trainer_job_knows_which_ends_are_failures_and_which_are_final() -> None:
    job = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "trainer.yaml").read_text(encoding="utf-8"))
    disruption, deletion, configuration = job["spec"]["podFailurePolicy"]["rules"]

    assert disruption == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (deletion["action"], deletion["onExitCodes"]["values"]) == ("Ignore", [EXIT_SIGNAL + signal.SIGTERM])
    assert (configuration["action"], configuration["onExitCodes"]["values"]) == ("FailJob", [EXIT_CONFIG])


def test_a_run_is_healthy_until_its_last_step_is_two_hours_old(tmp_path: Path) -> None:
    probe = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "trainer.yaml").read_text(encoding="utf-8"))
    (container,) = probe["spec"]["template"]["spec"]["containers"]
    shell_, option, command = container["livenessProbe"]["exec"]["command"]
    assert command in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    started, metrics = tmp_path / "hostname", tmp_path / "runs" / "kubernetes" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)

    def is_healthy(*, container_min: float, step_min: float | None) -> bool:
        started.touch()
        now = time.time()
        os.utime(started, (now, now - 60 * container_min))
        metrics.unlink(missing_ok=True)
        if step_min is not None:
            metrics.touch()
            os.utime(metrics, (now, now - 60 * step_min))
        here = command.replace("/etc/hostname", str(started))
        return (
            subprocess.run([shell_, option, here], cwd=tmp_path, check=False, stderr=subprocess.DEVNULL).returncode == 0
        )

    assert is_healthy(container_min=1, step_min=None)  # it loads its model
    assert is_healthy(container_min=1, step_min=500)  # a run that is resumed
    assert is_healthy(container_min=500, step_min=100)
    assert not is_healthy(container_min=500, step_min=130)
    assert not is_healthy(container_min=500, step_min=None)


def test_every_pod_may_reach_only_what_the_network_policies_name() -> None:
    documents = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "network.yaml").read_text(encoding="utf-8"))
    policies = {one["metadata"]["name"]: one["spec"] for one in documents}
    everyone = {"matchLabels": {"app.kubernetes.io/name": "cua-rl"}}
    inside, names = policies["cua-rl-leaves"]["egress"]
    (outside,) = policies["cua-rl-fetches"]["egress"]

    assert policies["cua-rl-leaves"]["podSelector"] == everyone
    assert policies["cua-rl-leaves"]["policyTypes"] == ["Egress"]
    assert inside == {"to": [{"podSelector": everyone}]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert outside["ports"] == [{"protocol": "TCP", "port": 443}]
    assert "169.254.0.0/16" in outside["to"][0]["ipBlock"]["except"]  # where clouds hand out a machine's credentials


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="no docker-compose: apt-get install docker-compose")
def test_compose_starts_no_profile_without_its_secrets(tmp_path: Path) -> None:
    secrets = {"POSTGRES_PASSWORD": "a-password", "MONITOR_READ_TOKEN": "a-token-to-read-with"}
    profiles = [f"--profile={name}" for name in ("demo", "single", "multi", "server")]
    environ = {name: value for name, value in os.environ.items() if name not in secrets}
    for left_out in (None, *secrets):
        file = tmp_path / ".env"
        file.write_text("".join(f"{name}={value}\n" for name, value in secrets.items() if name != left_out))
        command = ["docker-compose", "--env-file", str(file), *profiles, "config", "--quiet"]

        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)

        assert (done.returncode == 0) == (left_out is None), done.stderr
        assert left_out is None or f"set {left_out} in .env" in done.stderr

#!/usr/bin/env bash
# Train on several GPUs with configs/grpo_multi_gpu.yaml: scripts/train_multi.sh [--gpus 4] [--loader hf|unsloth] [SETTING=VALUE ...]
# --gpus takes the first so many of the GPUs in CUDA_VISIBLE_DEVICES, or of all; with 0, the CPU computes. Settings after
# the options win over the file; CONFIG names another file, LOADER is --loader.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
config=${CONFIG:-$root/configs/grpo_multi_gpu.yaml}
gpus=4
loader=${LOADER:-hf}
settings=()

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
        --gpus | --loader)
            [ $# -ge 2 ] || fail "$1: expected a value, got none"
            if [ "$1" = --gpus ]; then gpus=$2; else loader=$2; fi
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# //p}' "$0"
            exec "${PYTHON:-$root/.venv/bin/python}" -m cua_rl.recipes.train --help
            ;;
        *)
            settings+=("$1")
            shift
            ;;
    esac
done
[[ $gpus =~ ^(0|[1-9][0-9]*)$ ]] || fail "--gpus: expected a number of GPUs, got '$gpus'"
case $loader in
    hf) ;;
    unsloth) settings=("trainer.loader=$loader" "${settings[@]}") ;;
    *) fail "--loader: expected hf or unsloth, got '$loader'; leave it out" ;;
esac

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
    [ "${#visible[@]}" -ge "$gpus" ] || fail "--gpus: expected at most ${#visible[@]}, the GPUs of CUDA_VISIBLE_DEVICES, got $gpus"
else
    mapfile -t visible < <(seq 0 $((gpus - 1)))
fi
CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${visible[*]:0:gpus}")
export CUDA_VISIBLE_DEVICES PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [ "$gpus" = 6 ]; then
    settings=(server.gpus=0,1 server.tensor_parallel=2 trainer.gpus=2,3,4,5 "${settings[@]}")
fi
if [ -z "${CUA_RL_ENV_FILE:-}" ] && [ ! -f .env ] && [ -f "$root/.env" ]; then
    export CUA_RL_ENV_FILE=$root/.env
    echo "variables from $CUA_RL_ENV_FILE" >&2
fi
exec "$python" -m cua_rl.recipes.train --config "$config" "${settings[@]}"

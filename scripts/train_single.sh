#!/usr/bin/env bash
# Train on one GPU with configs/grpo_single_gpu.yaml: scripts/train_single.sh [--loader hf|unsloth] [SETTING=VALUE ...]
# Settings after the options win over the file; CONFIG names another file.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CONFIG=${CONFIG:-$root/configs/grpo_single_gpu.yaml}
exec "$root/scripts/train_multi.sh" --gpus 1 "$@"

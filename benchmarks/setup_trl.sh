#!/usr/bin/env bash
# A virtual environment with TRL for benchmarks/trainer_against_trl.py: benchmarks/setup_trl.sh [FOLDER]
# It shares torch, transformers and peft with .venv, so that both trainers run the same kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-trl}

shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
.venv/bin/python -m venv "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$shared" > "$own/shared.pth"
"$folder/bin/pip" install --quiet multiprocess pyarrow pandas
"$folder/bin/pip" install --quiet --no-deps trl==1.16.0 accelerate==1.15.0 datasets==5.2.0
HF_HUB_OFFLINE=1 "$folder/bin/python" -W ignore -c 'from trl import GRPOTrainer; import trl; print("TRL", trl.__version__)'

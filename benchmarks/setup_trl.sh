#!/usr/bin/env bash
# A virtual environment with TRL for benchmarks/trainer_against_trl.py: benchmarks/setup_trl.sh [FOLDER]
# It shares what .venv has, torch, transformers and peft among it, so that both trainers run the same kernels, and adds
# what TRL needs besides, dependencies of dependencies too.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-trl}

if [ ! -x .venv/bin/python ]; then
    echo "benchmarks/setup_trl.sh: expected .venv, found none; run make setup" >&2
    exit 2
fi
shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
.venv/bin/python -m venv "$folder"
own=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$shared" >"$own/shared.pth"
# what is shared has the versions of this lock, so pip takes it as it is
if ! "$folder/bin/pip" install --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r benchmarks/trl.txt \
    >"$folder/setup.log" 2>&1; then
    tail -n 20 "$folder/setup.log" >&2
    echo "benchmarks/setup_trl.sh: expected pip to install TRL, it ended as above; all of it is in $folder/setup.log" >&2
    exit 1
fi
HF_HUB_OFFLINE=1 "$folder/bin/python" -W ignore -c 'from trl import GRPOTrainer; import trl; print("TRL", trl.__version__)'

#!/usr/bin/env bash
# Train on a gym server with gbox-mini-agent: ./train.sh --gym http://localhost:5010 --gym-id my_gym \
#     --model-base-url http://localhost:8000/v1
# --help lists the flags; each is also an environment variable in upper case, read from .env too.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python
if [[ -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m cua_rl.recipes.gym_command "$@"

#!/usr/bin/env bash
# Train on a gym server with gbox-mini-agent: ./train.sh --gym http://localhost:5010 --gym-id my_gym \
#     --model-base-url http://localhost:8000/v1
# --help lists the flags; each is also an environment variable in upper case, read from .env too: that of the folder it
# is started in, or else the one beside this file.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python
if [[ -x $root/.venv/bin/python ]]; then
    python=$root/.venv/bin/python
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ -z ${CUA_RL_ENV_FILE:-} && ! -f .env && -f $root/.env ]]; then
    export CUA_RL_ENV_FILE=$root/.env
    echo "variables from $CUA_RL_ENV_FILE" >&2
fi
exec "$python" -m cua_rl.recipes.gym_command "$@"

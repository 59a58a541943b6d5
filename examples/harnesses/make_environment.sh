#!/usr/bin/env bash
# Make the Python environment of an example in .harnesses/NAME: `examples/harnesses/make_environment.sh NAME`.
# It does nothing while the example's requirements stay the same. With uv it takes seconds, otherwise a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
example=examples/harnesses/${1:?make_environment.sh: expected the name of an example, such as verifiers}
folder=$PWD/.harnesses/$1
oldest=$(cat "$example/oldest_python" 2>/dev/null || echo 3.11)

find_python() {
    local candidate is_ours="import sys; sys.exit(not (${oldest/./, }) <= sys.version_info < (3, 14))"
    # first one that other users can read: root gives every harness a user of its own
    for candidate in "${PYTHON:-}" /usr/bin/python3 python3 python3.11 python3.12 python3.13; do
        if [ -n "$candidate" ] && "$candidate" -c "$is_ours" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "make_environment.sh: expected Python $oldest to 3.13 for $1, found none; install one, or set PYTHON to its path" >&2
    exit 2
}

wanted=$({ cat "$example"/requirements.txt "$example"/after_install.sh 2>/dev/null || true; } | cksum)
if [ "$(cat "$folder/made" 2>/dev/null)" = "$wanted" ]; then exit; fi
python=$(find_python "$1")
rm -rf "$folder"
if uv=$(PATH=$PATH:$PWD/.venv/bin command -v uv); then
    "$uv" venv --quiet --seed --python "$python" "$folder"
    "$uv" pip install --quiet --python "$folder/bin/python" --compile-bytecode --require-hashes -r "$example/requirements.txt"
else
    "$python" -m venv "$folder"
    "$folder/bin/pip" install --quiet --no-deps --require-hashes -r "$example/requirements.txt"
fi
if [ -e "$example/after_install.sh" ]; then bash "$example/after_install.sh" "$folder"; fi
echo "$wanted" >"$folder/made"

#!/usr/bin/env bash
# Make .venv with everything that training, checks and tests need. Safe to run again: it does nothing while the files that
# decide what is installed stay the same.
set -euo pipefail
cd "$(dirname "$0")/.."

CPU_INDEX=${CUA_RL_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
PATH=$PATH:/usr/lib/wsl/lib # where WSL2 has nvidia-smi
VENV=.venv
PYTHON=$VENV/bin/python
STAMP=$VENV/.cua_rl-setup

say() { echo "setup: $*"; }

find_python() {
    local candidate
    for candidate in "${PYTHON_FOR_SETUP:-}" python3.11 python3.12 python3.13 python3; do
        # some of these may be launchers for versions that are not installed, so each is run
        if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: expected Python 3.11, 3.12 or 3.13 on PATH, found none; install one, or set PYTHON_FOR_SETUP to its path" >&2
    exit 2
}

kind_of_machine() {
    case $(uname -s) in
        Linux) ;;
        Darwin)
            echo mac
            return
            ;;
        *)
            echo "setup: expected Linux or macOS (on Windows inside WSL2), got $(uname -s); see docs/dev/platforms.md" >&2
            exit 2
            ;;
    esac
    if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
        echo gpu
        return
    fi
    if cat /sys/bus/pci/devices/*/vendor 2>/dev/null | grep -q 0x10de; then
        say "a device of NVIDIA is here, but nvidia-smi lists no GPU, so set-up is for CPU: install the driver, then run set-up again" >&2
    fi
    echo cpu
}

digest() {
    { echo "$1"; cat pyproject.toml constraints/{cpu,cpu-torch,gpu,mac,node}.txt scripts/{setup,check_gpus,install_system_packages}.sh scripts/repair_imports.py; } | cksum
}

# Nothing but the files of a lock: no dependency that it does not name, no file of another hash, no build.
pip_install() {
    if ! "$PYTHON" -m pip install --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary :all: "$@" \
        >>"$VENV/setup.log" 2>&1; then
        tail -n 20 "$VENV/setup.log" >&2
        echo "setup: expected pip to install $*, it ended as above; the whole story is in $VENV/setup.log" >&2
        exit 1
    fi
}

install_for_cpu() {
    local index=()
    if curl --silent --fail --output /dev/null --max-time 2 "$CPU_INDEX/torch/" 2>/dev/null; then
        say "torch for CPU from $CPU_INDEX"
        index=(--index-url "$CPU_INDEX")
    else
        say "torch for CPU from where pip is configured to look ($CPU_INDEX does not answer; CUA_RL_TORCH_INDEX names a mirror)"
    fi
    pip_install "${index[@]}" -r constraints/cpu-torch.txt
    say "vLLM for CPU, peft and the checks (this takes a few minutes the first time)"
    pip_install -r constraints/cpu.txt
}

install_for_mac() {
    say "macOS, for which there is no vLLM: all but the model server (docs/dev/platforms.md)"
    pip_install -r constraints/mac.txt
}

install_for_gpu() {
    local cuda index lock
    cuda=$(scripts/check_gpus.sh "$PYTHON") || exit 2
    if [ "$cuda" = 13 ]; then
        say "a CUDA GPU is here: vLLM for CUDA, peft and the checks (this takes a while the first time)"
        pip_install -r constraints/gpu.txt
        return
    fi
    if [ ! -e constraints/cuda12.txt ]; then
        echo "setup: expected driver 580 or newer, got one for CUDA 12, whose packages come from other indexes; update it, or let scripts/lock.sh cuda12 write their versions and hashes into constraints/cuda12.txt (docs/gpus.md)" >&2
        exit 2
    fi
    # every package from the one index that the lock names
    grep -o '# from .*' constraints/cuda12.txt | sort -u | while read -r _ _ index; do
        lock=$(mktemp)
        awk -v index_url="$index" '{ block = block $0 "\n" } /# from / { if ($NF == index_url) printf "%s", block; block = "" }' \
            constraints/cuda12.txt >"$lock"
        say "builds for CUDA 12 from $index"
        if [ "$index" = https://pypi.org/simple ]; then pip_install -r "$lock"; else pip_install --index-url "$index" -r "$lock"; fi
        rm "$lock"
    done
}

# Where no package has it (Ubuntu), Playwright's own. A network that lets nothing through costs two minutes, once.
download_chromium() {
    if "$PYTHON" -c 'from cua_rl.environments.browser.chromium import find_chromium; find_chromium()' 2>/dev/null; then return; fi
    say "Chromium from Playwright, because no system package has it"
    # Python's own timeout: macOS has no command of that name
    if ! "$PYTHON" -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], timeout=120))' "$PYTHON" -m playwright install --only-shell chromium >>"$VENV/setup.log" 2>&1; then
        say "no Chromium, so browser devices do not start and their tests are skipped; install one when you need it" >&2
    fi
}

main() {
    local kind wanted started=$SECONDS
    kind=$(kind_of_machine)
    wanted=$(digest "$kind")
    if [ -x "$PYTHON" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    if [ ! -x "$PYTHON" ]; then
        local python
        python=$(find_python)
        say "$VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
    fi
    if [ "$kind" != mac ]; then
        scripts/install_system_packages.sh & # apt and pip wait for servers, each for its own
        trap wait EXIT
    fi
    "install_for_$kind"
    # the project itself, from this folder; what builds it is in the lock
    "$PYTHON" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --no-index --editable .
    wait
    download_chromium
    if ! command -v node >/dev/null; then
        say "Node for pyright from the package index, because this machine has none"
        pip_install -r constraints/node.txt
    fi
    [ "$kind" = mac ] || "$PYTHON" scripts/repair_imports.py
    echo "$wanted" >"$STAMP"
    say "done in $((SECONDS - started)) s"
}

main "$@"

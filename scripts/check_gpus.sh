#!/usr/bin/env bash
# Check, before gigabytes are downloaded, that vLLM and torch will work on the GPUs of this machine: driver, compute
# capability, C compiler and Python headers: scripts/check_gpus.sh PYTHON. Prints the CUDA version whose wheels the driver
# runs, 13 or 12; says on stderr what is missing, and fails if anything is.
set -euo pipefail
PATH=$PATH:/usr/lib/wsl/lib # where WSL2 has nvidia-smi

PYTHON=$1
CUDA_13_DRIVER=580
CUDA_12_DRIVER=525 # any driver for CUDA 12 runs builds for a later CUDA 12
failed=0

fail() {
    echo "set-up of GPUs: $*" >&2
    failed=1
}

# Of the GPUs that may be used; those that are named by UUID or as slices are not told apart
query() {
    local chosen=()
    if [[ ${CUDA_VISIBLE_DEVICES:-} =~ ^[0-9]+(,[0-9]+)*$ ]]; then
        chosen=(--id="$CUDA_VISIBLE_DEVICES")
    fi
    nvidia-smi --query-gpu="$1" --format=csv,noheader "${chosen[@]}"
}

check_capabilities() {
    local capability
    while IFS=', ' read -r capability; do
        if [ "${capability/./}" -lt 75 ]; then
            fail "expected GPUs of compute capability 7.5 or higher, for which the wheels have kernels, got $capability; leave that GPU out with CUDA_VISIBLE_DEVICES, or use another machine"
        elif [ "${capability/./}" -lt 80 ]; then
            echo "set-up of GPUs: compute capability $capability has no bfloat16: set trainer.dtype=float32 server.dtype=float32, which takes twice the memory" >&2
        fi
    done < <(query compute_cap | sort -u)
}

# Triton compiles its launchers with both whenever vLLM or torch.compile starts
check_compiler() {
    local version
    if ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null && [ -z "${CC:-}" ]; then
        fail "expected a C compiler, found none; install one: sudo apt-get install gcc libc6-dev"
    fi
    if ! "$PYTHON" -c 'import pathlib, sysconfig, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())'; then
        version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "expected Python's headers (Python.h) for $PYTHON, found none; install them: sudo apt-get install python$version-dev"
    fi
}

main() {
    local driver cuda=13
    driver=$(query driver_version | head -n 1)
    if [ "${driver%%.*}" -lt $CUDA_12_DRIVER ]; then
        fail "expected NVIDIA driver $CUDA_13_DRIVER or newer, or at least $CUDA_12_DRIVER for wheels of CUDA 12, got $driver; update the driver"
    elif [ "${driver%%.*}" -lt $CUDA_13_DRIVER ]; then
        cuda=12
    fi
    check_capabilities
    check_compiler
    [ $failed = 0 ] || exit 2
    echo $cuda
}

main

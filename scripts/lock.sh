#!/usr/bin/env bash
# Write the lock files: versions and hashes of what set-up, images, validators and examples install.
#   scripts/lock.sh             after a change of pyproject.toml, ship.in or an example's requirements.in; versions stay
#   scripts/lock.sh --upgrade   with the newest versions that fit
#   scripts/lock.sh --check     write nothing; resolve for each Python that is supported and compare: `make pythons`
#   scripts/lock.sh cuda12      constraints/cuda12.txt, where the indexes of vLLM and PyTorch can be reached
# Wheels alone, because building a package runs its code and fetches what no lock names; OSWorld's packages have none.
# constraints/cpu-torch.txt is not written: its hashes are those in the links of PyTorch's index for CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PYTHON_DOWNLOADS=never UV_CUSTOM_COMPILE_COMMAND=scripts/lock.sh MACOSX_DEPLOYMENT_TARGET=14.0

LINUX=x86_64-manylinux_2_35 # glibc of Ubuntu 22.04
VERSIONS=(3.11 3.12 3.13)
RUN=(--extra wandb --extra gbox --extra ray --extra tinker)
ALL=("${RUN[@]}" --extra browser --extra trajectories --extra dev)
mode=${1:-write}
failed=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# PyTorch's builds for CPU need no CUDA, unlike the one of the package index, and have a lock of their own
torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints/cpu-torch.txt)
echo "torch==$torch" >"$folder/torch.txt"
cat >"$folder/uv.toml" <<END
[[dependency-metadata]]
name = "torch"
version = "$torch"
requires-dist = ["filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec"]
END

compile() {
    local wheels=(--only-binary :all:)
    if [[ $* = */osworld/* ]]; then wheels=(); fi
    .venv/bin/uv pip compile --quiet --no-annotate --generate-hashes "${wheels[@]}" "$@" >/dev/null
}

versions_in() { grep -o '^[^ #]*==[^ ]*' "$1"; }

# A lock FILE from what follows, for every Python the same: one that needs other packages fails the check.
lock() {
    local file=$1 version
    shift
    if [ "$mode" = --upgrade ]; then rm -f "$file"; fi
    if [ "$mode" != --check ]; then compile --python-version "${VERSIONS[0]}" --output-file "$file" "$@"; fi
    for version in "${VERSIONS[@]}"; do
        cp "$file" "$folder/lock.txt"
        if compile --python-version "$version" --output-file "$folder/lock.txt" "$@" 2>"$folder/error" &&
            diff <(versions_in "$file") <(versions_in "$folder/lock.txt") >"$folder/error"; then
            echo "Python $version, $file: $(versions_in "$file" | wc -l) packages fit"
        else
            echo "Python $version, $file: expected what it names to be what is needed, got (run scripts/lock.sh)"
            cat "$folder/error"
            failed=1
        fi
    done
}

if [ "$mode" = cuda12 ]; then
    vllm=$(sed -n 's/^vllm==\([0-9.]*\).*/\1/p' constraints/gpu.txt)
    versions_in constraints/gpu.txt | grep -vE '^(cuda|nvidia|torch|triton|vllm)' >"$folder/constraints.txt"
    echo "vllm==$vllm+cu129" >>"$folder/constraints.txt"
    # uv takes a package from the first index that has it, and what belongs to torch from PyTorch's alone
    compile pyproject.toml --python-platform $LINUX --python-version 3.12 --extra gpu --extra desktop "${ALL[@]}" \
        --constraint "$folder/constraints.txt" --index "https://wheels.vllm.ai/$vllm/cu129" --torch-backend cu129 \
        --emit-index-annotation --output-file constraints/cuda12.txt
    exit
fi
without_cuda=(--python-platform $LINUX --config-file "$folder/uv.toml" --override "$folder/torch.txt" --no-emit-package torch)
for_cpu=("${without_cuda[@]}" --extra cpu)
for_gpu=(--python-platform $LINUX --extra gpu)
lock constraints/cpu.txt pyproject.toml "${for_cpu[@]}" --extra desktop "${ALL[@]}"
lock constraints/gpu.txt pyproject.toml "${for_gpu[@]}" --extra desktop "${ALL[@]}"
lock constraints/mac.txt pyproject.toml --python-platform aarch64-apple-darwin --extra cpu "${ALL[@]}"
VERSIONS=(3.11) # of the images, and of what validates them
lock constraints/cpu-image.txt pyproject.toml "${for_cpu[@]}" "${RUN[@]}"
lock constraints/gpu-image.txt pyproject.toml "${for_gpu[@]}" "${RUN[@]}"
lock benchmarks/trl.txt benchmarks/trl.in "${without_cuda[@]}" --constraint constraints/cpu.txt
lock constraints/tinker.txt constraints/tinker.in "${without_cuda[@]}"
lock constraints/cookbook.txt constraints/cookbook.in "${without_cuda[@]}"
for file in constraints/tinker-*.in; do # older SDKs, which take what they need from the environment of the newest one
    lock "${file%.in}.txt" "$file" --python-platform $LINUX --no-deps
done
lock constraints/ship.txt constraints/ship.in --python-platform $LINUX
lock constraints/node.txt constraints/node.in --python-platform $LINUX
for example in examples/harnesses/*/requirements.in; do
    VERSIONS=("$(cat "${example%/*}/oldest_python" 2>/dev/null || echo 3.11)")
    lock "${example%.in}.txt" "$example" --universal
done
exit $failed

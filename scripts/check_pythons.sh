#!/usr/bin/env bash
# Resolve what set-up installs for each Python that is supported, from wheels alone: scripts/check_pythons.sh [VERSION...]
# Needs a package index. Nothing is installed: a Python that is not here is checked too, and so is CUDA without a GPU. For
# GPUs, constraints/gpu.txt must name every package: what it leaves open changes under the user.
set -euo pipefail
cd "$(dirname "$0")/.."
export UV_PYTHON_DOWNLOADS=never

PLATFORM=x86_64-manylinux_2_35 # glibc of Ubuntu 22.04
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(3.11 3.12 3.13)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# vLLM for CPU asks for PyTorch's build for CPU, which is not on every index and needs less than the one that is
echo "torch==$(sed -n 's/^TORCH_VERSION=//p' scripts/setup.sh)" >"$folder/torch.txt"

extras=()
for extra in wandb gbox browser desktop trajectories dev; do extras+=(--extra "$extra"); done
failed=0
for version in "${versions[@]}"; do
    for kind in cpu gpu; do
        options=(--constraint constraints/gpu.txt)
        [ "$kind" = gpu ] || options=(--override "$folder/torch.txt")
        if .venv/bin/uv pip compile pyproject.toml --quiet --no-header --only-binary :all: --python-version "$version" \
            --python-platform "$PLATFORM" --extra "$kind" "${extras[@]}" "${options[@]}" \
            --output-file "$folder/$version-$kind.txt" 2>"$folder/error"; then
            echo "Python $version, $kind: $(grep -c == "$folder/$version-$kind.txt") packages fit"
            if [ "$kind" = gpu ] && open=$(grep -o '^[^ ]*==[^ ]*' "$folder/$version-$kind.txt" | grep -vxFf constraints/gpu.txt); then
                echo "Python $version, $kind: expected constraints/gpu.txt to name every package, it lacks" $open
                failed=1
            fi
        else
            echo "Python $version, $kind: expected the extras to fit together, got"
            cat "$folder/error"
            failed=1
        fi
    done
done
exit $failed

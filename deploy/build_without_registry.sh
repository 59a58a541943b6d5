#!/usr/bin/env bash
# Build an image where no container registry can be reached: deploy/build_without_registry.sh [cpu|gpu] [OPTION OF BUILDAH ...]
# As root on Debian or Ubuntu, with debootstrap and buildah. The base image comes from Debian's mirror and is called as in
# the Dockerfile; buildah builds in a chroot, which needs neither a daemon nor namespaces.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${1:-cpu}
shift $(($# ? 1 : 0))
base=$(sed -n 's/^ARG DEBIAN=\(.*\)@sha256.*/\1/p' Dockerfile) # made here, so the registry's digest is not its own

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    files=$(mktemp -d)
    trap 'rm -rf "$files"' EXIT
    debootstrap --variant=minbase bookworm "$files"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$files" /
    buildah config --cmd /bin/bash "$container"
    buildah commit --quiet --rm "$container" "$base"
fi
# Docker's format, because OCI's has no health checks; one layer for each stage, because storage may copy them whole
buildah build --isolation chroot --pull-never --format docker --build-arg DEBIAN="$base" --target "$target" --tag "cua_rl:$target" "$@" .

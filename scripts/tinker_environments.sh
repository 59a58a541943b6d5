#!/usr/bin/env bash
# Make .venv-tinker, the environment of the tinker SDK (its packages do not go with the trainer's), and one for each
# older version of the SDK, .venv-tinker-0.26.2 and so on, which takes everything else from the first: all versions need
# the same. Safe to run again: it does nothing while the locks stay the same. A version that cannot be had is named and
# left out.
set -euo pipefail
cd "$(dirname "$0")/.."

FIRST=.venv-tinker
INSTALL=(-m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary :all:)

done_stamp() { cat "$@" scripts/tinker_environments.sh | cksum; }

stamp=$(done_stamp constraints/tinker.txt constraints/cpu-torch.txt)
if [ "$(cat $FIRST/.done 2>/dev/null)" != "$stamp" ]; then
    rm -rf $FIRST
    .venv/bin/python -m venv $FIRST
    $FIRST/bin/python "${INSTALL[@]}" -r constraints/cpu-torch.txt
    $FIRST/bin/python "${INSTALL[@]}" -r constraints/tinker.txt
    echo "$stamp" >$FIRST/.done
fi

for lock in constraints/tinker-*.txt; do
    version=${lock#constraints/tinker-}
    version=${version%.txt}
    folder=$FIRST-$version
    stamp=$(done_stamp "$lock" constraints/tinker.txt)
    if [ "$(cat "$folder/.done" 2>/dev/null)" = "$stamp" ]; then continue; fi
    rm -rf "$folder"
    .venv/bin/python -m venv --without-pip "$folder"
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    if ! $FIRST/bin/python "${INSTALL[@]}" --target "$packages" -r "$lock"; then
        echo "set-up: tinker $version cannot be installed from here; its tests are left out" >&2
        rm -rf "$folder"
        continue
    fi
    # searched after the environment's own packages, so that the SDK is the older one
    echo "$(pwd)/${FIRST}/$(realpath --relative-to "$folder" "$packages")" >"$packages/first.pth"
    echo "$stamp" >"$folder/.done"
done

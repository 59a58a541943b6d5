#!/usr/bin/env bash
# Build the Training Monitor's web app into the Python package. Needs Node 20 or newer; showing the monitor does not.
#   scripts/build_web.sh [FOLDER]     into FOLDER instead of the package
#   scripts/build_web.sh --sources    print the hash of the sources, which the build keeps
set -euo pipefail
cd "$(dirname "$0")/../training-monitor"

hash_sources() {
    find index.html package.json package-lock.json tsconfig.json vite.config.ts public src -type f |
        LC_ALL=C sort | xargs sha256sum | sha256sum | cut -d' ' -f1
}

if [ "${1:-}" = "--sources" ]; then
    hash_sources
    exit 0
fi
target=$(realpath -m "${1:-../cua_rl/monitor/static}")
[ -d node_modules ] || npm ci --ignore-scripts --no-audit --no-fund
npx tsc --noEmit
npx vite build --outDir "$target" --emptyOutDir --logLevel warn
hash_sources >"$target/sources.sha256"
echo "web app: built into $target"

#!/usr/bin/env bash
# Check that the built web app and its types are those of the sources; with Node, rebuild and compare byte for byte.
set -euo pipefail
cd "$(dirname "$0")/.."
static=cua_rl/monitor/static

fail() {
    echo "web app: $1" >&2
    exit 1
}

[ "$(scripts/build_web.sh --sources)" = "$(cat $static/sources.sha256)" ] ||
    fail "expected $static to be built from training-monitor/, got an older build; run scripts/build_web.sh and commit"
.venv/bin/python -m cua_rl.monitor.openapi | cmp -s - training-monitor/openapi.json ||
    fail "expected training-monitor/openapi.json to be the API's schema, got another; run \
python -m cua_rl.monitor.openapi >training-monitor/openapi.json, then npm run types there, then scripts/build_web.sh"

if ! command -v npm >/dev/null; then
    echo "web app: the build fits its sources (no Node here to build it again)"
    exit 0
fi
if ! { [ -d training-monitor/node_modules ] || npm ci --ignore-scripts --no-audit --no-fund --prefix training-monitor >/dev/null 2>&1; }; then
    echo "web app: the build fits its sources (npm cannot fetch what building it again needs)"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd training-monitor && npx openapi-typescript openapi.json -o "$scratch/schema.ts" >/dev/null 2>&1)
cmp -s "$scratch/schema.ts" training-monitor/src/api/schema.ts ||
    fail "expected src/api/schema.ts to be made from openapi.json, got another; run npm run types in training-monitor"
scripts/build_web.sh "$scratch/static" >/dev/null
diff -rq "$scratch/static" $static || fail "expected $static to be what the sources build; run scripts/build_web.sh"
echo "web app: the build is current"

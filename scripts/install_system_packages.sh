#!/usr/bin/env bash
# Install the Debian programs that browser and desktop devices (and their tests) operate. Asks nothing; safe to run again.
set -euo pipefail

# program on PATH -> Debian package
PROGRAMS=(
    "chromium-headless-shell chromium-headless-shell" # browser devices; tests of the Training Monitor
    "Xvfb xvfb"                                       # Linux desktops: the X server,
    "openbox openbox"                                 # the window manager,
    "mousepad mousepad"                               # and what the desktop tasks operate
    "pcmanfm pcmanfm"
    "xterm xterm"
    "node nodejs"                                     # agents in JavaScript: examples/agents/agent.mjs
)

missing=()
for pair in "${PROGRAMS[@]}"; do
    read -r program package <<<"$pair"
    command -v "$program" >/dev/null || missing+=("$package")
done
# the widths of letters decide where pages put things: Arial is Liberation Sans here
[ -d /usr/share/fonts/truetype/liberation ] || missing+=(fonts-liberation)
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "system packages: expected ${missing[*]} to be installed; run as root on Debian, or install them yourself:" >&2
    echo "    sudo apt-get install --no-install-recommends ${missing[*]}" >&2
    echo "system packages: without them, browser and desktop devices do not start, and their tests are skipped" >&2
    exit 0
fi
echo "system packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null

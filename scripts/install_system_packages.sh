#!/usr/bin/env bash
# Install the Debian programs that browser and desktop devices (and their tests) operate. Asks nothing; safe to run again.
# Exit status 0 even if it may not or cannot: training needs none of them. It says in a sentence what is missing then.
# CUA_RL_NO_SYSTEM_PACKAGES=1 declines: nothing runs as root.
set -euo pipefail

# program on PATH -> Debian package
PROGRAMS=(
    "Xvfb xvfb"           # Linux desktops: the X server,
    "openbox openbox"     # the window manager,
    "mousepad mousepad"   # and what the desktop tasks operate
    "pcmanfm pcmanfm"
    "xterm xterm"
    "setpriv util-linux"
    "bwrap bubblewrap"    # sandboxes of agents, harnesses, sites and desktops
    "node nodejs"         # agents in JavaScript: examples/agents/agent.mjs
    "npm npm"             # tests: Qwen3's own vocabulary; building the Training Monitor's web app
)
# any of these serves browser devices and the tests of the Training Monitor: cua_rl/environments/browser/chromium.py
CHROMIUMS=(chromium-headless-shell headless_shell chromium chromium-browser google-chrome-stable google-chrome)

say() { echo "system packages: $*"; }

have_any() {
    local program
    for program in "$@"; do
        if command -v "$program" >/dev/null; then return 0; fi
    done
    return 1
}

list_missing() {
    local pair program package
    for pair in "${PROGRAMS[@]}"; do
        read -r program package <<<"$pair"
        have_any "$program" || echo "$package"
    done
    have_any "${CHROMIUMS[@]}" || [ -n "${CUA_RL_CHROMIUM:-}" ] || echo chromium-headless-shell
    # the widths of letters decide where pages put things: Arial is Liberation Sans here
    [ -d /usr/share/fonts/truetype/liberation ] || echo fonts-liberation
}

# As root, or through a sudo that asks for no password; a server that does not answer costs a minute at most.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

apt() {
    as_root env DEBIAN_FRONTEND=noninteractive timeout --kill-after=5 "$1" apt-get -qq -o Acquire::Retries=1 \
        -o Acquire::http::Timeout=15 -o Acquire::https::Timeout=15 -o DPkg::Lock::Timeout=60 "${@:2}" </dev/null >/dev/null
}

# Ubuntu has Chromium as a snap only, which sees neither /tmp nor hidden folders: Playwright's own serves there.
leave_out_what_apt_does_not_have() {
    local package
    for package in "${missing[@]}"; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            available+=("$package")
        else
            say "apt knows no $package here"
        fi
    done
}

main() {
    local missing available=()
    mapfile -t missing < <(list_missing)
    if [ ${#missing[@]} -eq 0 ]; then return; fi
    if [ -n "${CUA_RL_NO_SYSTEM_PACKAGES:-}" ] || ! may_install; then
        say "browser and desktop devices need ${missing[*]}; where apt is, install them with" >&2
        echo "    sudo apt-get update && sudo apt-get install --no-install-recommends ${missing[*]}" >&2
        return
    fi
    say "installing ${missing[*]} as root with apt-get (CUA_RL_NO_SYSTEM_PACKAGES=1 declines)"
    if ! apt 60 update; then
        say "apt's servers do not answer, so ${missing[*]} are not installed; run scripts/install_system_packages.sh later" >&2
        return
    fi
    leave_out_what_apt_does_not_have
    if [ ${#available[@]} -eq 0 ]; then return; fi
    # the download may be stopped, the installation may not
    if ! apt 600 install --yes --no-install-recommends --download-only "${available[@]}" ||
        ! apt 0 install --yes --no-install-recommends "${available[@]}"; then
        say "apt could not install ${available[*]}; run scripts/install_system_packages.sh again to see why" >&2
    fi
}

main

# The pages of MiniWoB++ without Selenium, which its own environment would need, and the Chromium of this machine under
# the path where this version of Playwright looks for its own; without one, Playwright downloads it.
set -euo pipefail
"$1/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes -r "$(dirname "$0")/pages.txt"
for name in "${CUA_RL_CHROMIUM:-}" chromium-headless-shell chromium chromium-browser google-chrome; do
    if chromium=$(command -v "$name"); then
        mkdir -p "$1/browsers/chromium-1117/chrome-linux"
        ln -s "$chromium" "$1/browsers/chromium-1117/chrome-linux/chrome"
        exit
    fi
done
PLAYWRIGHT_BROWSERS_PATH=$1/browsers "$1/bin/playwright" install chromium

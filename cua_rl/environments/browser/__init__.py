"""Pages of a Chromium browser as devices."""

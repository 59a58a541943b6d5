"""Tasks on a Linux desktop with real Debian programs."""

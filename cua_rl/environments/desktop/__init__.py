"""Linux desktops, each with its own X server, a window manager, and real Debian programs."""

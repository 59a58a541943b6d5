"""Linux desktops: an X server of their own each, a window manager, and real Debian programs."""

"""MiniWoB++: small web pages with tasks and rewards of their own, from the PyPI package `miniwob`."""

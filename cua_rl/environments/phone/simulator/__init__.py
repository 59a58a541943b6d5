"""The embedded phone: a deterministic, seeded simulator drawn with Pillow; no network, no files."""

"""A stand-in for liger-kernel."""

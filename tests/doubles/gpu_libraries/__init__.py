"""Stand-ins for packages that need a GPU, under their own names, with the signatures of unsloth 2026.10.9 and
liger-kernel 0.8.5; a test puts this folder on the path.
"""

"""Stand-in for a package that needs a GPU, under its own name, with the signatures of unsloth 2026.10.9; a test puts
this folder on the path.
"""

"""The launcher of the simulated phone."""

"""The apps of the simulated phone: what each holds, shows and does."""

"""Runs of the recipes: configuration, what is resolved from it, folder, devices, agents, judge, and their wiring."""

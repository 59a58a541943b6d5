"""Runs of the recipes: configuration, the plan resolved from it, folder, devices, agents, judge, and their wiring."""

"""Recorded rollouts as files, and trajectories of others as rollouts."""

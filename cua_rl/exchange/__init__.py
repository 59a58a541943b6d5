"""Export of recorded rollouts as files, and import of trajectories recorded by other systems."""

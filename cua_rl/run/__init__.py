"""What recipes are made of: their configuration, the plan made from it, a run's folder, devices, agents and judge."""

"""Parses command lines and YAML files into configurations, and runs recipes."""

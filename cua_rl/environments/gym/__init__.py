"""Devices behind the executions of a gym server."""

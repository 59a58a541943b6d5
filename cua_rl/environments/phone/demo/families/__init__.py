"""Families of demo tasks: each function is a kind of task, and makes a template for an id and what it is about."""

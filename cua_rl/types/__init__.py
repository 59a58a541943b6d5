"""Nouns that all rooms share: rollouts and their parts, errors, and the values of parsed JSON."""

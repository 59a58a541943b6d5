"""Tests with the tinker SDK, which is in an environment of its own: `make setup-tinker`."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = next(iter(ROOT.glob(".venv-tinker/lib/python*/site-packages")), None)

collect_ignore_glob = [] if PACKAGES else ["test_*.py"]  # `make test-tinker` makes it first

"""The model server, trainer and gateway of tests/real/agents, for programs with environments of their own."""

from tests.real.agents.conftest import engine

__all__ = ["engine"]

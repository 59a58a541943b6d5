"""What the gateway refuses, apart from malformed requests."""


class UnknownRollout(LookupError):
    """No rollout with this id is open."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"expected the id of an open rollout, got {rollout_id!r}; open it first, or it has ended")


class ContextOverflow(Exception):
    """Prompt and answer together do not fit into the model's context."""

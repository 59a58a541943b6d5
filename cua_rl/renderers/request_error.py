"""Errors that the caller causes: a malformed request, or one that is too long."""


class RequestError(ValueError):
    """A request that cannot be rendered: what was expected, what came, what to do. A gateway answers it with 400."""

    def __init__(self, *, expected: str, got: str, do: str) -> None:
        super().__init__(f"expected {expected}, got {got}; {do}")
        self.expected = expected
        self.got = got
        self.do = do


class ContextOverflow(Exception):
    """Prompt and answer together exceed the model's context."""

"""What a benchmark has to have done before it prints a figure of it."""


def require(what: str, **claims: tuple[object, object]) -> None:
    """End without a figure of `what` unless every claim, as `name=(expected, got)`, holds."""
    broken = [
        f"{name.replace('_', ' ')}: expected {expected!r}, got {got!r}"
        for name, (expected, got) in claims.items()
        if expected != got
    ]
    if broken:
        raise SystemExit(f"no figure of {what}, which did not happen as it should have: {'; '.join(broken)}")

"""How a check says what it expected and what it got."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


class CheckFailed(Exception):
    """The server does something else than the SDK's users rely on."""


class NotApplicable(Exception):
    """The check cannot be run here: the SDK is too old, or something that it needs is missing."""


def expect(holds: bool, expected: str, got: object) -> None:
    """Fail unless `holds`."""
    if not holds:
        raise CheckFailed(f"expected {expected}, got {got}")


def expect_close(got: npt.ArrayLike, expected: npt.ArrayLike, tolerance: float, what: str) -> None:
    """Fail unless two arrays differ by at most `tolerance` everywhere; NaN is never close."""
    left, right = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    expect(left.shape == right.shape, f"{what} of shape {list(right.shape)}", list(left.shape))
    difference = float(np.abs(left - right).max()) if left.size else 0.0
    expect(
        difference <= tolerance,
        f"{what} within {tolerance:g} of {_few(right)}",
        f"{_few(left)}, off by {difference:.3g}",
    )


def expect_ratio(got: float, expected: float, what: str, relative: float = 0.15) -> None:
    """Fail unless two figures, measured by steps of some length, agree within `relative`."""
    expect(
        bool(abs(got - expected) <= relative * abs(expected)),
        f"{what} of {expected:.4g} within {relative:.0%}",
        f"{got:.4g}",
    )


def _few(values: Numbers) -> str:
    shown: Sequence[float] = values.ravel()[:6].tolist()
    return "[" + ", ".join(f"{value:.5g}" for value in shown) + (", ...]" if values.size > 6 else "]")

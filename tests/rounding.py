"""How far apart results may be that are equal but for rounding: tolerances from arithmetic, not from a machine."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

EPS = torch.finfo(torch.float32).eps

Numbers = Sequence[float] | Tensor


def rounding_bound(magnitude: float, num_roundings: int) -> float:
    """Bound of the difference between two float32 results that passed through `num_roundings` roundings each.

    A rounding is off by at most EPS / 2, up or down by chance, so n of them by a standard deviation of
    sqrt(n / 12) * EPS, and two results from each other by sqrt(2) times that. Five deviations hold for every entry of a
    tensor: 5 * sqrt(2 / 12) = 2. Processors with other orders of summation stay within it; an error of 1e-3 does not.
    """
    return 2 * math.sqrt(num_roundings) * EPS * magnitude


def assert_equal_but_for_rounding(
    found: Numbers, expected: Numbers, num_roundings: int, magnitude: float | None = None
) -> None:
    """Compare entry by entry; `magnitude` is that of what was added up, by default the largest expected value."""
    one, other = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    largest = other.abs().max().item() if magnitude is None else magnitude
    torch.testing.assert_close(one, other, atol=rounding_bound(largest, num_roundings), rtol=0)


def assert_as_exact_as(found: Sequence[Tensor], stock: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Our error is at most twice that of the stock float32 computation, both measured against float64.

    Four roundings of the largest value are free: where the stock computation happens to hit exactly, its error says
    nothing.
    """
    ours, theirs = (
        max((a.double() - b).abs().max().item() for a, b in zip(rows, exact, strict=True)) for rows in (found, stock)
    )
    largest = max(row.abs().max().item() for row in exact)
    limit = 2 * theirs + 4 * EPS * largest
    assert ours <= limit, (
        f"expected an error of at most {limit:.3g} (the stock computation's is {theirs:.3g}), got {ours:.3g}"
    )


class KeepFloat64(TorchFunctionMode):
    """Inside, a float64 model computes in float64 throughout: code that casts to float32 for exactness loses none."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        casts = function is Tensor.float or (function is Tensor.to and torch.float32 in args[1:])
        if casts and args[0].dtype == torch.float64:
            return args[0]
        return function(*args, **(kwargs or {}))

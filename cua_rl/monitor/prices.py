"""The cost of runs: prices from a file, multiplied by recorded amounts."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cua_rl.monitor.set_schemas import Cost
from cua_rl.types.errors import ConfigError

Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
_CLOSED = ConfigDict(extra="forbid", frozen=True)
_UNITS: Mapping[str, tuple[str, float]] = {
    "gpu_s": ("gpu_hour", 3600),
    "device_s": ("device_hour", 3600),
    "uncached_tokens": ("prompt_million_tokens", 1e6),
    "cached_tokens": ("cached_million_tokens", 1e6),
    "sampled_tokens": ("sampled_million_tokens", 1e6),
    "trained_tokens": ("trained_million_tokens", 1e6),
}
"""The price of each amount, and how much of the amount it is for."""


class JudgePrices(BaseModel):
    model_config = _CLOSED

    prompt_million_tokens: Dollars
    answer_million_tokens: Dollars


class Prices(BaseModel):
    """US dollars; what has no price is shown without money. `judge` is by model, for runs that recorded no cost."""

    model_config = _CLOSED

    gpu_hour: Dollars | None = None
    device_hour: Dollars | None = None
    prompt_million_tokens: Dollars | None = None
    """Of prompt tokens that were not found in the prefix cache."""
    cached_million_tokens: Dollars | None = None
    sampled_million_tokens: Dollars | None = None
    trained_million_tokens: Dollars | None = None
    judge: dict[str, JudgePrices] = {}


def load_prices(path: Path) -> Prices:
    """Raises `ConfigError` if the file is not a list of prices."""
    expected = f"prices: expected a TOML file with prices such as gpu_hour = 2.5 at {path}"
    try:
        return Prices.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        (first, *_) = error.errors()
        got = f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}"
        raise ConfigError(f"{expected}, got {got}; the names are {', '.join(Prices.model_fields)}") from None
    except (OSError, ValueError) as error:  # of tomllib and of other encodings as well
        raise ConfigError(f"{expected}, got {type(error).__name__}: {error}; docs/monitor.md has an example") from None


def judge_cost(prices: Prices, model: str, num_prompt_tokens: float, num_answer_tokens: float) -> float | None:
    """Of a judge's tokens; None without a price for the model."""
    price = prices.judge.get(model)
    if price is None:
        return None
    return (num_prompt_tokens * price.prompt_million_tokens + num_answer_tokens * price.answer_million_tokens) / 1e6


def make_cost(prices: Prices, amounts: Mapping[str, float]) -> Cost:
    """Amounts with the money that they cost, where they have a price; `judge_usd` is money already."""
    uncached = max(0.0, amounts.get("prompt_tokens", 0) - amounts.get("cached_tokens", 0))
    priced: Mapping[str, float | None] = prices.model_dump(exclude={"judge"})
    usd: dict[str, float] = {}
    for name, amount in {**amounts, "uncached_tokens": uncached}.items():
        price, unit = _UNITS.get(name, ("", 1.0))
        per_unit = priced.get(price)
        if per_unit is not None:
            usd[price.rpartition("_hour")[0] or price.partition("_")[0]] = amount * per_unit / unit
    if "judge_usd" in amounts:
        usd["judge"] = amounts["judge_usd"]
    whole = ("num_rollouts", "num_open", "num_unpriced_judgements")
    counts = {name: round(amounts.get(name, 0)) for name in (*whole, *(n for n in Cost.model_fields if "tokens" in n))}
    return Cost(
        **counts,
        sampling_s=amounts.get("sampling_s", 0.0),
        device_s=amounts.get("device_s", 0.0),
        gpu_s=amounts.get("gpu_s"),
        usd=usd,
        total_usd=sum(usd.values()) if usd else None,
    )

"""Settings of several runs side by side."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from cua_rl.monitor.schemas import ConfigRow


def compare_configs(configs: Sequence[Mapping[str, object]]) -> list[ConfigRow]:
    """One row per setting of any of them, nested ones with dots; those that differ come first."""
    flat = [flatten(config) for config in configs]
    rows: list[ConfigRow] = []
    for key in sorted({key for config in flat for key in config}):
        values = [config.get(key) for config in flat]
        is_different = len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1
        rows.append(ConfigRow(key=key, values=values, is_different=is_different))
    return sorted(rows, key=lambda row: (not row.is_different, row.key))


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"lora": {"rank": 8}} as {"lora.rank": 8}; lists stay whole."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat

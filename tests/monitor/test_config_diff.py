"""Configurations of runs side by side, whichever version of this package stored them."""

from cua_rl.command_line.plain_config import plain_config
from cua_rl.monitor.run_queries import compare_configs
from cua_rl.run.training_config import CLIConfig
from cua_rl.training.config import LossConfig


def test_a_run_from_before_settings_had_groups_stands_beside_one_of_today() -> None:
    today = plain_config(CLIConfig(model_name="m", loss=LossConfig(clip_low=0.3)))
    earlier: dict[str, object] = {"model_name": "m", "clip_low": 0.3, "seed": 1}

    rows = {row.key: (row.values, row.is_different) for row in compare_configs([earlier, today])}

    assert rows["model_name"] == (["m", "m"], False)
    assert rows["seed"] == ([1, 0], True)
    assert rows["clip_low"][0] == [0.3, None]
    assert rows["loss.clip_low"][0] == [None, 0.3]

from pathlib import Path

import pytest

from cua_rl.monitor.prices import Prices, load_prices, make_cost
from cua_rl.recipes.serve_monitor import MonitorConfig, cli_main
from cua_rl.types.errors import ConfigError


def test_prices_are_read_from_a_file_and_only_what_has_one_costs_money(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        "gpu_hour = 2\ncached_million_tokens = 0\n"
        '[judge."a.b/c"]\nprompt_million_tokens = 1\nanswer_million_tokens = 2.5\n'
    )
    prices = load_prices(path)

    assert (prices.gpu_hour, prices.device_hour, prices.judge["a.b/c"].answer_million_tokens) == (2, None, 2.5)
    cost = make_cost(prices, {"gpu_s": 1800.0, "device_s": 99.0, "prompt_tokens": 10, "cached_tokens": 4})
    assert cost.usd == {"gpu": 1.0, "cached": 0.0}  # free is a price
    assert cost.total_usd == 1.0
    assert make_cost(Prices(), {"gpu_s": 1800.0}).total_usd is None
    assert make_cost(prices, {"prompt_tokens": 10}).gpu_s is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("gpu_hours = 2", "gpu_hours = 2"),
        ("gpu_hour = -1", "greater than or equal to 0"),
        ("gpu_hour = 'two'", "gpu_hour = 'two'"),
        ("gpu_hour = nan", "finite"),
        ("[judge.x]\nprompt_million_tokens = 1", "judge.x.answer_million_tokens"),
        ("gpu_hour =", "TOMLDecodeError"),
    ],
)
def test_a_file_that_is_no_list_of_prices_is_refused_with_what_is_wrong(
    tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(content)

    with pytest.raises(ConfigError, match="prices: expected a TOML file with prices") as caught:
        load_prices(path)
    assert told in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        load_prices(tmp_path / "none.toml")


async def test_a_monitor_takes_the_file_that_its_environment_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("gpu_hours = 2")
    with pytest.raises(ConfigError, match=r"mine\.toml, got gpu_hours = 2"):
        await cli_main(MonitorConfig(source=str(tmp_path)), {"MONITOR_PRICES": str(path)})

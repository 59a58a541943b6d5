from pathlib import Path
from typing import Any

import pytest

from cua_rl.errors import ConfigError
from cua_rl.recipes.serve_model import ServeModelConfig, cli_main, require_key
from cua_rl.sampling.address import API_KEY_VARIABLE, server_addresses
from cua_rl.sampling.vllm_command import installed_platform


@pytest.mark.parametrize("key", [None, "", "too-short"])
def test_a_model_is_not_served_without_a_key_that_is_hard_to_guess(key: str | None) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY.*at least 16 characters"):
        require_key(key)


def test_a_long_key_is_accepted() -> None:
    require_key("0123456789abcdef")


@pytest.mark.skipif(installed_platform() != "cpu", reason="for vLLM on a CPU")
async def test_a_model_that_vllm_cannot_serve_here_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe"}')
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()

    with pytest.raises(ConfigError, match="model_name: expected a model that vLLM serves with adapters on a CPU"):
        await cli_main(ServeModelConfig(model_name=str(tmp_path)), {API_KEY_VARIABLE: "0123456789abcdef"})


async def test_options_that_vllm_cannot_take_are_refused_before_the_weights_are_fetched() -> None:
    with pytest.raises(ConfigError, match=r"vllm_args: expected options of vLLM's server.*close the quotes"):
        await cli_main(ServeModelConfig(vllm_args="--block-size '32"), {API_KEY_VARIABLE: "0123456789abcdef"})


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"gpu_memory_utilization": 7.0}])
def test_numbers_that_no_server_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a number above 0"):
        ServeModelConfig(**wrong)


def test_several_servers_are_separated_by_commas() -> None:
    assert server_addresses("http://one:8000, http://two:8000") == ("http://one:8000", "http://two:8000")


@pytest.mark.parametrize("given", ["", "http://one:8000,", "http://one:8000,http://one:8000"])
def test_a_missing_or_repeated_server_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="different addresses, separated by commas"):
        server_addresses(given)

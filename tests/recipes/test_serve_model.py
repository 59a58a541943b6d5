from pathlib import Path
from typing import Any

import pytest

from cua_rl.host.processes import free_port
from cua_rl.recipes.serve_model import cli_main, main, require_key
from cua_rl.run.model_servers import ServeModelConfig
from cua_rl.sampling.address import API_KEY_VARIABLE, server_addresses
from cua_rl.sampling.config import ServerConfig
from cua_rl.types.errors import ConfigError


@pytest.mark.parametrize("key", [None, "", "too-short"])
def test_a_model_is_not_served_without_a_key_that_is_hard_to_guess(key: str | None) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY.*at least 16 characters"):
        require_key(key)


def test_a_long_key_is_accepted() -> None:
    require_key("0123456789abcdef")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("port=70000", "port: expected a number above 0 and at most 65535"),
        ("host=no.such.host.invalid", "of 'no.such.host.invalid', choose another"),
        ("gpu_memory_utilization=2", "gpu_memory_utilization: expected a number above 0"),
        ("vllm_args=--block-size '32", "vllm_args: expected options of vLLM's server"),
        ("log_file={folder}/file/vllm.log", "file/vllm.log', choose another"),
    ],
)
def test_a_server_that_cannot_start_is_explained(
    argument: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "0123456789abcdef")
    (tmp_path / "file").touch()

    # with a model that does not exist, nothing would start anyway
    nowhere = f"model_name={tmp_path}/nowhere"
    elsewhere = [f"log_file={tmp_path}/vllm.log", f"port={free_port()}"]
    assert main([nowhere, *elsewhere, argument.format(folder=tmp_path)]) == 2
    assert words in capsys.readouterr().err.replace("\n    ", ", ")


async def test_options_that_vllm_cannot_take_are_refused_before_the_weights_are_fetched() -> None:
    with pytest.raises(ConfigError, match=r"vllm_args: expected options of vLLM's server.*close the quotes"):
        await cli_main(
            ServeModelConfig(server=ServerConfig(vllm_args="--block-size '32")), {API_KEY_VARIABLE: "0123456789abcdef"}
        )


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"gpu_memory_utilization": 7.0}])
def test_numbers_that_no_server_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a number above 0"):
        ServeModelConfig(server=ServerConfig(**wrong))


def test_several_servers_are_separated_by_commas() -> None:
    assert server_addresses("http://one:8000, http://two:8000") == ("http://one:8000", "http://two:8000")


@pytest.mark.parametrize("given", ["", "http://one:8000,", "http://one:8000,http://one:8000"])
def test_a_missing_or_repeated_server_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="different addresses, separated by commas"):
        server_addresses(given)

import pytest

from cua_rl.errors import ConfigError
from cua_rl.recipes.serve_model import require_key
from cua_rl.sampling.address import server_addresses


@pytest.mark.parametrize("key", [None, "", "too-short"])
def test_a_model_is_not_served_without_a_key_that_is_hard_to_guess(key: str | None) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_API_KEY.*at least 16 characters"):
        require_key(key)


def test_a_long_key_is_accepted() -> None:
    require_key("0123456789abcdef")


def test_several_servers_are_separated_by_commas() -> None:
    assert server_addresses("http://one:8000, http://two:8000") == ("http://one:8000", "http://two:8000")


@pytest.mark.parametrize("given", ["", "http://one:8000,", "http://one:8000,http://one:8000"])
def test_a_missing_or_repeated_server_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="different addresses, separated by commas"):
        server_addresses(given)

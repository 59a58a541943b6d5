"""Addresses and keys of model servers: `http://HOST:PORT`, or `unix:PATH` for a Unix socket."""

import httpx

from cua_rl.types.errors import ConfigError

API_KEY_VARIABLE = "VLLM_API_KEY"
"""Holds the key of the model server, in the environment of vLLM and of the run."""


def server_addresses(base_url: str | None) -> tuple[str, ...]:
    """The addresses in a list like `http://one:8000,http://two:8000`; raises `ConfigError` for one that is missing."""
    if base_url is None:
        return ()
    addresses = tuple(address.strip() for address in base_url.split(","))
    if not all(addresses) or len(set(addresses)) < len(addresses):
        raise ConfigError(
            f"base_url: expected different addresses, separated by commas, got {base_url!r}; name each server once"
        )
    return addresses


def split_address(base_url: str) -> tuple[str, str | None]:
    """The beginning of a server's URLs, without `/v1`, and the path of its Unix socket if it has one."""
    root = base_url.rstrip("/").removesuffix("/v1")
    return ("http://localhost", root.removeprefix("unix:")) if root.startswith("unix:") else (root, None)


def bearer(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def server_client(base_url: str, api_key: str | None, timeout_s: float = 10.0) -> httpx.AsyncClient:
    """A client for a few requests; rollouts use `HttpClient`."""
    root, socket_path = split_address(base_url)
    transport = httpx.AsyncHTTPTransport(uds=socket_path, verify=httpx.create_ssl_context())
    return httpx.AsyncClient(
        base_url=root, headers=bearer(api_key), transport=transport, trust_env=False, timeout=timeout_s
    )

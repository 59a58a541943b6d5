"""Malformed requests: each is refused with a reason, changes nothing, and shows nothing of the service's insides."""

import json
import tracemalloc
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.requests import Request
from starlette.types import Receive

from cua_rl.host.request_limits import BodyBudget, RequestRefused
from cua_rl.tinker_service.app import plain_body
from tests.real.database.conftest import TEMPLATE, drop_database, run_sql, with_database
from tests.real.tinker_service.conftest import BASE_MODEL, PROTOBUF, Client, running
from tests.tinker_service.clients import text_pass

S, M = "SESSION", "MODEL"  # stand for the ids of a session and a model that exist
UNKNOWN = "0" * 32
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
LORA = {"rank": 8}
CREATE = {"session_id": S, "model_seq_id": 1, "base_model": BASE_MODEL, "lora_config": LORA}
SAMPLE = {"base_model": BASE_MODEL, "prompt": PROMPT, "sampling_params": {}}
ADAM = {"learning_rate": 0.1}


def with_params(**params: object) -> Mapping[str, object]:
    return {**SAMPLE, "sampling_params": params}


BODIES: list[tuple[str, object]] = [
    ("create_session", []),
    ("create_session", {"user_metadata": "many"}),
    ("create_session", {"user_metadata": {"a": float("nan")}}),
    ("create_session", {"user_metadata": {"a": ["\x00"]}}),
    ("create_session", {"user_metadata": {"a": "\ud800"}}),
    ("create_session", {"user_metadata": {"a": "x" * 20_000}}),
    ("create_session", {"tags": ["x" * 300_000]}),
    ("session_heartbeat", {}),
    ("session_heartbeat", {"session_id": UNKNOWN}),
    ("session_heartbeat", {"session_id": 7}),
    ("session_heartbeat", {"session_id": "a\x00b"}),
    (f"sessions/{UNKNOWN}/finish", {"reason": {"type": "success"}}),
    (f"sessions/{S}/finish", {"reason": {"type": "bored"}}),
    (f"sessions/{S}/finish", {}),
    ("create_model", {**CREATE, "session_id": UNKNOWN}),
    ("create_model", {**CREATE, "base_model": "meta-llama/Llama-3.1-8B"}),
    ("create_model", {**CREATE, "base_model": None}),
    ("create_model", {**CREATE, "lora_config": None}),
    ("create_model", {**CREATE, "lora_config": {"rank": 0}}),
    ("create_model", {**CREATE, "lora_config": {"rank": 64}}),
    ("create_model", {**CREATE, "lora_config": {"rank": 8, "train_mlp": False}}),
    ("create_model", {**CREATE, "lora_config": {"rank": 8, "train_attn": False}}),
    ("create_model", {**CREATE, "lora_config": {"rank": 8, "seed": 2**70}}),
    ("create_model", {**CREATE, "optimizer_config": {"type": "dimuon"}}),
    ("create_model", {**CREATE, "model_seq_id": -1}),
    ("get_info", {"model_id": "../../etc"}),
    ("get_info", {"model_id": f"{UNKNOWN}:train:0"}),
    ("optim_step", {"model_id": M, "adam_params": ADAM}),
    ("optim_step", {"model_id": M, "seq_id": 0, "adam_params": ADAM}),
    ("optim_step", {"model_id": M, "seq_id": 2**40, "adam_params": ADAM}),
    ("optim_step", {"model_id": M, "seq_id": 500_000, "adam_params": ADAM}),
    ("optim_step", {"model_id": M, "seq_id": 1}),
    ("optim_step", {"model_id": M, "seq_id": 1, "adam_params": {"learning_rate": float("nan")}}),
    ("optim_step", {"model_id": M, "seq_id": 1, "adam_params": {"beta1": 1.0}}),
    ("optim_step", {"model_id": M, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": "../outside"}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": "/etc/passwd"}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": ".."}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": "a/b"}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": "x" * 200}),
    ("save_weights", {"model_id": M, "seq_id": 1, "path": "one", "ttl_seconds": 0}),
    ("save_weights_for_sampler", {"model_id": M, "seq_id": 1}),
    ("save_weights_for_sampler", {"model_id": M, "seq_id": 1, "path": "a", "sampling_session_seq_id": 1}),
    ("save_weights_for_sampler", {"model_id": M, "seq_id": 1, "path": "~1"}),
    ("load_weights", {"model_id": M, "seq_id": 1, "path": "/etc", "optimizer": True}),
    ("load_weights", {"model_id": M, "seq_id": 1, "path": f"tinker://{M}/weights/none", "optimizer": True}),
    ("load_weights", {"model_id": M, "seq_id": 1, "path": f"tinker://{M}/weights/../../x", "optimizer": True}),
    ("create_sampling_session", {"session_id": S, "sampling_session_seq_id": 0}),
    ("create_sampling_session", {"session_id": S, "sampling_session_seq_id": 0, "base_model": "other"}),
    (
        "create_sampling_session",
        {"session_id": S, "sampling_session_seq_id": 0, "model_path": f"tinker://{M}/weights/a"},
    ),
    ("asample", {}),
    ("asample", {**SAMPLE, "sampling_session_id": "unknown", "seq_id": 0}),
    ("asample", {**SAMPLE, "prompt": {"chunks": []}}),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1000]}]}}),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [90]}]}}),
    ("asample", {**SAMPLE, "prompt": {"chunks": [{"type": "image", "format": "png", "data": "AAAA"}]}}),
    ("asample", {**SAMPLE, "num_samples": 0}),
    ("asample", {**SAMPLE, "num_samples": 10**9}),
    ("asample", {**SAMPLE, "prompt_logprobs_last_n": 5}),
    ("asample", {**SAMPLE, "prompt_alt_tokens_k": 2}),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {"data": [1], "dtype": "int64"}}),
    ("asample", with_params(temperature=-1)),
    ("asample", with_params(top_p=0)),
    ("asample", with_params(max_tokens=10**6)),
    ("asample", with_params(stop={"a": 1})),
    ("asample", with_params(stop=[1, "a"])),
    ("retrieve_future", {}),
    ("retrieve_future", {"request_id": f"{M}:99"}),
    ("retrieve_future", {"request_id": f"{M}:{'9' * 30}"}),
    ("retrieve_future", {"request_id": f"{M}:{'9' * 10}"}),
    ("retrieve_future", {"request_id": f"{M}:²"}),
    ("weights_info", {"tinker_path": "tinker://a/b/c"}),
]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def module_url(server_url: str) -> Generator[str]:
    """One database for all: nothing in it changes."""
    run_sql(server_url, f"CREATE DATABASE malformed TEMPLATE {TEMPLATE}")
    yield with_database(server_url, "malformed")
    drop_database(server_url, "malformed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(module_url: str, folder: Path) -> AsyncGenerator[Client]:
    async with running(module_url, folder) as client:
        yield client


TABLES = ("sessions", "models", "checkpoints", "samplers")


async def counts(client: Client, url: str, folder: Path) -> object:
    """What must not change."""
    rows = [run_sql(url, f"SELECT count(*) FROM tinker_{table}") for table in TABLES]
    done = run_sql(url, "SELECT count(*) FROM tinker_requests WHERE status <> 'refused'")
    return rows, done, list(client.host.done), sorted(folder.rglob("*")), client.server.asked


def placed(value: Any, ids: Mapping[str, str]) -> Any:
    """The value with real ids."""
    if isinstance(value, str):
        for name, known in ids.items():
            value = value.replace(name, known)
        return value
    if isinstance(value, dict):
        return {key: placed(item, ids) for key, item in value.items()}
    return [placed(item, ids) for item in value] if isinstance(value, list) else value


def require_refusal(status: int, text: str) -> None:
    assert 400 <= status < 500, text
    assert status not in (408, 409, 429)  # which the SDK sends again, for minutes
    assert "Traceback" not in text
    assert 'File "' not in text
    assert len(text) > len('{"error":""}') + 10


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_malformed_request_is_refused_with_a_reason_and_changes_nothing(
    path: str, body: object, client: Client, module_url: str, folder: Path
) -> None:
    session_id = await client.session()
    ids = {S: session_id, M: await client.create(session_id)}
    before = await counts(client, module_url, folder)
    answer = await client.send("POST", placed(path, ids), content=json.dumps(placed(body, ids)))
    require_refusal(answer.status_code, answer.text)
    assert await counts(client, module_url, folder) == before


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", PROTOBUF),
        (b"\xff" * 100, PROTOBUF),
        (text_pass(f"{UNKNOWN}:train:0", 1), PROTOBUF),
        (text_pass(M, 1), {"Content-Type": "application/json"}),
        (text_pass(M, 1), {**PROTOBUF, "Content-Encoding": "gzip"}),
        (text_pass(M, 1), {**PROTOBUF, "Content-Encoding": "zstd"}),
        (text_pass(M, 0), PROTOBUF),
        (text_pass(M, -1), PROTOBUF),
        (text_pass(M, 1, float("nan")), PROTOBUF),
        (b"{", {"Content-Type": "application/json"}),
    ],
)
async def test_a_malformed_pass_is_refused_with_a_reason_and_changes_nothing(
    content: bytes, headers: Mapping[str, str], client: Client, module_url: str, folder: Path
) -> None:
    model_id = await client.create(await client.session())
    before = await counts(client, module_url, folder)
    if content.startswith(b"\x0a\x05MODEL"):  # field 1, a text of 5 bytes
        content = b"\x0a" + bytes([len(model_id)]) + model_id.encode() + content[7:]
    answer = await client.send("POST", "forward_backward", content=content, headers=headers)
    require_refusal(answer.status_code, answer.text)
    assert await counts(client, module_url, folder) == before


@pytest.mark.parametrize(
    "path",
    [
        *("", "nothing", "training_runs?limit=0", "training_runs?offset=-1", "sessions?limit=²"),
        *("sessions/%00", "training_runs/a%00/checkpoints", "samplers/%00"),
    ],
)
async def test_an_address_that_is_none_or_asks_for_too_much_is_refused(path: str, client: Client) -> None:
    answer = await client.send("GET", path)
    require_refusal(answer.status_code, answer.text)


@pytest.mark.parametrize("path", ["create_session", "asample", "retrieve_future", "create_model", "optim_step"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500])
async def test_a_body_that_is_no_json_is_refused(path: str, content: bytes, client: Client) -> None:
    answer = await client.send("POST", path, content=content)
    require_refusal(answer.status_code, answer.text)


async def test_a_body_that_grows_beyond_the_limit_when_it_is_decompressed_is_refused_as_too_large(
    client: Client,
) -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28 + 2**20))
    answer = await client.send(
        "POST", "forward_backward", content=bomb, headers={**PROTOBUF, "Content-Encoding": "zstd"}
    )
    assert len(bomb) < 2**20
    assert answer.status_code == 413


async def test_a_body_that_needs_more_memory_to_decompress_than_every_decoder_has_is_refused(client: Client) -> None:
    zstandard = pytest.importorskip("zstandard")
    wide = zstandard.ZstdCompressionParameters.from_level(19, window_log=27)
    compressed = zstandard.ZstdCompressor(compression_params=wide).compressobj()  # whose size is not known beforehand
    body = compressed.compress(bytes(2**20)) + compressed.flush()
    answer = await client.send(
        "POST", "forward_backward", content=body, headers={**PROTOBUF, "Content-Encoding": "zstd"}
    )
    require_refusal(answer.status_code, answer.text)
    assert "expected a body in zstd" in answer.text


async def test_bodies_are_decompressed_no_further_than_the_bodies_of_a_key_may_have_room() -> None:
    zstandard = pytest.importorskip("zstandard")
    request = Request(
        {"type": "http", "headers": [(b"content-encoding", b"zstd")]},
        receive_once(zstandard.ZstdCompressor().compress(bytes(2**28))),
    )
    tracemalloc.start()
    with BodyBudget(2**24).hold() as held, pytest.raises(RequestRefused, match="at most 16777216 bytes"):
        await plain_body(request, held)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 3 * 2**24


def receive_once(body: bytes) -> Receive:
    """What a server that has received all of a body gives to an app."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive

"""Attacks on a Tinker service, and on a run that trains on one."""

import os
import subprocess
import sys
import threading
import time
from array import array
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import psutil
import zstandard
from PIL import Image

from cua_rl.command_line.recipe import EXIT_CONFIG
from cua_rl.host.processes import free_port
from cua_rl.tinker_service.messages import new_message
from cua_rl.types.json_values import Json
from scripts.listeners import answer_to_stranger, gave_something, list_listeners
from scripts.red_team.doors import connection_costs
from scripts.red_team.findings import Findings, Targets, check, check_all, check_cost, skipped
from scripts.red_team.floods import Server, cost_of, many_scans, upload
from scripts.red_team.targets import ALL_CANARIES, CANARIES, TINKER_KEY, TinkerProcess, command_line
from scripts.red_team.users import STRANGER_UID, as_user

_ENDED_S = 300.0
_FLOOD_MB = 250
_TRAIN = "import sys; sys.path.append(sys.argv.pop(1)); from cua_rl.recipes.train import main; sys.exit(main())"


def attack_tinker_service(targets: Targets) -> Findings:
    """Row 22: strangers, then the holder of a key, attack a service, others who have a key, and what it stores."""
    service = targets.tinker
    server = Server(
        base_url=service.address,
        pid=service.process.pid,
        others_ask="/api/v1/get_server_capabilities",
        key=service.other_key,
    )
    yield from _attack_without_key(service, server)
    yield from _attack_other_key(service)
    yield from _flood(service, server)
    yield from _look_for_keys(service)


def _attack_without_key(service: TinkerProcess, server: Server) -> Findings:
    paths = ("create_session", "forward_backward", "asample", "retrieve_future", "weights_info")
    for key in ("", "tml-wrong", TINKER_KEY.encode().hex()):
        got = {path: service.ask(path, {}, key).status_code for path in paths}
        yield check(22, f"requests with the key {key[:9]!r}", "401", set(got.values()), set(got.values()) == {401})
    for attack, cost in connection_costs(server, "/api/v1/asample"):
        yield check_cost(22, f"{attack} to a Tinker service", cost)
    cost, status = cost_of(server, partial(upload, server, "/api/v1/asample", 120))
    yield check_cost(22, "120 MB without a key to a Tinker service", cost)
    yield check(22, "120 MB without a key: answer", "401 or hung up", status, status in (0, 401))
    if os.geteuid() != 0:
        yield skipped(22, "a Tinker service as another user", "needs root, which can become another user")
        return
    ours = list_listeners(service.process.pid)
    opened = [f"{each.program[:40]} {each.address}" for each in ours if not each.is_local]
    yield check_all(22, "listeners of a Tinker service beyond loopback", ours, opened)
    got = [f"{each.address}: {said}" for each in ours if gave_something(said := answer_to_stranger(each))]
    yield check_all(22, "listeners of a Tinker service that answer a stranger", ours, got)
    for path in (service.folder / "tinker").rglob("*"):
        said = as_user(STRANGER_UID, partial(_read, path))
        if not said.startswith("refused"):
            yield check(22, "a stranger reads the folder of a Tinker service", "refused", said, is_held=False)
            return
    yield check(22, "a stranger reads the folder of a Tinker service", "refused", "refused", is_held=True)


def _read(path: Path) -> str:
    if path.is_dir():
        return f"{len(list(path.iterdir()))} names"
    return f"{len(path.read_bytes())} bytes of {path}"


def _make_model(service: TinkerProcess) -> str:
    """A model of the first key; its id."""
    session = service.ask("create_session", {"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": _base_model(service), "lora_config": {"rank": 8}}
    made = service.ask("create_model", body).json()
    service.ask("retrieve_future", {"request_id": made["request_id"]})
    return str(made["model_id"])


def _base_model(service: TinkerProcess) -> str:
    offered = service.ask("get_server_capabilities", method="GET").json()
    return str(offered["supported_models"][0]["model_name"])


def _attack_other_key(service: TinkerProcess) -> Findings:
    model = _make_model(service)
    session = model.partition(":")[0]
    path, other = f"tinker://{model}/weights/mine", service.other_key
    saved = service.ask("save_weights", {"model_id": model, "seq_id": 1, "path": "mine"}).json()
    service.ask("retrieve_future", {"request_id": saved["request_id"]})
    asked: tuple[tuple[str, Json], ...] = (
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}),
        ("retrieve_future", saved),
        ("weights_info", {"tinker_path": path}),
        ("session_heartbeat", {"session_id": session}),
        (f"training_runs/{model}/checkpoints/weights/mine/publish", {}),
    )
    for name, body in asked:
        statuses = [service.ask(name, body, key).status_code for key in (other, TINKER_KEY)]
        is_held = statuses[0] in (403, 404) and statuses[1] == 200
        yield check(22, f"{name.split('/')[-1]} with another key, and with its own", "404, 200", statuses, is_held)
    lists = [service.ask(name, key=other, method="GET").text for name in ("sessions", "training_runs", "checkpoints")]
    found = [name for name in (session, model, path) if any(name in text for text in lists)]
    yield check(22, "what another key is shown", "nothing", found or "nothing", not found)
    for name in ("../../outside", "/tmp/outside", "..", "a/b", "a\0b", "~1"):
        status = service.ask("save_weights", {"model_id": model, "seq_id": 9, "path": name}).status_code
        yield check(22, f"a checkpoint named {name!r}", "400", status, status == 400)


def _flood(service: TinkerProcess, server: Server) -> Findings:
    """Little that becomes much, by the holder of a key; a key has room for 256 MiB of bodies, twice while they grow."""
    compress, packed = zstandard.ZstdCompressor().compress, {"Content-Encoding": "zstd"}
    wire = {"X-API-Key": TINKER_KEY, "Content-Type": "application/x-protobuf"}
    tiny = b"\x1a" + _varint(2**27) + b"\x0a\x00" * 2**26  # a datum of 67 million chunks
    floods: tuple[tuple[str, str, bytes, Mapping[str, str], int], ...] = (
        (
            "16 bodies that decompress to 250 MB each",
            "forward_backward",
            compress(bytes(_FLOOD_MB * 10**6)),
            packed,
            16,
        ),
        ("a body that decompresses to 1 GiB", "forward_backward", compress(bytes(2**30)), packed, 1),
        ("a message of 67 million parts", "forward_backward", compress(tiny), packed, 1),
        (
            "a sequence of 50 million tokens",
            "forward_backward",
            _long_sequence(_make_model(service), 50_000_000),
            {},
            1,
        ),
        ("a picture of 20,000 scans", "asample", _sample_of(many_scans(20_000)), {}, 4),
        ("a picture of 2 gigapixels", "asample", _sample_of(_huge_png()), {}, 1),
        ("JSON of 1.9 million values", "create_session", b'{"tags":[' + b"1," * 1_900_000 + b"1]}", {}, 4),
        ("JSON of 100,000 levels", "asample", b"[" * 100_000 + b"]" * 100_000, {}, 1),
        ("a message that is none", "forward_backward", os.urandom(10**6), {}, 1),
    )
    for attack, path, body, more, times in floods:
        send = partial(server.post, f"/api/v1/{path}", content=body, headers={**wire, **more})
        cost, statuses = cost_of(server, partial(_at_once, send, times))
        yield check_cost(22, attack, cost, _FLOOD_MB)
        yield check(22, f"{attack}: answer", "4xx", statuses, all(400 <= status < 500 for status in statuses))


def _at_once(send: partial[int], times: int) -> set[int]:
    with ThreadPoolExecutor(times) as pool:
        return {answer.result() for answer in [pool.submit(send) for _ in range(times)]}


def _varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + _varint(number >> 7)


def _long_sequence(model: str, num_tokens: int) -> bytes:
    message = new_message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = model, 1, "cross_entropy"
    message.data.add().model_input.add().encoded_text.tokens = array("i", [1000]).tobytes() * num_tokens
    body: bytes = message.SerializeToString()
    return body


def _sample_of(image: bytes) -> bytes:
    """A request to sample after an image."""
    kind = "jpeg" if image.startswith(b"\xff\xd8") else "png"
    chunk = f'{{"type": "image", "format": "{kind}", "data": "{b64encode(image).decode()}"}}'
    return f'{{"prompt": {{"chunks": [{chunk}]}}, "sampling_params": {{}}}}'.encode()


def _huge_png() -> bytes:
    encoded = BytesIO()
    Image.new("1", (46_000, 46_000)).save(encoded, "PNG")
    return encoded.getvalue()


def _look_for_keys(service: TinkerProcess) -> Findings:
    """The keys, and canaries of its environment, in whatever it writes; on its console is the one that it has made."""
    secrets = {*ALL_CANARIES, TINKER_KEY, service.other_key}
    files = [path for path in (service.folder / "tinker").rglob("*") if path.is_file() and not path.is_symlink()]
    found = {f"{secret} in {path.name}" for path in files for secret in secrets if secret.encode() in path.read_bytes()}
    yield check_all(22, "keys in the folder of a Tinker service, its database included", files, found)
    said = [secret for secret in secrets - {service.other_key} if secret in service.output()]
    yield check(22, "keys on the console of a Tinker service", "none", said or "none", not said)
    below = psutil.Process(service.process.pid).children(recursive=True)
    shown = {f"{secret} {each.name()}" for each in below for secret in secrets if secret in command_line(each)}
    shown |= {f"{secret} {each.name()}" for each in below for secret in secrets if secret in _environment(each)}
    yield check_all(22, "keys in command lines and environments of what it starts", below, shown)


def _environment(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.environ())
    return ""


class HostileService(ThreadingHTTPServer):
    """Answers the question of a run for its models in a way of its own, and counts what it could send."""

    def __init__(self, way: str, elsewhere: str) -> None:
        hostile = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hostile.keys.append(self.headers.get("X-API-Key", ""))
                self.send_response(307 if way == "a redirect to another host" else 200)
                self.send_header("Location", elsewhere)
                self.end_headers()
                with suppress(OSError):
                    for piece in hostile.pieces(way):
                        self.wfile.write(piece)
                        hostile.num_bytes += len(piece)

            def log_message(self, format: str, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Answer)
        self.keys: list[str] = []
        self.num_bytes = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @staticmethod
    def pieces(way: str) -> Iterator[bytes]:
        """The body."""
        match way:
            case "a body without end":
                while True:
                    yield b" " * 2**16
            case "a byte each second":
                while True:
                    yield b" "
                    time.sleep(1)
            case "names that command a terminal":
                yield b'{"supported_models": [{"model_name": "\\u001b]0;x\\u0007\\u001b[2J"}]}'
            case _:
                yield b'{"supported_models": [{"trainable": NaN}]}'


WAYS = (
    *("garbage", "names that command a terminal", "a redirect to another host"),
    *("a body without end", "a byte each second"),
)


def attack_tinker_run(targets: Targets) -> Findings:
    """Row 23: a run with training=tinker asks a service that is none, and one that takes its key."""
    sdk = targets.folder / "sdk"
    (sdk / "tinker").mkdir(parents=True)
    (sdk / "tinker" / "__init__.py").touch()  # only looked for: no run gets as far as using it
    with HostileService("garbage", "") as elsewhere:
        for way in WAYS:
            with HostileService(way, elsewhere.url) as service:
                said = _train_on(targets, sdk, service.url)
                is_held = said.startswith(f"status {EXIT_CONFIG}: ") and "\x1b" not in said and len(service.keys) == 1
                is_held = is_held and service.num_bytes < 100 * 2**20
                expected = f"status {EXIT_CONFIG}, one question, < 100 MiB"
                yield check(23, f"a Tinker service that answers with {way}", expected, said, is_held)
                service.shutdown()
        got = elsewhere.keys or "none"
        yield check(23, "keys that another host got by a redirect", "none", got, not elsewhere.keys)
        elsewhere.shutdown()
    said = _train_on(targets, sdk, f"http://127.0.0.1:{free_port()}", f"tinker_api_key={TINKER_KEY}")
    found = [canary for canary in (TINKER_KEY, *ALL_CANARIES) if canary in said]
    yield check(23, "keys in the output of a dry run", "none", found or said[-80:], not found)
    has_written = (targets.folder / "tinker_run").exists()
    yield check(23, "a folder of a dry run", "none", "one" if has_written else "none", not has_written)


def _train_on(targets: Targets, sdk: Path, url: str, *more: str) -> str:
    """Exit status and output of a dry run."""
    folder = targets.folder / "tinker_run"
    settings = ("training=tinker", f"base_url={url}", f"log_path={folder}", "dry_run=true", *more)
    key = {} if more else {"TINKER_API_KEY": TINKER_KEY}
    command = [sys.executable, "-c", _TRAIN, str(sdk), *settings]
    environment = {**targets.environment(), **CANARIES, **key}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=_ENDED_S)
    except subprocess.TimeoutExpired:
        return f"no end within {_ENDED_S:g} s"
    return f"status {done.returncode}: {done.stdout}{done.stderr}"

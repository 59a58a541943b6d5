"""What travels between controller and worker."""

import pickle
import random
import socket
import struct
import subprocess
import sys
from pathlib import Path
from threading import Thread

from cua_rl.training import wire
from cua_rl.training.link import WorkerLink
from cua_rl.training.ranks import Ranks
from cua_rl.training.worker import serve
from cua_rl.types.codec import decode, encode
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum


def test_equal_images_travel_once_and_come_back_in_place() -> None:
    rng = random.Random(0)
    png = draw_screenshot(rng, width=320, height=320) + rng.randbytes(100_000)
    datums = tuple(make_datum(rng, [bytes(bytearray(png))] * 2, text=4) for _ in range(4))
    request = wire.Forward(datums=datums, temperature=1.0, weights="base")

    payload = encode(request, wire.Request)

    assert len(payload) < 1.3 * len(png)
    assert decode(payload, wire.Request) == request


class Evil:
    """Makes a file where somebody loads its pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_a_trainer_refuses_what_is_no_request_and_takes_the_next_one(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    started = encode(wire.Started(device="cpu", num_trainable_parameters=1), wire.Reply)
    ours, theirs = socket.socketpair()
    with ours:
        trainer = Thread(target=serve, args=(WorkerLink(theirs), Ranks(), None))
        trainer.start()
        said: list[wire.Reply] = []
        for payload in (pickle.dumps(Evil(trap)), started, encode(wire.TrainerMetrics(), wire.Request)):
            ours.sendall(struct.pack(">Q", len(payload)) + payload)
            (length,) = struct.unpack(">Q", ours.recv(8, socket.MSG_WAITALL))
            said.append(decode(ours.recv(length, socket.MSG_WAITALL), wire.Reply))
    trainer.join()

    messages = [reply.message for reply in said if isinstance(reply, wire.Failed)]
    assert ["expected a cua_rl.training.wire.Start | " in message for message in messages] == [True, True, False]
    assert messages[2] == "expected Start as the first request, got TrainerMetrics"
    assert not trap.exists()


def test_the_controllers_side_imports_no_torch() -> None:
    code = "import sys, cua_rl.training.client; assert not {'torch', 'transformers', 'peft', 'vllm'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)

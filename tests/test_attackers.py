"""Attackers of `make check-security` know a refusal from a fault of their own."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from cua_rl.types.errors import CuaError
from scripts.listeners import Listener, answer_to_stranger, gave_something
from scripts.red_team.services import attack_recipe
from scripts.red_team.users import STRANGER_UID, as_user

ROOT = Path(__file__).parents[1]
ATTACKS_WITHOUT_FILES = """
import socket, sys
from scripts.red_team.users import STRANGER_UID, as_user

def connect():
    sys.path.clear()
    sys.path_importer_cache.clear()
    socket.create_connection(listener.getsockname(), timeout=10).close()
    return "connected"

listener = socket.create_server(("127.0.0.1", 0))
print(as_user(STRANGER_UID, connect))
"""


def attack_with(error: BaseException) -> str:
    def attack() -> str:
        raise error

    return as_user(STRANGER_UID, attack)


def test_an_attack_connects_where_it_cannot_read_the_files_of_this_python() -> None:
    command = [sys.executable, "-c", ATTACKS_WITHOUT_FILES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert done.stdout == "connected\n", done.stdout + done.stderr


@pytest.mark.parametrize("error", [PermissionError("closed"), ConnectionRefusedError(), psycopg.OperationalError("no")])
def test_what_the_system_or_the_database_denies_is_a_refusal(error: Exception) -> None:
    assert attack_with(error) == f"refused: {type(error).__name__}: {error}"


@pytest.mark.parametrize("error", [LookupError("unknown encoding: idna"), ModuleNotFoundError("x"), KeyError("a")])
def test_a_fault_of_an_attack_is_neither_a_refusal_nor_an_answer(error: Exception) -> None:
    with pytest.raises(CuaError, match=f"got status 1: broke off: {type(error).__name__}"):
        attack_with(error)


def test_an_attack_that_dies_is_neither_a_refusal_nor_an_answer() -> None:
    with pytest.raises(CuaError, match="got status 1: it ended"):
        attack_with(SystemExit(0))


def test_what_a_listener_says_to_a_stranger_is_told_from_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        listener = Listener(pid=0, program="x", kind="tcp", address=f"127.0.0.1:{port}")
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"welcome"))
        answering.start()
        answer = answer_to_stranger(listener)
        answering.join()
    refusal = answer_to_stranger(listener)

    assert (answer, gave_something(answer)) == ("welcome", True)
    assert refusal.startswith("refused: ConnectionRefusedError")
    assert not gave_something(refusal)


def test_a_recipe_gives_nothing_to_a_debugger_of_its_own_user() -> None:
    (finding,) = attack_recipe()

    assert finding.verdict == "held", finding.got

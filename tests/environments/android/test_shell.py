"""adb as a subprocess, against a stand-in for the `adb` command: output, faults, quoting, ends."""

import asyncio
import os
from pathlib import Path

import pytest

from cua_rl.environments.android.shell import AdbShell, DeviceShell, list_adb_devices, parse_adb_devices
from cua_rl.types.errors import ConfigError, DeviceError
from tests.patience import IdleClock

RUN_ON_THIS_MACHINE = '[ "$1" = -s ] && shift 2\nif [ "$1" = shell ]; then exec sh -c "$2"; fi'


def make_adb(folder: Path, script: str) -> str:
    """An executable that stands for adb; a shell script."""
    path = folder / "adb"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_command_reaches_the_phones_shell_as_one_line_and_its_output_comes_back(tmp_path: Path) -> None:
    shell = AdbShell("emulator-5554", adb=make_adb(tmp_path, RUN_ON_THIS_MACHINE))

    assert await shell.run("echo 'a  b' $((1 + 2)); echo ü") == "a  b 3\nü\n"
    assert await shell.run("printf 'one\\r\\ntwo'") == "one\ntwo"
    assert await shell.run("true") == ""


async def test_a_command_that_fails_returns_what_it_printed_with_its_complaint(tmp_path: Path) -> None:
    shell = AdbShell("emulator-5554", adb=make_adb(tmp_path, RUN_ON_THIS_MACHINE))

    assert await shell.run("echo out; echo complaint >&2; exit 3") == "out\ncomplaint\n"
    assert await shell.run("echo out; echo a warning >&2") == "out\n"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("adb: device 'emulator-5554' not found", "attach the phone"),
        ("error: device offline", "wait for the phone to boot"),
        ("adb: device unauthorized.", "accept the debugging prompt"),
        ("adb: no devices/emulators found", "attach the phone"),
        ("error: closed", "look at `adb devices`"),
    ],
)
async def test_a_phone_that_is_gone_is_a_device_error_with_advice(tmp_path: Path, said: str, advice: str) -> None:
    shell = AdbShell("emulator-5554", adb=make_adb(tmp_path, f'echo "{said}" >&2; exit 1'))

    with pytest.raises(DeviceError, match=advice) as raised:
        await shell.run("true")
    assert said in str(raised.value)
    with pytest.raises(DeviceError, match=advice):
        await shell.screenshot()


async def test_a_connection_that_breaks_in_the_middle_is_a_device_error_whatever_the_status(tmp_path: Path) -> None:
    shell = AdbShell("emulator-5554", adb=make_adb(tmp_path, "echo half of the"))

    with pytest.raises(DeviceError, match="half of the"):
        await shell.run("dumpsys window displays")


async def test_a_slow_command_is_ended_and_a_device_error(tmp_path: Path) -> None:
    shell = AdbShell("emulator-5554", adb=make_adb(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 60"), timeout_s=0.3)
    clock = IdleClock()

    with pytest.raises(DeviceError, match=r"within 0\.3 s"):
        await shell.run("sleep 60")

    assert clock.look() < 30  # the command sleeps for 60
    assert not is_running(tmp_path / "pid")


async def test_a_cancelled_command_is_ended(tmp_path: Path) -> None:
    pipe = tmp_path / "started"
    os.mkfifo(pipe)
    adb = make_adb(tmp_path, f"echo $$ > {tmp_path}/pid; echo > {pipe}; exec sleep 60")
    task = asyncio.create_task(AdbShell("emulator-5554", adb=adb).run("sleep 60"))
    await asyncio.to_thread(pipe.read_text)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not is_running(tmp_path / "pid")


def is_running(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return True


async def test_an_emulator_loads_a_snapshot_and_is_waited_for(tmp_path: Path) -> None:
    said = tmp_path / "said"
    shell = AdbShell(
        "emulator-5554", adb=make_adb(tmp_path, f'echo "$@" >> {said}; case "$*" in *emu*) echo OK;; esac')
    )

    await shell.load_snapshot("clean")

    assert said.read_text() == "-s emulator-5554 emu avd snapshot load clean\n-s emulator-5554 wait-for-device\n"


@pytest.mark.parametrize(
    "answer",
    [
        "echo 'KO: Snapshot load failed: no such snapshot'",
        "echo 'adb: device is not an emulator' >&2; exit 1",
        'echo OK; case "$*" in *wait*) exit 1;; esac',
    ],
)
async def test_a_snapshot_that_is_not_loaded_is_a_device_error(tmp_path: Path, answer: str) -> None:
    with pytest.raises(DeviceError, match="emulator-5554"):
        await AdbShell("emulator-5554", adb=make_adb(tmp_path, answer)).load_snapshot("clean")


async def test_without_adb_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="platform-tools"):
        await AdbShell("emulator-5554", adb=str(tmp_path / "absent")).run("true")


async def test_attached_phones_are_listed_with_their_state(tmp_path: Path) -> None:
    adb = make_adb(
        tmp_path,
        "echo '* daemon started successfully'\n"
        "printf 'List of devices attached\\nemulator-5554\\tdevice\\nR5\\toffline\\n\\n'",
    )

    assert await list_adb_devices(adb=adb) == {"emulator-5554": "device", "R5": "offline"}


def test_what_is_no_list_of_phones_is_a_device_error() -> None:
    with pytest.raises(DeviceError, match="List of devices attached"):
        parse_adb_devices("adb server version (41) doesn't match this client (40); killing...\n")


async def test_any_device_with_a_shell_can_be_read() -> None:
    class Box:
        async def shell(self, command: str) -> str:
            return f"ran {command}"

    assert await DeviceShell(Box()).run("id") == "ran id"  # type: ignore[arg-type]

"""Attached phones as a pool, behind a stand-in for the adb program."""

import os
from pathlib import Path

import pytest

from cua_rl.environments.adb.environment import AdbPhones
from cua_rl.environments.pool import PoolLimits, open_pool
from cua_rl.types.errors import ConfigError, DeviceLostError
from tests.environments.adb.test_device import Connection
from tests.fakes import make_task


def write_adb(folder: Path, *rows: str) -> str:
    """An `adb` that lists `rows`."""
    listing = "\\n".join(("List of devices attached", *(row.replace(" ", "\\t") for row in rows)))
    program = folder / "adb"
    program.write_text(f"#!/bin/sh\nprintf '{listing}\\n'\n")
    program.chmod(0o755)
    return os.fspath(program)


class Phones:
    """A connection per serial; those in `unplugged` are lost."""

    def __init__(self) -> None:
        self.connections: dict[str, Connection] = {}
        self.unplugged: set[str] = set()

    def connect(self, serial: str) -> Connection:
        phone = self.connections.setdefault(serial, Connection())
        outer = self

        class Wire(Connection):
            async def run(self, command: str) -> str:
                if serial in outer.unplugged:
                    raise DeviceLostError(f"device {serial!r} not found")
                phone.commands.append(command)
                return ""

        return Wire()


async def test_all_ready_phones_are_lent_one_rollout_each_and_begin_at_home(tmp_path: Path) -> None:
    phones = Phones()
    backend = AdbPhones(adb=write_adb(tmp_path, "A device", "B device", "C offline"), connect=phones.connect)

    async with open_pool(backend, max_devices=8) as pool:
        async with (
            pool.lease(make_task().device_request()) as first,
            pool.lease(make_task().device_request()) as second,
        ):
            assert {first.device_id, second.device_id} == {"A", "B"}
        async with pool.lease(make_task().device_request()) as again:
            assert again.device_id in ("A", "B")
        metrics = pool.take_metrics()

    assert (metrics["device/num_made"], metrics["device/num_reused"]) == (2, 1)
    assert all("KEYCODE_HOME" in phone.commands[0] for phone in phones.connections.values())


async def test_a_phone_that_is_unplugged_is_replaced_by_another_one(tmp_path: Path) -> None:
    phones = Phones()
    phones.unplugged.add("A")
    backend = AdbPhones(["A", "B"], adb=write_adb(tmp_path, "A device", "B device"), connect=phones.connect)

    async with open_pool(backend, max_devices=8, limits=PoolLimits(retry_first_s=0.0)) as pool:
        async with pool.lease(make_task().device_request()) as device:
            assert device.device_id == "B"
        metrics = pool.take_metrics()

    assert metrics["device/faults/lost"] == 1


@pytest.mark.parametrize(("serials", "rows"), [((), ()), (("B",), ("A device",)), ((), ("A unauthorized",))])
async def test_phones_that_are_not_there_are_refused_before_the_run(
    serials: tuple[str, ...], rows: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="adb_serials: expected attached phones"):
        async with AdbPhones(serials, adb=write_adb(tmp_path, *rows)):
            pass

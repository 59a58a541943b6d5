"""Attached phones as a pool, behind a stand-in for the adb program."""

import os
import time
from hashlib import sha256
from io import BytesIO
from itertools import count
from pathlib import Path

import pytest
from PIL import Image

from cua_rl.environments.adb.device import AndroidDevice
from cua_rl.environments.adb.environment import AdbPhones
from cua_rl.environments.pool import DeviceRequest, PoolLimits, open_pool
from cua_rl.rollout.branches import BranchingSettings, Fork, RetoldDevice
from cua_rl.types.actions import Button, PressButton
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError, DeviceError, DeviceLostError
from cua_rl.types.rollout import AgentTurn, Turn
from tests.builders import model_turn, prompt, text
from tests.environments.adb.test_device import Connection
from tests.fakes import make_task
from tests.rollout.test_branches import UNSOLVED, count_siblings, run


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


class Screen(Connection):
    """A phone whose status bar shows the time, which nothing sets back, and under it what was put in since it began."""

    num_seconds = count()

    async def run(self, command: str) -> str:
        if "am kill-all" in command:
            self.commands.clear()
            return ""
        return await super().run(command)

    async def screenshot(self) -> bytes:
        image = Image.new("RGB", (200, 400), "#" + sha256("\n".join(self.commands).encode()).hexdigest()[:6])
        image.paste((next(self.num_seconds) % 256, 0, 0), (0, 0, 200, 20))
        file = BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


class KeepingScreen(Screen):
    """An app in front keeps its page, whatever ends those behind it; only a snapshot brings the first one back."""

    async def run(self, command: str) -> str:
        return "" if "am kill-all" in command else await super().run(command)

    async def load_snapshot(self, name: str) -> None:
        if name != "clean":
            raise DeviceError(f"KO: no snapshot {name}")
        self.commands.clear()


class QuickPhones(AdbPhones):
    """Phones whose screens need no time to settle."""

    async def make(self, request: DeviceRequest) -> AndroidDevice:
        device = await super().make(request)
        assert isinstance(device, AndroidDevice)
        device._settle_s = 0.0
        return device


async def test_emulators_that_load_a_snapshot_can_be_branched_whatever_parents_left_on_them(tmp_path: Path) -> None:
    screens = {f"emulator-{number}": KeepingScreen() for number in (5554, 5556)}
    adb = write_adb(tmp_path, *(f"{name} device" for name in screens))
    phones = QuickPhones(adb=adb, connect=screens.__getitem__, snapshot="clean")
    assert phones.abilities.is_repeatable
    assert not AdbPhones(adb=adb).abilities.is_repeatable

    sampling = await run(UNSOLVED, BranchingSettings(num_siblings=2), backend=phones, moving_top=0.06, num_kept=2)

    assert count_siblings(sampling.group) == 4


async def test_a_snapshot_that_an_emulator_cannot_load_is_refused_before_the_run(tmp_path: Path) -> None:
    adb = write_adb(tmp_path, "emulator-5554 device")
    with pytest.raises(ConfigError, match="adb_snapshot: expected emulators that load 'old', got: KO: no snapshot old"):
        async with AdbPhones(adb=adb, connect=lambda _: KeepingScreen(), snapshot="old"):
            pass


def turn_of(seen: EncodedImage | None, *, respond_s: float = 0.0) -> Turn:
    model = model_turn(prompt(text(1)), (2,))
    agent = AgentTurn(response_id=model.response_id, before=seen, durations_s={"respond": respond_s})
    return Turn(index=0, model=model, agent=agent)


async def test_turns_taken_over_on_a_phone_show_what_was_recorded_whatever_its_clock_says() -> None:
    recorded, phone = (AndroidDevice(Screen(), device_id=name, settle_s=0.0) for name in "AB")
    parent = turn_of(await recorded.observe())
    retold = RetoldDevice(phone, fork=Fork(arrival=parent, moving_top=0.06), taken=[])
    assert await retold.observe() == parent.agent.before != await phone.observe()

    for broken in (b"no picture", None):
        seen = None if broken is None else EncodedImage(data=broken, format="png", width_px=200, height_px=400)
        with pytest.raises(DeviceError, match="UnidentifiedImageError" if broken else "recorded before it, None"):
            await RetoldDevice(phone, fork=Fork(arrival=turn_of(seen), moving_top=0.06), taken=[]).observe()
    await phone.execute(PressButton(button=Button.RECENTS))
    with pytest.raises(DeviceError, match="turn 1: expected the screenshot that was recorded before it"):
        await retold.observe()


async def test_programs_get_the_time_to_load_that_the_parents_model_took() -> None:
    phone = AndroidDevice(Screen(), device_id="A", settle_s=0.0)
    seen = await phone.observe()
    fork = Fork(turns=(turn_of(seen, respond_s=0.2),), arrival=turn_of(seen))
    clock = time.monotonic()
    await RetoldDevice(phone, fork=fork, taken=[]).execute(PressButton(button=Button.HOME))
    assert time.monotonic() - clock >= 0.2


@pytest.mark.parametrize(("serials", "rows"), [((), ()), (("B",), ("A device",)), ((), ("A unauthorized",))])
async def test_phones_that_are_not_there_are_refused_before_the_run(
    serials: tuple[str, ...], rows: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="adb_serials: expected attached phones"):
        async with AdbPhones(serials, adb=write_adb(tmp_path, *rows)):
            pass

"""Boxes come with the run's labels, are terminated, and are looked for again."""

from io import BytesIO
from itertools import count

import pytest
from PIL import Image

from cua_rl.environments.gbox.boxes import RUN_LABEL, GboxBoxes
from cua_rl.environments.gbox.service import make_gbox
from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.device import take_screenshot
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.pool import PoolLimits, open_pool
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.types.errors import ConfigError, DeviceError
from tests.doubles import gbox_phone
from tests.doubles.gbox_phone import PhoneBox
from tests.doubles.gbox_service import GboxService
from tests.fakes import make_task
from tests.rollout.test_branches import UNSOLVED, count_siblings, run

LIMITS = PoolLimits(retry_first_s=0.01, lease_timeout_s=5.0)


async def test_a_box_says_for_which_run_and_rollout_it_is_and_when_it_ends(gbox: GboxService) -> None:
    async with open_pool(gbox.backend_with(expires_s=600.0), max_devices=1) as pool:
        async with pool.lease(make_task("train_01").device_request("r17")):
            (box,) = gbox.double.boxes.values()

    assert box.config["expiresIn"] == "600000ms"
    labels = {"cua_rl_run": "a-run", "cua_rl_run_name": "run", "cua_rl_task": "train_01", "cua_rl_rollout": "r17"}
    assert box.config["labels"] == labels
    assert gbox.double.alive == []


async def test_creation_is_tried_again_after_refusals_timeouts_and_failures(gbox: GboxService) -> None:
    gbox.double.faults.creations += [429, 408, 503]

    async with open_pool(gbox.backend(), max_devices=1, limits=LIMITS) as pool:
        async with pool.lease(make_task().device_request()) as device:
            assert device.device_id == "box-0"
        metrics = pool.take_metrics()

    assert {kind: metrics[f"device/faults/{kind}"] for kind in ("quota", "time_limit", "service")} == {
        "quota": 1,
        "time_limit": 1,
        "service": 1,
    }


async def test_a_box_whose_screen_cannot_be_seen_is_terminated_and_replaced(gbox: GboxService) -> None:
    gbox.double.faults.actions += [404]  # lost between creation and first screenshot

    async with open_pool(gbox.backend(), max_devices=1, limits=LIMITS) as pool:
        async with pool.lease(make_task().device_request()) as device:
            assert gbox.double.alive == [device.device_id]

    assert gbox.double.alive == []


async def test_siblings_on_boxes_see_what_their_parents_saw_whatever_the_clock_says(
    gbox: GboxService, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_seconds = count()

    def draw_clock(box: PhoneBox) -> bytes:
        image = Image.open(BytesIO(take_screenshot(box.state, 1).data))
        image.paste((next(num_seconds) % 256,) * 3, (0, 0, WIDTH, 16))
        file = BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    monkeypatch.setattr(PhoneBox, "draw", draw_clock)
    monkeypatch.setattr(gbox_phone, "make_phone_state", lambda seed: make_phone_state(3))
    backend = gbox.backend()
    assert backend.abilities.is_repeatable

    sampling = await run(UNSOLVED, BranchingSettings(num_siblings=2), backend=backend, moving_top=0.06)

    assert count_siblings(sampling.group) == 4
    assert len(gbox.double.boxes) == 8
    assert gbox.double.alive == []


async def test_what_an_earlier_attempt_left_is_removed_at_the_start_and_other_runs_boxes_are_not(
    gbox: GboxService,
) -> None:
    for _ in range(105):  # more than a page of the list
        gbox.double.add_box("linux", {RUN_LABEL: "a-run"})
    other = gbox.double.add_box("linux", {RUN_LABEL: "another-run"})

    async with gbox.backend():
        assert gbox.double.alive == [other.box_id]


async def test_a_box_that_would_not_end_is_removed_at_the_end_of_the_run(gbox: GboxService) -> None:
    async with open_pool(gbox.backend(), max_devices=1, limits=LIMITS) as pool:
        async with pool.lease(make_task().device_request()):
            gbox.double.faults.num_failed_terminations = 4  # as often as it is tried
        assert len(gbox.double.alive) == 1

    assert gbox.double.alive == []


async def test_a_wrong_key_ends_the_run_before_anything_is_made(gbox: GboxService) -> None:
    backend = GboxBoxes(
        connect=lambda: make_gbox("wrong", gbox.base_url), box_type="android", run_name="run", run_key="a-run"
    )

    with pytest.raises(ConfigError, match="expected a key that GBox at") as caught:
        async with backend:
            pass

    assert "wrong" not in str(caught.value)


async def test_a_server_that_is_not_there_is_a_fault_of_the_service() -> None:
    backend = GboxService(None, "http://127.0.0.1:9/api/v1/").backend()  # type: ignore[arg-type]

    with pytest.raises(DeviceError, match="no connection"):
        async with backend:
            pass

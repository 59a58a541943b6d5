"""What the planner reads of a run is what the recorder wrote."""

from dataclasses import replace

import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import TrainingEnded
from cua_rl.monitor.databases import open_database
from cua_rl.planning.calibration import load_recorded_run
from cua_rl.planning.fleet import Placement
from cua_rl.run_folder.recorded_run import find_training_id
from cua_rl.types.errors import ConfigError
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start, step_end
from tests.real.database.test_branches import grown_group

CONFIG: dict[str, object] = {
    "base_url": None,
    "group_size": 2,
    "gpu_plan": {
        "server": {"gpus": ["0", "1"], "tensor_parallel": 2, "copies": 1},
        "trainer": {"gpus": ["2"], "num_processes": 1},
    },
    "memory_plan": {"settings": {"server.max_num_seqs": 64}},
}


async def test_rollouts_requests_and_steps_of_a_run_are_read_for_calibration(url: str) -> None:
    groups = [make_group(1, group_id="group-1"), grown_group()]
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(replace(start(), config=CONFIG))
        for step, group in enumerate(groups, start=1):
            for event in (*source_events(group, step=step), step_end(group, step)):
                await recorder.record(event)
        await recorder.record(TrainingEnded(status="completed"))

    database = open_database(url)
    try:
        run = await load_recorded_run(database, await find_training_id(database, None), "run")
        run_sql(url, "UPDATE screenshots SET data = NULL")  # as if they lay in a store
        stored = await load_recorded_run(database, await find_training_id(database, None), "run")
    finally:
        await database.engine.dispose()

    assert stored.screen_kb == run.screen_kb > 0
    rollouts = [rollout for group in groups for rollout in group.rollouts]  # faulty ones say nothing
    assert sorted(round(found.run.end_s - found.run.start_s, 6) for found in run.rollouts) == sorted(
        round(rollout.duration_s, 6) for rollout in rollouts
    )
    asked = {round(turn.model.started_at, 5): turn.model.duration_s for one in rollouts for turn in one.own_turns}
    # what a sibling shares with its parent was asked once
    assert sum(len(found.requests) for found in run.rollouts) == sum(len(one.own_turns) for one in rollouts)
    for found in run.rollouts:
        for request in found.requests:
            assert request.end_s - request.start_s == pytest.approx(asked[round(request.start_s, 5)], abs=1e-5)
    assert [step.metrics["loss/policy"] for step in run.steps] == [0.1 + 0.2] * 2
    assert run.steps[0].ended_at <= run.steps[1].ended_at
    assert run.placement == Placement(
        num_servers=1, gpus_per_server=2, num_trainers=1, is_shared=False, max_requests=64
    )


async def test_a_run_of_one_step_is_too_little(url: str) -> None:
    group = make_group(1)
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (replace(start(), config=CONFIG), *source_events(group), step_end(group)):
            await recorder.record(event)

    database = open_database(url)
    try:
        with pytest.raises(ConfigError, match="from_run: expected a run with at least two completed steps, got 1"):
            await load_recorded_run(database, await find_training_id(database, None), "run")
    finally:
        await database.engine.dispose()

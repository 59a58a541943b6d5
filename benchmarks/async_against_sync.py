"""Rollouts per hour of the asynchronous loop against the synchronous one, on slow devices: one JSON line per figure.

    python -m benchmarks.async_against_sync [--steps 30] [--devices 128 256]

The loops are the real ones; devices, model and trainer are simulated in virtual time, so the figures do not depend on
the machine. Both loops have the same devices. A turn takes lognormal seconds on the device (mean 2, sigma 1, the 99.9th
percentile is 27 s) and lognormal seconds in the model (mean 1, sigma 0.5); a rollout has 2 to 20 turns, short ones more
often (geometric); a training step takes 10 s (so much for each rollout), a publication 1 s. The limits beside the
figures: `device_limit` is devices over the mean rollout, as if no device ever idled; `trainer_limit` is a batch per
training step.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.claims import require
from cua_rl.events import BatchTaken, GroupEnded
from cua_rl.planning.fleet import Spread
from cua_rl.planning.virtual_time import run_in_virtual_time
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rollout.limit import LimitedRunner, RolloutLimit
from cua_rl.rollout.run import RolloutJob
from cua_rl.training.config import LossConfig
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types.rollout import AdapterRef, Datum, ModelTurn, Rollout
from tests import builders
from tests.fakes import FakePolicy, FakeRecorder, FakeTrainer, make_task
from tests.rl.test_sync_loop import Log, Seeds, settings

TRAIN_S, PUBLISH_S = 10.0, 1.0
DEVICE_S, DEVICE_SIGMA = 2.0, 1.0
MODEL_S, MODEL_SIGMA = 1.0, 0.5
GROUPS_PER_BATCH, GROUP_SIZE = 16, 8


class SlowTrainer(FakeTrainer):
    """A training step takes its time."""

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        num_rollouts = len({datum.rollout_id for datum in datums})
        await asyncio.sleep(TRAIN_S * num_rollouts / (GROUPS_PER_BATCH * GROUP_SIZE))
        return await super().forward_backward(datums, loss, **beside)


class SlowPolicy(FakePolicy):
    """A publication takes its time; what is sampled meanwhile is the policy before it."""

    def __init__(self, trainer: FakeTrainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.served_version = 0

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        await asyncio.sleep(PUBLISH_S)
        self.served_version = saved.adapter.policy_version
        return await super().serve(saved)


class SlowDevices:
    """Runs rollouts that do nothing but take their time, the same times in both loops."""

    def __init__(self, policy: SlowPolicy) -> None:
        self.policy = policy
        self.busy_s = 0.0
        self.durations_s: list[float] = []

    async def run(self, job: RolloutJob) -> Rollout:
        """A rollout whose length is a function of its task instance and member alone."""
        random = Random(f"{job.task.seed}-{job.member_index}")
        loop, models = asyncio.get_running_loop(), list[ModelTurn]()
        began = loop.time()
        num_turns = min(20, 2 + int(random.expovariate(1 / 6)))
        for turn in range(num_turns):
            version = self.policy.served_version
            await asyncio.sleep(lognormal(random, MODEL_S, MODEL_SIGMA) + lognormal(random, DEVICE_S, DEVICE_SIGMA))
            models.append(
                builders.model_turn(builders.prompt(builders.text(*range(1, 2 + 3 * turn))), policy_version=version)
            )
        self.durations_s.append(loop.time() - began)
        reward = float(random.random() < 0.5)
        return builders.rollout(*models, reward=reward, rollout_id=f"{job.task.seed}-{job.member_index}")


class NumberedSeeds(Seeds):
    """Every place of the run has its own seed."""

    def batch(self, number: int, num_tasks: int) -> list[Any]:
        return [make_task(seed=number * num_tasks + index) for index in range(num_tasks)]


def lognormal(random: Random, mean: float, sigma: float) -> float:
    """A lognormal number with this mean (not the mean of its logarithm)."""
    return Spread(mean=mean, sigma=sigma).draw(random)


async def measure(max_lag: int, num_steps: int, num_devices: int) -> dict[str, Any]:
    """One run; `max_lag` 0 is synchronous."""
    trainer = SlowTrainer()
    policy = SlowPolicy(trainer)
    devices, recorder, log = SlowDevices(policy), FakeRecorder(), Log()
    limit = RolloutLimit(largest=num_devices)
    chosen: LoopSettings = settings(
        max_steps=num_steps, groups_per_batch=GROUPS_PER_BATCH, group_size=GROUP_SIZE, save_every=0
    )
    parts = LoopParts(
        tasks=NumberedSeeds(),
        runner=devices if max_lag else LimitedRunner(devices, limit),
        trainer=trainer,
        policy=policy,
        evaluator=None,
        recorder=recorder,
        log=log,
    )
    if max_lag:
        await async_loop.train(chosen, parts, max_lag=max_lag, limit=limit)
    else:
        await sync_loop.train(chosen, parts)
    largest_lag = max((metrics.get("rollout/policy_lag/max", 0.0) for _, metrics in log.steps), default=0.0)
    require(
        "steps whose rollouts take their turns on devices",
        steps=(num_steps, len(log.steps)),
        optimizer_steps=(num_steps, trainer.calls.count("optim_step")),
        every_step_has_its_rollouts=(True, len(devices.durations_s) >= num_steps * GROUPS_PER_BATCH * GROUP_SIZE),
        lag_within_its_limit=(True, largest_lag <= max_lag),
    )
    hours = asyncio.get_running_loop().time() / 3600
    num_ended = sum(isinstance(event, GroupEnded) for event in recorder.events)
    num_trained = sum(len(event.group_ids) for event in recorder.events if isinstance(event, BatchTaken))
    mean_s = fmean(devices.durations_s)
    return {
        "max_steps_off_policy": max_lag,
        "rollouts_per_hour": round(len(devices.durations_s) / hours),
        "device_limit_rollouts_per_hour": round(3600 * num_devices / mean_s),
        "trainer_limit_rollouts_per_hour": round(3600 * GROUPS_PER_BATCH * GROUP_SIZE / TRAIN_S),
        "device_busy_frac": round(sum(devices.durations_s) / (num_devices * hours * 3600), 3),
        "mean_rollout_s": round(mean_s, 1),
        "longest_rollout_s": round(max(devices.durations_s), 1),
        "discarded_groups": num_ended - (num_trained if max_lag else num_steps * GROUPS_PER_BATCH),
        "largest_lag": largest_lag,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the synchronous loop, then K = 1 to 4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--devices", type=int, nargs="*", default=[128, 256])
    options = parser.parse_args(argv)
    for num_devices in options.devices:
        synchronous: dict[str, Any] | None = None
        for max_lag in range(5):
            result = run_in_virtual_time(measure(max_lag, options.steps, num_devices))
            synchronous = synchronous or result
            speed_up = result["rollouts_per_hour"] / synchronous["rollouts_per_hour"]
            figure = {"figure": "async_against_sync", "num_devices": num_devices, "speed_up": round(speed_up, 2)}
            print(json.dumps(figure | result), flush=True)


if __name__ == "__main__":
    main()

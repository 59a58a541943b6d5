import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from cua_rl.rl.served_policy import ServedPolicy, make_probe
from cua_rl.sampling.canary import Canary
from cua_rl.training.wire import Probe
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import AdapterRef, Datum, EncodedTextChunk, ModelInput


class FolderTrainer:
    """Writes folders where adapters and checkpoints belong."""

    def __init__(self) -> None:
        self.version = 0

    async def save_state(self, path: Path) -> None:
        path.mkdir(parents=True)

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        path.mkdir(parents=True, exist_ok=True)
        return AdapterRef(path=path, policy_version=self.version)


def make_policy(folder: Path, served: list[AdapterRef], recorded: list[int], num_checkpoints: int = 3) -> ServedPolicy:
    async def no_canary() -> None:
        return

    async def serve(adapter: AdapterRef, canary: Canary | None) -> None:
        served.append(adapter)

    def record(step: int, state_path: Path, sampler_path: Path, is_interim: bool) -> None:
        recorded.append(step)
        for given_up in recorded[:-num_checkpoints]:
            shutil.rmtree(folder / "weights" / f"{given_up:06d}", ignore_errors=True)

    return ServedPolicy(
        trainer=FolderTrainer(),
        make_canary=no_canary,
        load_and_prove=serve,
        state_path=lambda step: folder / "weights" / f"{step:06d}",
        sampler_path=lambda step: folder / "sampler_weights" / f"{step:06d}",
        record_checkpoint=record,
    )


async def test_adapters_that_are_neither_recent_nor_in_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    served: list[AdapterRef] = []
    recorded: list[int] = []
    policy = make_policy(tmp_path, served, recorded)

    for step in range(6):
        await policy.publish(step)
        if step == 1:
            await policy.save_checkpoint(step, is_interim=False)

    assert sorted(path.name for path in (tmp_path / "sampler_weights").iterdir()) == [
        "000001",
        "000003",
        "000004",
        "000005",
    ]
    assert len(served) == 6
    assert recorded == [1]
    assert (tmp_path / "weights" / "000001").is_dir()


async def test_a_checkpoint_of_a_step_that_published_nothing_has_its_adapter(tmp_path: Path) -> None:
    policy = make_policy(tmp_path, [], [])

    _, sampler_path = await policy.save_checkpoint(4, is_interim=False)

    assert sampler_path.is_dir()


async def test_the_adapter_of_a_checkpoint_that_was_given_up_is_deleted_unless_somebody_holds_it(
    tmp_path: Path,
) -> None:
    policy = make_policy(tmp_path, [], [], num_checkpoints=1)
    held = await policy.publish(0)

    with policy.hold(held):
        for step in range(7):
            await policy.publish(step)
            await policy.save_checkpoint(step, is_interim=False)
        kept_while_held = sorted(path.name for path in (tmp_path / "sampler_weights").iterdir())
    await policy.publish(7)

    assert kept_while_held == ["000000", "000004", "000005", "000006"]
    assert sorted(path.name for path in (tmp_path / "sampler_weights").iterdir()) == ["000005", "000006", "000007"]


async def test_a_resumed_run_keeps_the_adapter_of_the_checkpoint_that_it_resumed_from(tmp_path: Path) -> None:
    earlier = make_policy(tmp_path, [], [])
    await earlier.publish(4)
    await earlier.save_checkpoint(4, is_interim=False)

    resumed = make_policy(tmp_path, [], [])
    for step in range(4, 9):
        await resumed.publish(step)

    # without it, the run could not be resumed from there a second time
    assert sorted(path.name for path in (tmp_path / "sampler_weights").iterdir()) == [
        "000004",
        "000006",
        "000007",
        "000008",
    ]


TEXT = ModelInput(chunks=(EncodedTextChunk(tokens=tuple(range(64))),))


class ProbedTrainer:
    """Its log-probabilities change by `effect` nats per unit of a probe's strength."""

    def __init__(self, effect: float) -> None:
        self.effect = effect
        self.saved: list[float] = []

    async def base_logprobs(self, datums: Sequence[Datum]) -> list[tuple[float, ...]]:
        return [(0.0,) + (-1.0,) * (datum.model_input.length - 1) for datum in datums]

    async def probe_logprobs(self, datums: Sequence[Datum], probe: Probe) -> list[tuple[float, ...]]:
        change = probe.strength * self.effect
        return [(0.0,) + (-1.0 - change,) * (datum.model_input.length - 1) for datum in datums]

    async def save_probe(self, path: Path, probe: Probe) -> None:
        self.saved.append(probe.strength)


async def test_the_probe_is_as_strong_as_the_model_needs_it(tmp_path: Path) -> None:
    trainer = ProbedTrainer(effect=2.0)

    adapter, canary = await make_probe(trainer, TEXT, 0.1, tmp_path)

    assert trainer.saved == [0.4]  # 0.2 * 2 is less than 0.5
    assert (adapter.path, canary.limit, canary.changes_model) == (tmp_path, 0.1, True)
    assert canary.training_logprobs is not None
    assert canary.training_logprobs[1] == pytest.approx(-1.8)


async def test_a_trainer_whose_adapter_has_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the trainer's adapter has no effect"):
        await make_probe(ProbedTrainer(effect=0.0), TEXT, 0.1, tmp_path)

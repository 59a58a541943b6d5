from pathlib import Path

from cua_rl.rl.served_policy import ServedPolicy
from cua_rl.types import AdapterRef


class FolderTrainer:
    """Writes folders where adapters and checkpoints belong."""

    def __init__(self) -> None:
        self.version = 0

    async def save_state(self, path: Path) -> None:
        path.mkdir(parents=True)

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        path.mkdir(parents=True, exist_ok=True)
        return AdapterRef(path=path, policy_version=self.version)


def make_policy(folder: Path, served: list[AdapterRef], recorded: list[int]) -> ServedPolicy:
    async def serve(adapter: AdapterRef) -> None:
        served.append(adapter)

    return ServedPolicy(
        trainer=FolderTrainer(),
        prove_and_serve=serve,
        state_path=lambda step: folder / "weights" / f"{step:06d}",
        sampler_path=lambda step: folder / "sampler_weights" / f"{step:06d}",
        record_checkpoint=lambda step, _state, _sampler: recorded.append(step),
    )


async def test_adapters_that_are_neither_recent_nor_in_a_checkpoint_are_deleted(tmp_path: Path) -> None:
    served: list[AdapterRef] = []
    recorded: list[int] = []
    policy = make_policy(tmp_path, served, recorded)

    for step in range(6):
        await policy.publish(step)
        if step == 1:
            await policy.save_checkpoint(step)

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

    _, sampler_path = await policy.save_checkpoint(4)

    assert sampler_path.is_dir()

"""The curriculum of a run: what it draws tasks by and replays, as the configuration asks for it, across resumes."""

from typing import TYPE_CHECKING

from cua_rl.recipes.log_directory import LogDirectory
from cua_rl.recipes.train_config import CLIConfig
from cua_rl.rl.curriculum import (
    GroupOutcome,
    Memory,
    ReplayBuffer,
    SuccessRates,
    SuccessRateStream,
    load_outcomes,
    newest_success_ids,
)
from cua_rl.rl.stages import TaskStream
from cua_rl.task_loader import SEED_RANGES, TaskSet

if TYPE_CHECKING:
    from cua_rl.database.recorder import DatabaseRecorder

OUTCOMES_NAME = "outcomes.jsonl"


async def load_memory(
    config: CLIConfig, folder: LogDirectory, num_done: int, recorder: "DatabaseRecorder", url: str
) -> Memory:
    """The memory after `num_done` steps: rates from the folder's outcomes, stored successes from the database.

    Raises:
        DatabaseError: a success that an earlier attempt stored is not in this database.
    """
    memory = Memory(
        rates=SuccessRates() if config.task_sampling == "success_rate" else None,
        replay=ReplayBuffer(capacity_per_task=config.replay_capacity if config.replay_successes else 0),
        outcomes_path=folder.path / OUTCOMES_NAME,
    )
    outcomes = load_outcomes(folder.path / OUTCOMES_NAME, num_done)
    if memory.rates is not None:
        memory.rates.observe(outcomes)
    await _load_successes(memory.replay, outcomes, recorder, url)
    return memory


async def _load_successes(
    replay: ReplayBuffer, outcomes: list[GroupOutcome], recorder: "DatabaseRecorder", url: str
) -> None:
    ids = newest_success_ids(outcomes, replay.capacity_per_task)
    if not ids:
        return
    from cua_rl.database.rebuild import load_rollouts
    from cua_rl.database.session import open_sessions

    await recorder.flush()  # the training has its id once its start is written
    if recorder.training_id is None:
        raise ValueError("expected TrainingStarted to be recorded before memory is loaded")
    async with open_sessions(url) as sessions, sessions() as session:
        replay.add(await load_rollouts(session, recorder.training_id, ids))


def make_task_stream(config: CLIConfig, tasks: TaskSet, memory: Memory) -> TaskStream:
    """Uniform over the templates, or by running success rate."""
    if memory.rates is None:
        return tasks
    return SuccessRateStream(
        templates=tasks.templates, seed=config.seed, instance_seeds=SEED_RANGES[tasks.split], rates=memory.rates
    )

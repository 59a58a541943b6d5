"""Search for what would have worked: `python -m cua_rl.recipes.recover log_path=runs/x`.

Takes failed rollouts of a run, does again what they did up to a turn, the last one first, and lets a checkpoint go on
`num_siblings` times. What the task's validator accepts is a demonstration of how to recover, from which
`recipes.sft data=rollouts` learns the turns after the fork. They are recorded as those of `recipes.take_over`.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import chz

from cua_rl.command_line.fields import setting, with_values
from cua_rl.command_line.recipe import run_recipe
from cua_rl.reporting.step_line import num_of
from cua_rl.run.asking import BASE, adapter_of, find_models, open_questions
from cua_rl.run.recovery import Found, Search, load_failed
from cua_rl.run.takeover import ContinuedRun, find_task, open_demonstrations, prepare_takeover
from cua_rl.run_folder.log_directory import read_checkpoints
from cua_rl.run_folder.recorded_run import find_base, open_training
from cua_rl.types.errors import DeviceError


@chz.chz
class RecoverConfig(ContinuedRun):
    """Find out how failed rollouts could have succeeded."""

    by: str | None = setting(
        None,
        "who continues: base, a step of the run, or an adapter of another run (a folder, a run, or run@step); None is "
        "the run's newest checkpoint",
    )
    num_rollouts: int = setting(16, "failed rollouts to recover from, the latest first, one of each group", at_least=1)
    num_turns: int = setting(3, "turns of each to continue from, the last first, until a sibling succeeds", at_least=1)
    num_siblings: int = setting(4, "rollouts that continue from each of these turns", at_least=1)
    max_concurrent_rollouts: int = setting(16, "maximum rollouts and devices at a time", at_least=1)
    seed: int = setting(0, "seed of the sampled answers", at_least=0)


async def cli_main(config: RecoverConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Search, record, print; raises `DeviceError` if faults ended every rollout."""
    folder = config.folder
    async with open_training(config.log_path, environ, "log_path") as run:
        failed = await load_failed(run, config.num_rollouts)
        base = await asyncio.to_thread(find_base, run, config.model_name)
        newest = [str(each.step) for each in read_checkpoints(run.folder)][-1:] or [BASE]
        (model,) = await asyncio.to_thread(find_models, run, [config.by] if config.by else newest, base)
        prepared = await prepare_takeover(
            run, failed[0], turn=2, max_turns=config.max_turns, base=base, folder=folder, environ=environ
        )
        limit = prepared.config.max_turns
        tasks = [find_task(prepared.templates, one.rollout, config.max_turns, limit) for one in failed]
        wanted = with_values(
            prepared.config,
            max_turns=max(task.max_turns for task in tasks),
            max_concurrent_rollouts=config.max_concurrent_rollouts,
        )
        prepared = replace(prepared, config=wanted)
        print(f"{model.name} goes on from {num_of(len(failed), 'failed rollout')} of {run.folder.name}", flush=True)
        adapter = adapter_of(model)
        async with (
            open_questions(run, failed[0], [model], config.server, config.base_url) as served,
            open_demonstrations(
                run, prepared, served.client, adapter, environ, tasks=tasks, group_size=config.num_siblings
            ) as demonstrations,
        ):
            search = Search(
                failed=list(zip(failed, tasks, strict=True)),
                num_siblings=config.num_siblings,
                num_turns=config.num_turns,
                seed=config.seed,
                prepared=prepared,
                demonstrations=demonstrations,
                adapter=adapter,
            )
            found = await search.run()
    _print_found(found, folder)


def _print_found(found: Sequence[Found], folder: Path) -> None:
    for one in found:
        rollout = one.recorded.rollout
        said = "not recovered" if one.turn is None else f"recovered from turn {one.turn}, {one.num_successes} times"
        of = f"in {num_of(one.num_rollouts, 'rollout')}"
        faults = f", {num_of(len(one.faults), 'fault')}, such as: {one.faults[0]}" if one.faults else ""
        print(f"{rollout.rollout_id} {rollout.task_id}: {said} {of}{faults}")
    if not any(one.num_rollouts for one in found):
        raise DeviceError(f"expected rollouts that go on, got only faults (recorded in {folder})")
    num_recovered, num_successes = sum(one.turn is not None for one in found), sum(one.num_successes for one in found)
    print(f"recovered from {num_recovered} of {num_of(len(found), 'failed rollout')} in {folder}")
    if num_successes:
        learned = f"learn from {num_of(num_successes, 'demonstration')}"
        print(f"{learned}: python -m cua_rl.recipes.sft data=rollouts from_run={folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(RecoverConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())

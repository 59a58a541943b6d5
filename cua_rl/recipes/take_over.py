"""Take over a recorded rollout: `python -m cua_rl.recipes.take_over log_path=runs/x rollout_id=... turn=3`.

On a device of the rollout's task and seed, what was done before the turn is done again, and every screenshot must be
the recorded one (below `credit.moving_top`). Then you say what the agent does (`click 120 300`, `type "tea"`,
`finish`), or with `by` a checkpoint goes on. The rollout is recorded, with the verdict of the task's validator, in a
run of its own, `demonstrations`, from whose successes `recipes.sft data=rollouts` learns what was done from then on.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.run.asking import adapter_of, find_models, load_recorded, open_questions
from cua_rl.run.by_hand import Lines, read_lines
from cua_rl.run.hand_page import serve_page
from cua_rl.run.takeover import ContinuedRun, make_person, prepare_takeover, take_over
from cua_rl.run_folder.recorded_run import find_base, open_training
from cua_rl.types.errors import DeviceError, TaskError
from cua_rl.types.rollout import Rollout, StopReason


@chz.chz
class TakeOverConfig(ContinuedRun):
    """Go on from a turn of a recorded rollout, by hand or with another checkpoint."""

    rollout_id: str = chz.field(doc="rollout to take over; a prefix of its id is enough")
    turn: int = setting(1, "first turn that is not repeated, counted from 1 as in the monitor", at_least=1)
    by: str | None = setting(
        None,
        "who continues: base, a step of the run, or an adapter of another run (a folder, a run, or run@step); None is "
        "you, at this terminal",
    )


async def cli_main(
    config: TakeOverConfig, environ: Mapping[str, str] = os.environ, *, lines: Callable[[], Lines] | None = None
) -> None:
    """Take over, print, record; raises `DeviceError` or `TaskError` for a fault. `lines` are typed by default."""
    folder = config.folder
    async with open_training(config.log_path, environ, "log_path") as run:
        recorded = await load_recorded(run, config.rollout_id)
        base = await asyncio.to_thread(find_base, run, config.model_name)
        models = [] if config.by is None else await asyncio.to_thread(find_models, run, [config.by], base)
        prepared = await prepare_takeover(
            run, recorded, turn=config.turn, max_turns=config.max_turns, base=base, folder=folder, environ=environ
        )
        print(f"{prepared.task.task_id}, seed {prepared.task.seed}: {prepared.instruction}")
        for turn in prepared.turns[: prepared.place]:
            print(f"  turn {turn.index + 1} is repeated: {', '.join(map(repr, turn.agent.actions)) or turn.model.text}")
        if models:
            async with open_questions(run, recorded, models, config.server, config.base_url) as served:
                rollout = await take_over(run, prepared, served.client, adapter_of(models[0]), environ)
        else:
            person = make_person(prepared, lines() if lines else read_lines(sys.stdin.fileno()))
            async with serve_page(person, prepared.instruction) as link:
                person.tell(f"{person.help()}\nor click and drag on {link}")
                rollout = await take_over(run, prepared, person, None, environ)
    _print_verdict(rollout, folder)


def _print_verdict(rollout: Rollout, folder: Path) -> None:
    if rollout.reward is None:
        kind = DeviceError if rollout.stop_reason is StopReason.DEVICE_ERROR else TaskError
        raise kind(f"{rollout.error} (recorded as rollout {rollout.rollout_id} in {folder})")
    print(f"rollout {rollout.rollout_id} in {folder}: {rollout.stop_reason}, {len(rollout.own_turns)} turns taken over")
    if (found := rollout.validation) is not None and not found.success:
        print(f"not done: {found.query} is {found.actual!r}, expected {found.expected!r}; nothing is learned from it")
        return
    print(f"done; learn from it: python -m cua_rl.recipes.sft data=rollouts from_run={folder}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(TakeOverConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())

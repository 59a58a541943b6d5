"""Let checkpoints answer a recorded turn: `python -m cua_rl.recipes.ask_checkpoints log_path=runs/x rollout_id=...`.

Each of them answers the turn's prompt `num_samples` times, and says how likely it finds the answer that was recorded:
by default the base model and every checkpoint of the run, which shows how the answer moved over training. The
checkpoint that sampled the answer must give it the recorded log-probabilities. Writes `answers/<rollout>-<turn>.json`
and a picture beside it, with the screenshot and where the answers click, in the run's folder; the monitor shows the
answers on the turn.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.reporting.asked import AskedTurn, print_asked, write_asked_plot
from cua_rl.reporting.json_lines import write_text
from cua_rl.run.asking import AskedRun, find_models, load_recorded, open_questions, save_answers
from cua_rl.run_folder.recorded_run import find_base, open_training
from cua_rl.types.errors import ParityError


@chz.chz
class AskConfig(AskedRun):
    """Let checkpoints answer recorded turns."""

    rollout_id: str = chz.field(doc="rollout with the turn; a prefix of its id is enough")
    turn: int | None = setting(None, "turn to answer, counted from 1 as in the monitor; None answers every turn")
    checkpoints: list[str] = setting(
        doc="checkpoints that answer: base, steps of the run, and adapters of other runs (a folder, a run, or "
        "run@step); [] is the base model and every checkpoint of the run",
        factory=list[str],
    )
    num_samples: int = setting(4, "answers of each checkpoint to a turn", at_least=1)


async def cli_main(config: AskConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Ask, print, write; raises `ParityError` if the checkpoint that sampled a turn does not reproduce it."""
    async with open_training(config.log_path, environ, "log_path") as run:
        recorded = await load_recorded(run, config.rollout_id)
        places = recorded.places(config.turn)
        base = await asyncio.to_thread(find_base, run, config.model_name)
        models = await asyncio.to_thread(find_models, run, config.checkpoints, base)
        async with open_questions(run, recorded, models, config.server, config.base_url) as questions:
            asked = [await questions.ask(recorded, place, models, config.num_samples) for place in places]
        await save_answers(run, asked)
    folder, limit = run.folder / "answers", float(run.settings["parity_limit"])
    folder.mkdir(exist_ok=True)
    for one in asked:
        place = folder / f"{one.rollout_id}-{one.turn}"
        print_asked(one)
        write_text(place.with_suffix(".json"), json.dumps(one.as_json(), indent=2) + "\n")
        await asyncio.to_thread(write_asked_plot, place.with_suffix(".png"), one)
        print(f"in {place}.json and {place.name}.png", flush=True)
    for one in asked:
        require_parity(one, limit)


def require_parity(asked: AskedTurn, limit: float) -> None:
    """Raise `ParityError` if the checkpoint that sampled a turn gives its answer other log-probabilities."""
    for one in asked.checkpoints:
        if one.is_own and not one.mean_abs_gap <= limit:
            raise ParityError(
                f"{asked.title}: expected the recorded log-probabilities from {one.name}, which sampled it, within "
                f"{limit} nats on average, got {one.mean_abs_gap:.4f}: the model server, its precision or kind of "
                "machine differs from the run's, or the adapter is another one"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(AskConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Draws samples of an import: actions on their screenshots, for a person to check before training."""

from dataclasses import dataclass
from pathlib import Path

from cua_rl.exchange.records import RolloutRecord
from cua_rl.reporting.trace_folder import draw_action

_OF_ONE = 4
"""Turns of a trajectory that are drawn at most."""


@dataclass(slots=True, kw_only=True)
class Samples:
    """A folder of pictures and a page that shows them with their tasks and calls."""

    folder: Path
    limit: int
    num_drawn: int = 0

    def draw(self, record: RolloutRecord) -> None:
        """Draw what the first turns do, until there are enough samples."""
        for turn in record.rollout.turns[:_OF_ONE]:
            if self.num_drawn >= self.limit or turn.agent.before is None:
                return
            self.folder.mkdir(exist_ok=True)
            self.num_drawn += 1
            name = f"{self.num_drawn:03d}.png"
            draw_action(turn.agent.before, turn.agent.action).save(self.folder / name)
            with (self.folder / "samples.md").open("a", encoding="utf-8") as page:
                page.write(f"## {record.task.task_id}, turn {turn.index + 1}\n\n{record.task.instruction}\n\n")
                page.write(f"![screenshot]({name})\n\n```\n{turn.model.text}\n```\n\n")

"""Read trajectories into a new run, for `recipes.sft data=rollouts` and for the monitor:
`python -m cua_rl.recipes.import_trajectories path=android_control.jsonl log_path=runs/android_control`.

It reads what `recipes.export_trajectories` wrote, without loss, and files of others (docs/trajectories.md), whose
actions become calls of our tools in the prompts of our agent, in the tokens of `model_name`.
"""

import asyncio
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Literal

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.postgres import open_own_database
from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.atif import read_atif
from cua_rl.exchange.foreign_actions import WHEEL_CLICK_PX, NoCounterpart
from cua_rl.exchange.formats import Format, Told, read_trajectories
from cua_rl.exchange.parquet import read_parquet, require_pyarrow
from cua_rl.exchange.recorder import ForeignTrajectory
from cua_rl.exchange.recording import RunWriter, write_run
from cua_rl.exchange.records import RolloutRecord, RunRecord, SourceRecord
from cua_rl.exchange.replayed import replay
from cua_rl.exchange.rows import decode_record, decode_run, read_json
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.step_line import num_of
from cua_rl.reporting.trace_folder import draw_action
from cua_rl.run_folder.log_directory import new_folder, prepare_log_directory
from cua_rl.run_folder.model_folder import find_model, make_image_renderer
from cua_rl.types.errors import ConfigError, boundary

_PER_STEP = 100
"""Trajectories per step of the run, which are shown on one page of the monitor and held in memory together."""
_DRAWN_OF_ONE = 4
"""Turns of a trajectory that are drawn at most."""


@chz.chz
class ImportTrajectoriesConfig:
    """Read trajectories into a new run."""

    path: str = chz.field(doc="file or folder with trajectories, or the folder that recipes.export_trajectories wrote")
    log_path: str = chz.field(doc="folder of the new run; it must be empty or not exist")
    format: Format | None = setting(None, "external files: their format; None detects it for each trajectory")
    device: DeviceKind | None = setting(
        None,
        "external files: kind of device; it decides which actions are taught; None reads it from the file",
    )
    display: str | None = setting(
        None,
        "external files: size of the display that coordinates refer to, such as 1280x800, or 1000x1000 for "
        "thousandths; None uses the file's, else the screenshot's",
    )
    wheel_click_px: float = setting(
        WHEEL_CLICK_PX,
        "external files: pixels per click of the mouse wheel, where distances are in clicks",
        within=(0, 10_000),
    )
    model_name: str | None = setting(
        None,
        "external files: folder or hub id of the model in whose tokens rollouts are recorded; None uses the included "
        "tiny model",
    )
    max_pixels: int | None = setting(
        None,
        "external files: maximum pixels of a screenshot as the model sees it, as max_pixels of recipes.sft; None is "
        "the model's limit",
        at_least=4096,
    )
    unreadable: Literal["stop", "skip"] = setting(
        "stop", "external files: what to do about a trajectory with an action or image that cannot be read"
    )
    limit: int | None = setting(None, "external files: maximum number of trajectories to import", at_least=1)
    samples: int = setting(
        12,
        "external files: number of screenshots to draw with their actions, in samples/ of the new run; look at them "
        "before training",
        at_least=0,
    )


async def cli_main(config: ImportTrajectoriesConfig) -> None:
    """Read, check and record; nothing is left if that fails."""
    folder = new_folder("log_path", config.log_path)
    run, write = await asyncio.to_thread(_read, folder, config)
    try:
        with prepare_log_directory(folder, "overwrite") as directory:
            async with open_own_database(folder) as url:
                writer = await asyncio.to_thread(write, url, folder)
            directory.write_config(run.config)
    except BaseException:
        with suppress(OSError):
            await asyncio.to_thread(shutil.rmtree, folder)
        raise
    print(f"{num_of(writer.num_rollouts, 'rollout')} with {num_of(writer.num_turns, 'turn')} in {folder}")
    if (folder / "samples").is_dir():
        print(f"look at them: {folder / 'samples'} has actions drawn on their screenshots")
    print(f"train on them: python -m cua_rl.recipes.sft data=rollouts from_run={config.log_path}")


@dataclass(slots=True, kw_only=True)
class Samples:
    """Pictures of what actions aim at on their screenshots, and a page with them, to look at before training."""

    folder: Path
    limit: int
    num_drawn: int = 0

    def draw(self, record: RolloutRecord) -> None:
        """Draw what the first turns do, until there are enough samples."""
        for turn in record.rollout.turns[:_DRAWN_OF_ONE]:
            if self.num_drawn >= self.limit or turn.agent.before is None:
                return
            self.folder.mkdir(exist_ok=True)
            self.num_drawn += 1
            name = f"{self.num_drawn:03d}.png"
            draw_action(turn.agent.before, turn.agent.action).save(self.folder / name)
            with (self.folder / "samples.md").open("a", encoding="utf-8") as page:
                page.write(f"## {record.task.task_id}, turn {turn.index + 1}\n\n{record.task.instruction}\n\n")
                page.write(f"![screenshot]({name})\n\n```\n{turn.model.text}\n```\n\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foreign:
    """Trajectories recorded by other systems."""

    run: RunRecord
    read: Callable[[], Iterator[Callable[[], ForeignTrajectory]]]
    """Reads the files again for each pass, because with their images they may not fit into memory."""
    num_trajectories: int
    renderer: Renderer
    skips: bool
    samples: Samples
    formats: Counter[str] = field(default_factory=Counter[str])
    """Trajectories imported of each format."""
    counts: Counter[str] = field(default_factory=Counter[str])
    """What was left out or ends early, and why."""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """The first place of each of these."""
    instructions: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Of each id of a trajectory, in the order of the files."""

    def write(self, url: str, folder: Path) -> RunWriter:
        started_at = self.run.started_at
        trajectories = self.read()
        with RunWriter(url, self.run, folder) as writer:
            for step in range(1, self.run.total_steps + 1):
                records = asyncio.run(self._replay(islice(trajectories, _PER_STEP), step))
                source = SourceRecord(
                    phase="step",
                    step=step,
                    status="completed",
                    policy_version=0,
                    group_size=1,
                    tasks=tuple(record.task for record in records),
                    started_at=started_at,
                    ended_at=started_at,
                    trained_policy_version=0,
                    datums_sha256="",
                    num_datums=0,
                    metrics={},
                )
                writer.write(source, records)
        shares = ", ".join(f"{number} {name}" for name, number in self.formats.most_common())
        print(f"{writer.num_rollouts} of {self.num_trajectories} trajectories imported ({shares or 'none'})")
        for what, number in (+self.counts).most_common():
            print(f"  {number} {what}: {self.examples[what]}" if what in self.examples else f"  {number} {what}")
        if not writer.num_rollouts:
            raise ConfigError(
                f"expected trajectories that can be read, got none of {self.num_trajectories}: "
                f"{next(iter(self.examples.values()))}"
            )
        return writer

    async def _replay(self, batch: Iterable[Callable[[], ForeignTrajectory]], step: int) -> list[RolloutRecord]:
        records: list[RolloutRecord] = []
        for parse in batch:
            try:
                named, place = self._with_own_id(parse()), len(records)
                made = await replay(named, self.renderer, step=step, index=place, started_at=self.run.started_at)
            except NoCounterpart as error:
                self._count(f"left out, whose first action ({error.name}) our tools lack", str(error))
            except ConfigError as error:
                if not self.skips:
                    raise
                self._count("left out, unreadable", str(error))
            else:
                records.append(made.record)
                self.formats[named.format] += 1
                self.samples.draw(made.record)
                if made.ends_before is not None:
                    self._count(f"end before {made.ends_before}, which our tools lack", named.where)
                for what, number in {
                    "actions with the box of the element that they aim at": sum(
                        bool(turn.agent.target_box) for turn in made.record.rollout.turns
                    ),
                    "actions only look at the screen: no turns": named.num_looks,
                    "first actions go to an app or page: no turns, the rollouts begin there": named.num_starts,
                    "first actions without a screenshot before them: no turns, rollouts begin later": named.num_unseen,
                }.items():
                    self.counts[what] += number
        return records

    def _count(self, what: str, example: str) -> None:
        self.counts[what] += 1
        self.examples.setdefault(what, example)

    def _with_own_id(self, trajectory: ForeignTrajectory) -> ForeignTrajectory:
        """The trajectory with a number behind an id that had another instruction before: they are different tasks."""
        told = self.instructions.setdefault(trajectory.trajectory_id, [])
        if trajectory.instruction not in told:
            told.append(trajectory.instruction)
        number = told.index(trajectory.instruction)
        return replace(trajectory, trajectory_id=f"{trajectory.trajectory_id}#{number + 1}") if number else trajectory


_Write = Callable[[str, Path], RunWriter]
"""Writes a run to the database at an address, and its folder."""


def _read(folder: Path, config: ImportTrajectoriesConfig) -> tuple[RunRecord, _Write]:
    path = Path(config.path).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"path: expected a file or folder with trajectories, got {config.path!r}; correct path")
    return _read_own(path, folder, config) if (path / "run.json").is_file() else _read_foreign(path, folder, config)


def _read_own(path: Path, folder: Path, config: ImportTrajectoriesConfig) -> tuple[RunRecord, _Write]:
    """A data set written by `recipes.export_trajectories`."""
    given = {"format": config.format, "model_name": config.model_name, "limit": config.limit}
    given |= {"max_pixels": config.max_pixels, "device": config.device, "display": config.display}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}: expected it only for files of others, got {value!r} for a data set of ours; leave it out"
            )
    is_parquet = (path / "data").is_dir()
    if is_parquet:
        require_pyarrow()
    with boundary(ConfigError, f"path: expected run.json of recipes.export_trajectories in {str(path)!r}"):
        run = decode_run(read_json((path / "run.json").read_text(encoding="utf-8")))
    settings = {**run.config, "run_name": folder.name, "log_path": str(folder)}
    run = replace(run, run_name=folder.name, config=settings)

    def write(url: str, folder: Path) -> RunWriter:
        with boundary(ConfigError, f"path: expected a data set of recipes.export_trajectories in {str(path)!r}"):
            return write_run(
                url, run, folder, map(decode_record, read_parquet(path) if is_parquet else read_atif(path))
            )

    return run, write


def _read_foreign(path: Path, folder: Path, config: ImportTrajectoriesConfig) -> tuple[RunRecord, _Write]:
    model_path = find_model(config.model_name)
    renderer = make_image_renderer(model_path, None, config.max_pixels)
    told = Told(
        format=config.format,
        device=config.device,
        display=_parse_display(config.display),
        wheel_click_px=config.wheel_click_px,
    )

    def read() -> Iterator[Callable[[], ForeignTrajectory]]:
        return islice(read_trajectories(path, told), config.limit)

    num_trajectories = 0
    for parse in read():
        if config.unreadable == "stop":  # the first one that is malformed ends the import before it begins
            parse()
        num_trajectories += 1
    settings = {
        "run_name": folder.name,
        "log_path": str(folder),
        "model_path": str(model_path),
        "renderer": renderer.name,
        "imported_from": str(path),
        "max_pixels": config.max_pixels,
    }
    now = time.time()
    run = RunRecord(
        run_name=folder.name,
        config=settings,
        image_token_id=renderer.image_token_id,
        total_steps=ceil(num_trajectories / _PER_STEP),
        status="completed",
        error=None,
        started_at=now,
        ended_at=now,
        sources=(),
    )
    foreign = _Foreign(
        run=run,
        read=read,
        num_trajectories=num_trajectories,
        renderer=renderer,
        skips=config.unreadable == "skip",
        samples=Samples(folder=folder / "samples", limit=config.samples),
    )
    return run, foreign.write


def _parse_display(given: str | None) -> tuple[int, int] | None:
    if given is None:
        return None
    width, _, height = given.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise ConfigError(f"display: expected width x height, such as 1280x800, got {given!r}; correct display")
    return int(width), int(height)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ImportTrajectoriesConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())

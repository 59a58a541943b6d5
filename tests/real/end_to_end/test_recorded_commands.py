"""Every documented command that names a recorded run, typed as it stands on its page, over one small recorded run.

Only what a page leaves open is filled in (the run's name, its last step, a rollout's id, the judge's address), and
numbers are made small.
"""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from cua_rl.recipes.sft import main as sft
from cua_rl.reporting.json_lines import read_records
from cua_rl.sampling.server import VllmServer
from tests.documentation.examples import Example, read_examples
from tests.documentation.test_examples import MODULES, PAGES
from tests.doubles.judge_endpoint import KEY, MODEL, JudgeEndpoint, verdict
from tests.evaluation.fake_endpoint import serve_in_thread
from tests.patience import IdleClock, patience
from tests.real.end_to_end.runs import DEADLINE_S, SMALL, Run
from tests.real.evaluation.shown import get, open_monitor

pytestmark = pytest.mark.timeout(900)

NUM_STEPS = 3
RECIPE = re.compile(r"python -m cua_rl\.recipes\.(\w+)")
NAMED_RUN = re.compile(r"runs/(?:<run>|my-run|demo|x|\.\.\.)(?=[/\s'\"]|$)")
NAMED_STEP = re.compile(r"weights/\d{6}")
SMALLER: Mapping[str, tuple[str, ...]] = {
    "train": (*SMALL, "eval_tasks=none", "max_steps=1", "monitor=false"),
    "sft": ("max_steps=1", "batch_size=2", "num_eval_conversations=1", "num_threads=1"),
    "evaluate": ("num_tasks=4",),
    "replay_step": (f"step={NUM_STEPS}",),
    "ask_checkpoints": (f"checkpoints=base,{NUM_STEPS}", "num_samples=2"),
    "take_over": ("turn=1", f"by={NUM_STEPS}"),  # nobody is at the terminal
    "recover": ("num_rollouts=2", "num_turns=1", "num_siblings=2"),
    "serve_monitor": ("port=0",),
    "prune": ("dry_run=true",),  # other commands need the screenshots
}


def recorded_commands() -> list[Example]:
    examples = [example for page in (*PAGES, *MODULES) for example in read_examples(page)]
    return [one for one in examples if one.kind == "command" and NAMED_RUN.search(one.text)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A folder with `runs/` in it, where commands are typed, and what they need besides."""

    folder: Path
    server_url: str
    judge_url: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "recorded"

    def words(self, command: str) -> list[str]:
        """The command's words, those after `python -m`, with everything that its page leaves open."""
        (recipe,) = RECIPE.findall(command)
        is_whole_model = "model_name=runs/" in command
        command = NAMED_RUN.sub("runs/whole" if is_whole_model else "runs/recorded", command)
        command = NAMED_STEP.sub(f"weights/{1 if is_whole_model else NUM_STEPS:06}", command)
        if "rollout_id=..." in command:
            command = command.replace("rollout_id=...", f"rollout_id={self._a_rollout()}")
        command = command.replace("judge.model=...", f"judge.model={MODEL} judge.base_url={self.judge_url}")
        command = command.replace("judge.model=its-name", f"judge.model={MODEL}")
        command = command.replace("https://judge.example/v1", self.judge_url)
        words = shlex.split(command, comments=True)
        smaller = SMALLER.get(recipe, ())
        if "behavior_if_log_dir_exists=resume" in command:  # with the settings of the run, all of whose steps are done
            smaller = (f"max_steps={NUM_STEPS}", "monitor=false")
        replaced = {word.partition("=")[0] for word in smaller}
        words = [word for word in words[words.index("-m") + 1 :] if word.partition("=")[0] not in replaced]
        if is_whole_model:  # of which the running server has other weights
            return [*words, *smaller, "max_model_len=4096", "dry_run=true"]
        is_served = recipe in ("train", "evaluate", "ask_checkpoints", "take_over", "recover")
        return [*words, *smaller, *([f"base_url={self.server_url}"] if is_served else [])]

    def _a_rollout(self) -> str:
        """The id of one that succeeded."""
        return re.findall(r'"success_id": "(\w+)"', (self.run / "outcomes.jsonl").read_text())[0]

    def start(self, *words: str) -> subprocess.Popen[str]:
        environ = {name: value for name, value in os.environ.items() if name not in ("DATABASE_URL", "POSTGRES_HOST")}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", *words],
            cwd=self.folder,
            env=environ | {"JUDGE_API_KEY": KEY},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *words: str) -> str:
        """What the command says, which must succeed."""
        process = self.start(*words)
        said, _ = process.communicate()
        assert process.returncode == 0, f"{shlex.join(words)}: exit status {process.returncode}\n{said[-4000:]}"
        return said


def distinct(commands: list[Example]) -> dict[str, Example]:
    """Commands by all places where they are; those that only name the run in another way are one."""
    nowhere = Recorded(folder=Path(), server_url="", judge_url="")
    places: dict[tuple[str, ...], list[Example]] = {}
    for command in commands:
        words = nowhere.words(command.text.replace("rollout_id=...", "rollout_id=one"))
        places.setdefault(tuple(words), []).append(command)
    return {" ".join(one.place for one in same): same[0] for same in places.values()}


COMMANDS = distinct(recorded_commands())


@pytest.fixture(scope="module")
def recorded(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[Recorded]:
    folder = tmp_path_factory.mktemp("place")
    (folder / "runs").mkdir()
    page = (Path(__file__).parents[3] / "docs" / "monitor.md").read_text()
    (folder / "prices.toml").write_text(re.findall(r"```toml file=prices.toml\n(gpu_hour.*?)```", page, re.DOTALL)[0])
    run = Run(folder / "runs" / "recorded", f"max_steps={NUM_STEPS}", f"base_url={server.base_url}", "monitor=false")
    whole = ["lora_rank=0", "max_steps=1", "batch_size=2", "num_eval_conversations=0", "num_threads=1"]
    assert sft([f"log_path={folder / 'runs' / 'whole'}", *whole]) == 0
    assert run.finish() == 0, run.output()
    with serve_in_thread(JudgeEndpoint(lambda asked: verdict(asked.number % 2 == 0))) as judge_url:
        yield Recorded(folder=folder, server_url=server.base_url, judge_url=judge_url)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_documented_command_works_on_a_recorded_run(recorded: Recorded, command: Example) -> None:
    words = recorded.words(command.text)
    if words[0].endswith(".serve_monitor"):
        assert_shows_the_run(recorded, words)
        return
    recorded.finish(*words)
    for word in words:
        if word.startswith("out="):
            written = recorded.folder / word.removeprefix("out=")
            files = list(written.iterdir()) if written.is_dir() else [written]
            assert sum(file.stat().st_size for file in files) > 10_000
            written.rename(written.with_name(uuid4().hex))  # another command may write the same name


def assert_shows_the_run(recorded: Recorded, words: list[str]) -> None:
    """The monitor says where it is, shows the run there, and ends with Ctrl-C."""
    process = recorded.start(*words)
    assert process.stdout is not None
    try:
        said = next(line for line in process.stdout if "http://" in line)
        address = re.findall(r"http://\S+", said)[0]
        clock = IdleClock()
        while not (runs := httpx.get(f"{address}/api/runs", timeout=patience(60)).json()["items"]):
            assert clock.look() < DEADLINE_S, "waited too long for the run's database"
            time.sleep(0.1)
        (shown,) = runs
        assert (shown["run_name"], shown["num_completed_steps"]) == ("recorded", NUM_STEPS)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130


def test_pages_name_a_recorded_run_for_every_recipe_that_reads_one() -> None:
    recipes = {RECIPE.findall(command.text)[0] for command in COMMANDS.values()}
    exports = {"export_model", "export_rollout", "export_trajectories"}
    others = {"rebuild_datums", "sft", "evaluate", "train", "serve_monitor", "calibrate_judge", "plan", "prune"}
    assert recipes == exports | others | {"replay_step", "ask_checkpoints", "take_over", "recover"}


async def test_a_step_made_again_in_other_ways_is_in_the_monitor(recorded: Recorded) -> None:
    options = (f"step={NUM_STEPS}", 'what_if=[{"learning_rate": 0}]')
    await asyncio.to_thread(recorded.finish, "cua_rl.recipes.replay_step", "log_path=runs/recorded", *options)
    async with open_monitor(recorded.run) as client:
        found = await get(client, f"/api/runs/1/step/{NUM_STEPS}/replay")
        rollouts = await get(client, "/api/rollouts", run_id="1", step=NUM_STEPS)
    assert (found["adapter"]["is_equal"], found["is_same_machine"], found["logprob_gap"]) == (True, True, 0.0)
    assert [(one["name"], one["relative_norm"]) for one in found["variants"]] == [
        ("as taken", 1.0),
        ("learning_rate=0", 0.0),
    ]
    assert {one["rollout_id"] for one in found["rollouts"]} <= {one["rollout_id"] for one in rollouts["items"]}
    assert all(taken != 0.0 == still for taken, still in (one["changes"] for one in found["rollouts"]))


def test_a_recorded_run_goes_on_with_the_option_that_pages_name(recorded: Recorded) -> None:
    options = (f"max_steps={NUM_STEPS + 1}", "behavior_if_log_dir_exists=resume")
    said = recorded.finish("cua_rl.recipes.train", "log_path=runs/recorded", *options)
    assert f"after step {NUM_STEPS} (weights/{NUM_STEPS:06d})\n  max_steps={NUM_STEPS + 1}, was {NUM_STEPS}\n" in said
    steps = [record for record in read_records(recorded.run / "metrics.jsonl") if "reward/mean" in record]
    assert [record["step"] for record in steps] == list(range(1, NUM_STEPS + 2))
    assert {record["rollout/num_rollouts"] for record in steps} == {16}  # 4 groups of 4, which only the first were told


@pytest.mark.parametrize("kind", ["huggingface", "atif"])
def test_a_run_that_was_exported_and_imported_rebuilds_what_was_trained(recorded: Recorded, kind: str) -> None:
    recorded.finish("cua_rl.recipes.export_trajectories", "run=runs/recorded", f"out={kind}", f"format={kind}")
    recorded.finish("cua_rl.recipes.import_trajectories", f"path={kind}", f"log_path=runs/from_{kind}")
    said = recorded.finish("cua_rl.recipes.rebuild_datums", f"run=runs/from_{kind}")
    assert said.count(" equal\n") >= NUM_STEPS, said

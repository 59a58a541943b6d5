"""Kill a Tinker service, its trainer and its model server at random points of a client's run, and compare the outcome.

    python -m scripts.chaos_tinker folder=/tmp/chaos-tinker kills=10 steps=16

The client is the unmodified SDK in its own environment (`make setup-tinker`): reinforcement learning on text and a
picture (`tinker_conformance/learner.py`). Every kill is SIGKILL; half of them come a moment after a stage of the
client's run, the others whenever it is, so also while something is being started. A service that has ended is started
again at once, as a supervisor does.

What must hold at the end: the client has ended by itself; every answer, loss and reward that it saw, and the adapter of
its last checkpoint, are those of a second run that nobody disturbed, bit for bit; and the database has as many steps as
the client has taken.
"""

import asyncio
import json
import os
import random
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import chz
import psutil
from sqlalchemy import select

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import Training
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.session import open_sessions
from cua_rl.database.tinker_models import TinkerModel
from cua_rl.host.processes import free_port
from cua_rl.types.errors import TrainingError
from scripts.chaos_record import processes_of, wait_until

ROOT = Path(__file__).parents[1]
PARTS: Mapping[str, str] = {
    "service": "",
    "trainer": "cua_rl.training.worker",
    "model server": "cua_rl.vllm_cpu_server",
}
"""What is killed, and the word on its command line; the service itself is our child."""
STAGES_PER_STEP = 4
SHARE_AT_STAGES = 0.5


@chz.chz
class ChaosTinkerConfig:
    """What is killed, how often."""

    folder: Path = chz.field(doc="folder for the service and the output of service and client")
    kills: int = chz.field(default=10, doc="kills during the client's run")
    steps: int = chz.field(default=16, doc="optimizer steps of the client")
    seed: int = chz.field(default=0, doc="seed of victims and moments")


@dataclass
class Chaos:
    """The service, its client and what the client has said."""

    config: ChaosTinkerConfig
    port: int = field(default_factory=free_port)
    key: str = field(default_factory=lambda: f"tml-{secrets.token_hex(16)}")
    service: asyncio.subprocess.Process | None = None
    num_starts: int = 0
    told: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The stages of the client's run that are complete."""

    @property
    def run_folder(self) -> Path:
        return self.config.folder / "service"

    async def keep_serving(self) -> None:
        """Run the service until cancelled, again whenever it has ended."""
        command = [sys.executable, "-m", "cua_rl.recipes.serve_tinker", f"port={self.port}"]
        command += [f"log_path={self.run_folder}", "lora_rank=8", "server.max_model_len=1024"]
        environment = {**os.environ, "TINKER_API_KEY": self.key}
        environment.pop("DATABASE_URL", None)  # so that the embedded one dies with the service
        with (self.config.folder / "service.txt").open("ab") as output:
            while True:
                self.service = await asyncio.create_subprocess_exec(
                    *command, env=environment, stdout=output, stderr=output, start_new_session=True
                )
                self.num_starts += 1
                try:
                    await self.service.wait()
                except asyncio.CancelledError:
                    self.service.send_signal(signal.SIGINT)
                    await self.service.wait()
                    raise

    async def learn(self) -> list[dict[str, Any]]:
        """Run the client; returns what it has said."""
        self.told = []
        url = f"http://127.0.0.1:{self.port}"
        with (self.config.folder / "client.txt").open("ab") as output:
            client = await asyncio.create_subprocess_exec(
                *(ROOT / ".venv-tinker/bin/python", "-m", "tinker_conformance.learner", url, self.key),
                str(self.config.steps),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
            )
            assert client.stdout is not None
            while line := await client.stdout.readline():
                self.told.append(json.loads(line))
            if status := await client.wait():
                raise TrainingError(f"the client ended with status {status}; read {self.config.folder / 'client.txt'}")
        return self.told

    def find(self, part: str) -> list[psutil.Process]:
        """The processes of a part, none while it is not there."""
        if self.service is None or self.service.returncode is not None:
            return []
        if part == "service":
            return [psutil.Process(self.service.pid)]
        return processes_of(self.service.pid, PARTS[part])

    async def kill(self, rng: random.Random, parts: Sequence[str]) -> int:
        """Kill the parts one after another while the client goes on; returns how many until it ended."""
        for number, part in enumerate(parts):
            left = self.config.steps * STAGES_PER_STEP - len(self.told)
            most = max(1, left // (len(parts) - number + 1))  # so that later kills find the client at work
            is_at_stage = rng.random() < SHARE_AT_STAGES
            stages = len(self.told) + (rng.randint(1, most) if is_at_stage else most)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_at_stage else rng.uniform(0.5, 12.0)):
                    await wait_until(partial(self._has_told, stages), f"for stage {stages} of the client")
            if is_at_stage:
                await asyncio.sleep(rng.uniform(0.0, 1.0))
            await wait_until(lambda part=part: bool(self.find(part)), f"for the {part} to be started")
            if self.told[-1]["stage"] == "end":
                return number
            with suppress(psutil.NoSuchProcess, IndexError):  # it may have ended meanwhile
                rng.choice(self.find(part)).kill()
            told = self.told[-1]
            print(f"kill {number + 1}: {part}, after {told['stage']!r} of step {told.get('step')}", flush=True)
        return len(parts)

    def _has_told(self, num_stages: int) -> bool:
        return len(self.told) >= num_stages or self.told[-1]["stage"] == "end"

    async def steps_on_record(self) -> dict[str, tuple[int, int]]:
        """Steps of each model, and of its run in the monitor."""
        async with (
            EmbeddedPostgres(self.run_folder / "postgres", self.config.folder / "postgres.log") as postgres,
            open_sessions(postgres.url) as sessions,
            sessions() as session,
        ):
            models = (await session.execute(select(TinkerModel.id, TinkerModel.num_steps))).all()
            runs = (await session.execute(select(Training.run_name, Training.num_completed_steps))).all()
        seen: dict[str, int] = {row.run_name: row.num_completed_steps for row in runs}
        return {row.id: (row.num_steps, seen.get(row.id.replace(":", "."), 0)) for row in models}


def _adapter(run_folder: Path, path: str) -> str:
    """A hash of the adapter of a checkpoint."""
    model, _, name = path.removeprefix("tinker://").partition("/weights/")
    (file,) = (run_folder / "weights" / model.replace(":", ".")).glob(f"{name}~*/adapter_model.safetensors")
    return sha256(file.read_bytes()).hexdigest()


def _differences(
    run_folder: Path, killed: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What a run came to that another one did not; the last line of each has the path of its adapter."""
    faults = [
        f"the client saw {one} instead of {two}" for one, two in zip(killed[:-1], other[:-1], strict=True) if one != two
    ]
    paths = [run[-1]["path"] for run in (killed, other)]
    if len({_adapter(run_folder, path) for path in paths}) > 1:
        faults.append(f"the adapters of {paths} differ")
    return faults


async def cli_main(config: ChaosTinkerConfig) -> None:
    """Kill, go on, compare; ends with status 1 if anything is wrong."""
    await asyncio.to_thread(config.folder.mkdir, parents=True, exist_ok=True)
    rng, chaos = random.Random(config.seed), Chaos(config)
    parts = [list(PARTS)[number % len(PARTS)] for number in range(config.kills)]
    rng.shuffle(parts)
    serving = asyncio.create_task(chaos.keep_serving())
    try:
        async with asyncio.TaskGroup() as tasks:
            learning = tasks.create_task(chaos.learn())
            await wait_until(lambda: bool(chaos.told) or learning.done(), "for the client's first stage")
            num_kills = await chaos.kill(rng, parts)
        starts, killed = chaos.num_starts, learning.result()
        undisturbed = await chaos.learn()
    finally:
        serving.cancel()
        await asyncio.wait([serving])
    faults = _differences(chaos.run_folder, killed, undisturbed)
    if num_kills < len(parts):
        faults.append(f"expected {len(parts)} kills, got {num_kills} before the client ended; raise steps")
    half, steps = config.steps // 2, await chaos.steps_on_record()
    wanted = sorted([(half, half), (config.steps - half, config.steps - half)] * 2)
    if sorted(steps.values()) != wanted:
        faults.append(f"expected the steps {wanted} of models on record, got {steps}")
    rewards = [facts["reward"] for facts in killed if "reward" in facts]
    result: dict[str, Any] = {"kills": num_kills, "service_starts": starts, "steps": len(rewards)}
    print(json.dumps(result | {"first_reward": rewards[0], "last_reward": rewards[-1], "faults": faults}))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_recipe(ChaosTinkerConfig, cli_main))

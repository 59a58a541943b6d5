"""What the doctor examines: the model server and trainer of a run, and the requests that its checks send them."""

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from PIL import Image, ImageDraw

from cua_rl.agent.history import user_item
from cua_rl.command_line.fields import with_values
from cua_rl.doctor.facts import gather_facts, read_clocks
from cua_rl.machine.gpus import ask_nvidia_smi
from cua_rl.reporting.diagnosis import Finding
from cua_rl.rl.served_policy import make_canary
from cua_rl.run.preflight import Screen
from cua_rl.run.prepared_training import PreparedTraining
from cua_rl.run.resolve import rounding_limit
from cua_rl.run.training import canary_prompt
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.canary import canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig
from cua_rl.types.conversation import EncodedImage, Message, TextPart
from cua_rl.types.rollout import AdapterRef, Datum, EncodedTextChunk, ModelInput, ModelTurn

EMBEDDED = CLIConfig()
Need = Literal["GPU", "plan", "server", "trainer"]
SMI_FIELDS = "index,name,driver_version,compute_cap,memory.total,memory.used"
_PHONE = Screen(kind="android", width_px=1080, height_px=2400)
_SHORT_TOKENS = 1024


@dataclass(kw_only=True)
class Examination:
    """What the checks have started and measured so far."""

    config: CLIConfig
    folder: Path
    stack: AsyncExitStack
    """Ends the processes."""
    embedded: CLIConfig = EMBEDDED
    """Settings of the embedded model, which is examined if `config` has no memory estimate."""
    ask_driver: Callable[[str], str] = ask_nvidia_smi
    there: set[Need] = field(default_factory=set[Need])
    """Which of the next fields are set."""
    prepared: PreparedTraining = field(init=False)
    sampler: SamplingClient = field(init=False)
    gateway: Gateway = field(init=False)
    trainer: TrainingClient = field(init=False)
    num_published: int = 0
    num_asked: int = 0
    grad_norm: float | None = None
    """Gradient norm of the trainer's first step, on short sequences."""
    trained: Mapping[str, float] = field(default_factory=dict[str, float])
    """The trainer's metrics of the long backward pass."""

    def gpus(self) -> list[list[str]]:
        """What the driver says about each GPU now, in the order of `SMI_FIELDS`; empty without GPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible in ("", "-1"):
            return []
        rows = [[part.strip() for part in line.split(",")] for line in self.ask_driver(SMI_FIELDS).splitlines()]
        chosen = [row for row in rows if row[0] in (visible or "").split(",")]
        return chosen or rows  # under UUIDs, all

    @property
    def screen(self) -> Screen:
        return self.prepared.devices.usual_screen or _PHONE


def finding_of(got: str, do: str = "", figures: Mapping[str, object] = MappingProxyType({})) -> Finding:
    """A warning if there is something to do."""
    return Finding(verdict="warn" if do else "ok", got=got, do=do, figures=dict(figures))


async def take_short_step(exam: Examination) -> float:
    """The gradient's norm on two short sequences; weights stay as they are."""
    length = min(_SHORT_TOKENS, exam.prepared.config.server.context_tokens)
    await exam.trainer.forward_backward([long_datum(exam, seed, length) for seed in (101, 102)], LossConfig())
    return (await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=0.0))).grad_norm


async def take_unequal_steps(exam: Examination) -> dict[str, object]:
    """Steps whose rows differ in length, which fragments the allocator's memory; the GPUs' clocks meanwhile."""
    length = exam.prepared.config.server.context_tokens
    lengths = [max(length * eighths // 8, min(length, _SHORT_TOKENS)) for eighths in (3, 8, 5)]
    datums = [long_datum(exam, 200 + index, length) for index, length in enumerate(lengths)]
    async with asyncio.TaskGroup() as group:
        clocks = group.create_task(asyncio.to_thread(gather_facts, {"clocks": read_clocks}), name="clocks")
        for datum in datums:
            await exam.trainer.forward_backward([datum], LossConfig())
            await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=0.0))
    return {"lengths": lengths, **clocks.result()}


def long_datum(exam: Examination, seed: int, length: int) -> Datum:
    """A sequence of `length` tokens: screenshots, then at least an eighth of trained text."""
    renderer = exam.prepared.renderer
    user = partial(Message, role="user")
    empty, one = (
        renderer.render((user(content=(TextPart(text="."), *[draw_screen(exam.screen, seed)] * number)),), ()).length
        for number in (0, 1)
    )
    num_screens = max(0, (7 * length // 8 - empty) // (one - empty))
    screens = [draw_screen(exam.screen, 1000 * seed + index) for index in range(num_screens)]
    prompt = renderer.render((user(content=(TextPart(text="."), *screens)),), ())
    text = canary_tokens(renderer)
    num_trained = length - prompt.length
    answer = (text * (num_trained // len(text) + 1))[:num_trained]
    return sampled_datum(f"long-{seed}", prompt, answer, logprobs=(-1.0,) * num_trained)


def sampled_datum(name: str, prompt: ModelInput, answer: Sequence[int], logprobs: Sequence[float]) -> Datum:
    before = prompt.length
    return Datum(
        rollout_id=name,
        model_input=ModelInput(chunks=(*prompt.chunks, EncodedTextChunk(tokens=tuple(answer)))),
        loss_mask=(*[False] * before, *[True] * len(answer)),
        advantages=(*[0.0] * before, *[1.0] * len(answer)),
        sampling_logprobs=(*[0.0] * before, *logprobs),
        policy_versions=(0,),
    )


def draw_screen(screen: Screen, seed: int) -> EncodedImage:
    """A screenshot that no other seed has."""
    rng, size = random.Random(seed), (screen.width_px, screen.height_px)
    image = Image.new("RGB", size, (rng.randrange(256),) * 3)
    draw = ImageDraw.Draw(image)
    for _ in range(24):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        draw.rectangle((x, y, x + size[0] // 8, y + size[1] // 16), fill=(rng.randrange(256), rng.randrange(256), 90))
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return EncodedImage(data=buffer.getvalue(), format="png", width_px=size[0], height_px=size[1])


async def ask(exam: Examination, image: EncodedImage | None) -> ModelTurn:
    """One answer of the current policy through the gateway, to a prompt that no other request has."""
    exam.num_asked += 1
    name = f"doctor-{exam.num_asked}"
    exam.gateway.open_rollout(name)
    item: Any = user_item(f"Task {exam.num_asked}: say what to do.", None if image is None else image.data_url())
    try:
        await exam.gateway.openai_client(name).responses.create(model="policy", input=[item])
    finally:
        turns = exam.gateway.close_rollout(name)
    return turns[0]


async def publish(exam: Examination) -> None:
    """Serve the trainer's weights as a new version, proven by the canary."""
    exam.num_published += 1
    path = exam.folder / "adapters" / f"{exam.num_published:06d}"
    saved = await exam.trainer.save_weights_for_sampler(path)
    canary = await make_canary(exam.trainer, canary_prompt(exam.prepared), rounding_limit(exam.prepared.config))
    await exam.sampler.publish(AdapterRef(path=saved.path, policy_version=exam.num_published), canary)


def as_gib(mib: str) -> str:
    return f"{int(mib) / 1024:.1f}" if mib.isdecimal() else mib

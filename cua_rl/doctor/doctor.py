"""Checks what a training run needs of this machine, part by part and then together, and measures its speed.

Each check is a function that returns a `Finding`; `CHECKS` lists them with what they need. A check whose needs are
missing is not tried. The parts are those of a training run with the same settings.
"""

import asyncio
import os
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import plain_config
from cua_rl.doctor.checks import check_driver, check_gpus, check_machine, check_versions
from cua_rl.doctor.examination import (
    EMBEDDED,
    Examination,
    Need,
    as_gib,
    ask,
    draw_screen,
    finding_of,
    long_datum,
    publish,
    sampled_datum,
    take_short_step,
    take_unequal_steps,
)
from cua_rl.doctor.facts import read_server_log
from cua_rl.machine.memory_parts import GIB
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.reporting.diagnosis import Diagnosis, Finding, first_line
from cua_rl.rl.parity import measure_parity, require_parity
from cua_rl.run.prepared_training import prepare_training
from cua_rl.run.resolve import rounding_limit
from cua_rl.run.rollouts import make_servers, open_gateway, sampling_params, start_together
from cua_rl.run.trainer_nodes import open_trainer
from cua_rl.run.training import prove_adapters
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import fetch_weights, start_limit_s
from cua_rl.sampling.client import SamplingClient
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.types.errors import ConfigError, CuaError, TrainingError

_MISSING: Mapping[Need, str] = {
    "GPU": "no GPU",
    "plan": "no memory estimate",
    "server": "the model server does not run",
    "trainer": "the trainer does not run",
}
_LONGEST_CHECK_S = 1200.0  # processes that wait for each other on a broken link wait forever
_NEARLY_FULL = 0.97
_OVER_PLAN = 1.1  # the estimate is within 10 % of peaks on fake tensors
_LOW_UTILISATION = 0.15  # less than half of what to expect of a model of 4B and more
_SLOW_PUBLICATION_S = 10.0
_NUM_PUBLICATIONS = 4
_NUM_BESIDE = 16  # requests at a time while adapters are published
_LOG_LINES = 100
_SAME_NORM = 0.05  # relative; bfloat16 rounds sums in another order differently


async def run_doctor(
    config: CLIConfig, diagnosis: Diagnosis, say: Callable[[str], None], embedded: CLIConfig = EMBEDDED
) -> None:
    """Make all checks, one after the other, and end what they started; `say` receives each finding."""
    async with AsyncExitStack() as stack:
        # adapters of a large model take gigabytes
        stack.callback(shutil.rmtree, diagnosis.folder / "adapters", ignore_errors=True)
        exam = Examination(config=config, folder=diagnosis.folder, stack=stack, embedded=embedded)
        for name, find, needs in CHECKS:
            say(f"{name} ...")
            finding = await diagnosis.check(name, partial(attempt, exam, find, needs))
            said = f": {first_line(finding.got)}" if finding.verdict == "fail" else ""
            say(f"{name}: {finding.verdict} ({finding.seconds:.1f} s){said}")


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
    if "plan" in needs:  # a process loads the weights
        limit_s += start_limit_s(exam.prepared.config.server.model_path)
    try:
        async with asyncio.timeout(limit_s if needs else None):  # downloads may take longer
            return await find(exam)
    except TimeoutError as error:
        exam.there -= {need for need in needs if need in ("server", "trainer")}
        logs = exam.folder / "logs"
        raise CuaError(f"expected a result within {limit_s:g} s, got none; read {logs}") from error


async def check_plan(exam: Examination, environ: Mapping[str, str] = os.environ) -> Finding:
    """The settings work on this machine, the model fits into its memory, and its weights are available."""
    if exam.config.training == "tinker":
        raise ConfigError(
            "training: expected 'local', got 'tinker'; the run checks the service itself, with dry_run=true"
        )
    exam.prepared = await prepare_training(exam.config, environ)
    await asyncio.to_thread(fetch_weights, exam.config.model_name, exam.prepared.config.server.model_path)
    exam.there.add("plan")
    memory = exam.prepared.memory
    sides = {"trainer": memory.trainer, "server": memory.server}
    got = ", ".join(f"{name} {sum(parts.values()) / GIB:.1f} GiB" for name, parts in sides.items() if parts)
    return finding_of(f"{got} per process", figures=exam.prepared.effective())


async def plan_embedded(exam: Examination) -> Finding:
    """If the settings have no estimate, use the embedded model's for the other checks."""
    if "plan" in exam.there:
        return Finding(verdict="not tried", got="the settings have an estimate")
    exam.config = exam.embedded
    # without database and monitor, which may be what was refused
    environ = {name: text for name, text in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
    return await check_plan(exam, environ)


async def start_server(exam: Examination) -> Finding:
    """The model server loads the model and answers."""
    clock = time.monotonic()
    servers = make_servers(exam.config.base_url, exam.prepared.config.server, exam.folder / "logs")
    await start_together(exam.stack, *servers)
    exam.sampler = await exam.stack.enter_async_context(SamplingClient(*servers))
    params = sampling_params(exam.config, exam.config.temperature)
    exam.gateway = await exam.stack.enter_async_context(
        open_gateway(exam.config, exam.sampler, exam.prepared.renderer, params)
    )
    exam.there.add("server")
    got = f"servers: {len(servers)}, started in {time.monotonic() - clock:.0f} s"
    if exam.config.base_url is not None:
        return finding_of(got, figures={"logs": None, "missing": {"logs": "the servers of base_url keep them"}})
    logs = sorted((exam.folder / "logs").glob("vllm*.log"))
    said = {log.name: read_server_log(log.read_text(encoding="utf-8", errors="replace")) for log in logs}
    sizes = ", ".join(f"{facts['kv_cache_tokens']} tokens" for facts in said.values())
    return finding_of(f"{got}, KV cache: {sizes}", figures={"logs": said})


async def start_trainer(exam: Examination) -> Finding:
    """The trainer loads the model, on its GPUs where it has some."""
    config, log_path = exam.prepared.config.trainer, exam.folder / "logs" / "trainer.log"
    trainer = await open_trainer(exam.stack, config, exam.prepared.config.model_name, log_path)
    exam.trainer = await exam.stack.enter_async_context(trainer)
    exam.there.add("trainer")
    if config.num_nodes is not None:  # Ray decides on GPUs
        return finding_of(f"nodes of the cluster: {config.num_nodes}")
    where = f"GPU {', '.join(config.gpu_names)}" if config.gpu_names else "CPU"
    return finding_of(f"processes: {config.num_processes}, on {where}")


async def check_canary(exam: Examination) -> Finding:
    """The server applies adapters as the trainer does."""
    prepared, folder = exam.prepared, exam.folder / "adapters" / "probe"
    limit = rounding_limit(prepared.config)
    settings = prepared.config.trainer
    proofs = await prove_adapters(exam.trainer, exam.sampler, settings, prepared.renderer, limit, folder)
    said = [
        f"a random adapter on {part} changes log-probabilities by {change:.2g} nats, as in the trainer within "
        f"{difference:.2g}"
        for part, (change, difference) in proofs.items()
    ]
    change, difference = max(proofs.values(), key=lambda proof: proof[1])
    return finding_of(
        f"{'; '.join(said)} (limit {rounding_limit(exam.prepared.config):g})",
        figures={"change": change, "difference": difference},
    )


async def check_backward(exam: Examination) -> Finding:
    """A step whose sequences are as long as the context, with screenshots, in full rows."""
    prepared = exam.prepared
    exam.grad_norm = await take_short_step(exam)
    await exam.trainer.trainer_metrics()  # starts the count again
    length = prepared.config.server.context_tokens
    datums = [long_datum(exam, seed, length) for seed in range(max(1, prepared.memory.micro_batch_tokens // length))]
    await exam.trainer.forward_backward(datums, LossConfig())
    done = await exam.trainer.optim_step(with_values(exam.config.adam, learning_rate=exam.config.learning_rate))
    exam.trained = metrics = await exam.trainer.trainer_metrics()
    unequal = await take_unequal_steps(exam)
    later = await exam.trainer.trainer_metrics()
    for name in metrics.keys() & {"trainer/peak_cuda_gib", "trainer/peak_reserved_gib"}:
        exam.trained = exam.trained | {name: max(metrics[name], later[name])}
    speed, utilisation = metrics["trainer/tokens"] / metrics["trainer/busy_s"], metrics["trainer/matmul_frac"]
    mfu = metrics.get("trainer/mfu_frac")
    got = (
        f"{len(datums)} x {length} tokens: {speed:.0f} tokens/s, {100 * utilisation:.0f} % of a large matrix product"
        f"{'' if mfu is None else f', MFU {100 * mfu:.0f} %'}, |gradient| {done.grad_norm:.3g}"
    )
    figures = {"tokens_per_s": speed, "grad_norm": done.grad_norm, **metrics, "unequal": {**unequal, **later}}
    if not 0 < done.grad_norm < float("inf"):
        do = "nothing can be learned: try trainer.dtype=float32, and report it with doctor.json"
        return Finding(verdict="fail", got=got, do=do, figures=figures)
    do = ""
    if metrics.get("trainer/memory_retries"):
        do = f"it ran out of memory first: lower trainer.micro_batch_tokens={prepared.memory.micro_batch_tokens}"
    elif "GPU" in exam.there and utilisation < _LOW_UTILISATION:
        do = "slow: see whether the GPU is throttled or shared (nvidia-smi), and docs/dev/performance.md"
    return finding_of(got, do, figures)


async def check_memory(exam: Examination) -> Finding:
    """The long step's peak against the estimate, and what is left on each GPU."""
    peak = exam.trained.get("trainer/peak_cuda_gib")
    if peak is None:
        return Finding(verdict="not tried", got="no peak of a backward pass on a GPU")
    # PyTorch does not count the CUDA context
    planned = sum(size for part, size in exam.prepared.memory.trainer.items() if part != "CUDA") / GIB
    gpus = [gpu for gpu in exam.gpus() if gpu[4].isdecimal() and gpu[5].isdecimal()]
    used = ", ".join(f"GPU {gpu[0]} {as_gib(gpu[5])} of {as_gib(gpu[4])}" for gpu in gpus)
    reserved = exam.trained["trainer/peak_reserved_gib"]
    got = (
        f"trainer {peak:.1f} GiB at its peak, {reserved:.1f} reserved in steps of unequal lengths, estimated "
        f"{planned:.1f}; in use: {used}"
    )
    figures = {"peak_gib": peak, "reserved_gib": reserved, "planned_gib": planned, "gpus": gpus}
    do = ""
    if peak > _OVER_PLAN * planned:
        do = "the estimate is too low: set trainer.micro_batch_tokens lower, and report it with doctor.json"
    elif any(int(gpu[5]) > _NEARLY_FULL * int(gpu[4]) for gpu in gpus):
        do = "a GPU is nearly full: set server.gpu_memory_utilization lower"
    return finding_of(got, do, figures)


async def check_publication(exam: Examination) -> Finding:
    """New adapters are served while requests are answered, and none of those fails."""
    num_beside = min(_NUM_BESIDE, exam.prepared.memory.max_num_seqs)
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
    return finding_of(got, do if median(seconds) > _SLOW_PUBLICATION_S else "", figures)


async def check_parity(exam: Examination) -> Finding:
    """The trainer gives sampled tokens the server's log-probabilities, after screenshots and after text."""
    await publish(exam)
    return await compare_answers(exam)


async def compare_answers(exam: Examination) -> Finding:
    """Parity of what the server serves now with the trainer's weights."""
    screens = [draw_screen(exam.screen, seed) if seed % 2 else None for seed in range(8)]
    turns = await asyncio.gather(*(ask(exam, screen) for screen in screens))
    datums = [
        sampled_datum(f"sampled-{index}", turn.prompt, turn.sampled_tokens, turn.sampling_logprobs)
        for index, turn in enumerate(turns)
    ]
    parity = measure_parity(datums, await exam.trainer.forward(datums, temperature=exam.config.temperature))
    limit = exam.prepared.config.parity_limit
    require_parity(parity, limit, step=0)
    got = f"{parity.mean_abs:.2g} nats on average ({parity.image_mean_abs:.2g} after screenshots, limit {limit:g})"
    mismatches = sum(not turn.prompt_matches_renderer for turn in turns)
    if mismatches:
        do = "server and renderer disagree about prompts: report it with doctor.json"
        return Finding(verdict="fail", got=f"{mismatches} prompts differ; {got}", do=do, figures=parity.metrics())
    return finding_of(got, figures=parity.metrics())


async def check_sampling(exam: Examination) -> Finding:
    """Speed of the server with as many requests as the run would have, each with its own screenshot."""
    prepared = exam.prepared
    concurrency = min(prepared.memory.max_num_seqs, prepared.config.max_concurrent_rollouts)
    screens = [await asyncio.to_thread(draw_screen, exam.screen, -seed) for seed in range(1, concurrency + 1)]
    clock = time.monotonic()
    turns = await asyncio.gather(*(ask(exam, screen) for screen in screens))
    seconds = time.monotonic() - clock
    sampled, read = sum(len(turn.sampled_tokens) for turn in turns), sum(turn.prompt.length for turn in turns)
    figures: dict[str, object] = {"sampled_tokens_per_s": sampled / seconds, "prompt_tokens_per_s": read / seconds}
    got = f"{sampled / seconds:.0f} sampled and {read / seconds:.0f} prompt tokens/s, {concurrency} at a time"
    utilisation = exam.trained.get("trainer/matmul_frac")
    if utilisation:
        # the trainer has measured what one device can do
        peak = exam.trained["trainer/tflop_per_s"] * 1e12 / utilisation / prepared.memory.gpus.num_trainer_processes
        peak *= max(1, len(prepared.memory.gpus.server_gpus))
        model = load_model_sizes(prepared.config.server.model_path)
        figures["matmul_frac"] = share = 2 * model.active_parameters * (sampled + read) / seconds / peak
        got += f", about {100 * share:.1f} % of a large matrix product"
    return finding_of(got, figures=figures)


async def check_two_processes(exam: Examination) -> Finding:
    """Two trainer processes give the gradient of one; the last check, because it ends server and trainer."""
    config, gpus = exam.prepared.config.trainer, exam.prepared.memory.machine.gpus
    if config.num_nodes is not None:
        return Finding(verdict="not tried", got="a trainer on nodes of a cluster, whose GPUs Ray assigns")
    if (config.num_processes or 1) > 1:
        return finding_of(f"{config.num_processes} processes made the steps above")
    if len(gpus) == 1:
        return Finding(verdict="not tried", got="one GPU")
    if exam.grad_norm is None:
        return Finding(verdict="not tried", got="no step of one process to compare with")
    exam.there -= {"server", "trainer"}
    await exam.stack.aclose()
    pair: TrainerConfig = with_values(config, num_processes=2, gpu_names=gpus[:2], sharding="replicated")
    async with TrainingClient(pair, exam.folder / "logs" / "two_processes.log") as exam.trainer:
        norm = await take_short_step(exam)
    got = f"|gradient| {norm:.4g}, of one process {exam.grad_norm:.4g}"
    if abs(norm - exam.grad_norm) > _SAME_NORM * exam.grad_norm:
        raise TrainingError(f"expected the gradient of one process, got {got}; train with trainer.num_processes=1")
    return finding_of(got, figures={"one": exam.grad_norm, "two": norm})


def about(config: CLIConfig, diagnosis: Diagnosis) -> dict[str, object]:
    """What doctor.json says beside the findings: settings and, if a check failed or warned, what the logs say."""
    is_well = all(finding.verdict in ("ok", "not tried") for finding in diagnosis.findings.values())
    logs = [] if is_well else sorted((diagnosis.folder / "logs").glob("*.log"))
    told = {path.name: warnings_and_end(path.read_text(encoding="utf-8", errors="replace")) for path in logs}
    return {"config": plain_config(config), "logs": told}


def warnings_and_end(log: str) -> list[str]:
    """The last lines of a log, after the first warnings and errors before them."""
    lines = log.splitlines()
    warned = [line for line in lines[:-_LOG_LINES] if re.search(r"\b(WARNING|ERROR|CRITICAL)\b|(Warning|Error):", line)]
    return [*warned[:_LOG_LINES], *lines[-_LOG_LINES:]]


CHECKS: Sequence[tuple[str, Callable[[Examination], Awaitable[Finding]], Sequence[Need]]] = (
    ("machine", check_machine, ()),
    ("versions", check_versions, ()),
    ("GPUs", check_gpus, ()),
    ("driver", check_driver, ("GPU",)),
    ("memory estimate", check_plan, ()),
    ("embedded model", plan_embedded, ()),
    ("model server", start_server, ("plan",)),
    ("trainer", start_trainer, ("plan",)),
    ("canary", check_canary, ("server", "trainer")),
    ("long backward pass", check_backward, ("trainer",)),
    ("memory against estimate", check_memory, ("GPU", "trainer")),
    ("publication under load", check_publication, ("server", "trainer")),
    ("parity with images", check_parity, ("server", "trainer")),
    ("sampling speed", check_sampling, ("server",)),
    ("two trainer processes", check_two_processes, ("trainer",)),
)

"""Builds the simulated scenario from settings and recorded runs."""

import re
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from random import Random

from cua_rl.command_line.fields import with_values
from cua_rl.machine.machine import find_machine
from cua_rl.machine.memory_plan import MemoryBudget
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.planning.calibration import RecordedRun, calibrate
from cua_rl.planning.fleet import (
    DeviceTime,
    Fleet,
    Placement,
    Prices,
    Scenario,
    Schedule,
    Spread,
    Workload,
    controller_turn_s,
)
from cua_rl.planning.gpu_speed import (
    GPU_KINDS,
    GpuKind,
    TurnTokens,
    server_speed,
    trained_token_s,
)
from cua_rl.planning.plan_config import PlanConfig
from cua_rl.renderers.images import largest_image_tokens
from cua_rl.run.resolve import resolve
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import find_model
from cua_rl.types.errors import ConfigError

_PHONE_TOKENS, _PHONE_KB = 2550, 300  # a screenshot of 1080x2400
_REQUEST_SIGMA = 0.5  # typical spread of answer lengths of one model
_NUM_QUANTILES = 200
_MOST_GPUS = 64


def planned_scenario(config: PlanConfig, runs: Sequence[RecordedRun]) -> Scenario:
    """What the settings describe; raises `ConfigError` if they do not describe enough, or if it cannot fit."""
    _check_settings(config)
    kind, plan = _find_machine(config)
    if plan is not None:
        config = with_values(config, max_concurrent_rollouts=plan.num_rollouts)
    placement = None if plan is None else _placement(plan)
    if runs:
        scenario = recorded_scenario(config, runs, placement)
    else:
        if kind is None or plan is None or placement is None:
            raise ConfigError(
                "gpus: expected the GPUs to plan for, such as 8xh100, or a recorded run, got neither; set gpus=8xh100, "
                "or from_run=runs/NAME"
            )
        scenario = _assumed_scenario(config, kind, plan, placement)
    return _with_assumptions(config, scenario)


def _check_settings(config: PlanConfig) -> None:
    """Raises `ConfigError` for settings that contradict each other."""
    assume, elsewhere = config.assume, {"base_url": config.base_url, "trainer.num_nodes": config.trainer.num_nodes}
    if config.training == "tinker":
        raise ConfigError("training: expected 'local', whose time can be predicted, got 'tinker'; leave it out")
    for name, value in elsewhere.items():
        if config.gpus is not None and value is not None:
            raise ConfigError(
                f"{name}: expected None with gpus={config.gpus}, which are those of server and trainer together, got "
                f"{value!r}; leave it out"
            )
    if assume.num_turns is not None and assume.num_turns > config.max_turns:
        raise ConfigError(
            f"assume.num_turns: expected at most max_turns={config.max_turns}, got {assume.num_turns:g}; lower it, or "
            "raise max_turns"
        )
    if assume.constant_group_frac is not None and assume.constant_group_frac > 1:
        raise ConfigError(
            f"assume.constant_group_frac: expected a share, at most 1, got {assume.constant_group_frac:g}; lower it"
        )


def recorded_scenario(config: CLIConfig, runs: Sequence[RecordedRun], placement: Placement | None = None) -> Scenario:
    """The speeds of recorded runs with the settings of `config`, by default on the hardware of the first run."""
    devices = config.max_concurrent_rollouts
    work, fleet = calibrate(runs, group_size=config.group_size, num_devices=devices, placement=placement)
    return Scenario(workload=work, fleet=fleet, schedule=_schedule(config))


def find_prices(config: PlanConfig) -> Prices:
    """Those of the settings, or those assumed for the kind of GPU; recorded runs do not say which kind they had."""
    kind = None if config.gpus is None else _parse_gpus(config.gpus)[1]
    gpu = config.gpu_usd_per_hour
    return Prices(gpu=(kind.usd_per_hour if kind else 0.0) if gpu is None else gpu, device=config.device_usd_per_hour)


def _assumed_scenario(config: PlanConfig, kind: GpuKind, plan: MemoryBudget, placement: Placement) -> Scenario:
    assume, path = config.assume, _model_path(config)
    model = load_model_sizes(path)
    num_turns = assume.num_turns or config.max_turns / 2
    screen = assume.screen_tokens or min(_PHONE_TOKENS, largest_image_tokens(path, config.server.max_pixels))
    turn = TurnTokens(
        screen=screen,
        text=assume.text_tokens,
        sampled=assume.sampled_tokens,
        context=assume.prompt_tokens + num_turns / 2 * (screen + assume.text_tokens + assume.sampled_tokens),
    )
    return Scenario(
        workload=Workload(
            turns=spread_turns(num_turns, config.max_turns),
            start=DeviceTime(own=Spread(mean=5.0)),
            turn=DeviceTime(own=Spread(mean=2.0, sigma=1.0)),
            end=DeviceTime(own=Spread(mean=1.0)),
            request_work=Spread(mean=1.0, sigma=_REQUEST_SIGMA),
            controller_s=controller_turn_s(_given(assume.screen_kb, _PHONE_KB), turn.context),
            prompt_tokens=assume.prompt_tokens,
            turn_tokens=turn.total,
            constant_group_frac=0.3,
        ),
        fleet=Fleet(
            num_devices=config.max_concurrent_rollouts,
            placement=placement,
            server=server_speed(model, kind, placement.gpus_per_server, turn, assume),
            trained_token_s=trained_token_s(
                model,
                kind,
                turn,
                assume,
                num_turns=num_turns,
                lora_rank=config.lora_rank,
                recomputes=plan.gradient_checkpointing,
                keeps_attention=plan.keeps_attention,
            ),
            save_s=1.0,
            publish_s=3.0,
        ),
        schedule=_schedule(config),
    )


def _with_assumptions(config: PlanConfig, scenario: Scenario) -> Scenario:
    """The settings of `assume` instead of what was recorded or is assumed without them."""
    assume, work, fleet = config.assume, scenario.workload, scenario.fleet
    workload = replace(
        work,
        turns=work.turns if assume.num_turns is None else spread_turns(assume.num_turns, config.max_turns),
        start=_device_time(work.start, assume.start_s, None),
        turn=_device_time(work.turn, assume.device_s, assume.device_sigma),
        end=_device_time(work.end, assume.end_s, None),
        controller_s=_given(assume.controller_s, work.controller_s),
        constant_group_frac=_given(assume.constant_group_frac, work.constant_group_frac),
    )
    changed = replace(
        fleet,
        num_controllers=max(1, config.rollout_workers),  # without workers, the run itself
        save_s=_given(assume.save_s, fleet.save_s),
        publish_s=_given(assume.publish_s, fleet.publish_s),
    )
    return replace(scenario, workload=workload, fleet=changed)


def spread_turns(mean: float, largest: int) -> tuple[int, ...]:
    """Numbers of turns with this mean: many rollouts are short and some are long, as far as `largest` allows."""
    random = Random("turns")
    if mean >= largest:
        return (largest,)
    # beyond the first turn, exponential and cut off; the cut lowers the mean, so the scale is searched for
    places = [random.random() for _ in range(_NUM_QUANTILES)]
    low, high = 0.0, 1e6 * largest  # a mean just below it takes a scale far above it
    turns = (1,)
    for _ in range(60):
        scale = (low + high) / 2
        turns = tuple(min(largest, 1 + round(-scale * log(1 - place))) for place in places)
        low, high = (scale, high) if sum(turns) < mean * _NUM_QUANTILES else (low, scale)
    return turns


def _device_time(known: DeviceTime, mean_s: float | None, sigma: float | None) -> DeviceTime:
    """The same time with another `own` part; the computed part stays."""
    return replace(known, own=Spread(mean=_given(mean_s, known.own.mean), sigma=_given(sigma, known.own.sigma)))


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _schedule(config: CLIConfig) -> Schedule:
    return Schedule(
        groups_per_batch=config.groups_per_batch,
        group_size=config.group_size,
        max_lag=config.max_steps_off_policy or 0,
    )


def _find_machine(config: PlanConfig) -> tuple[GpuKind | None, MemoryBudget | None]:
    """The kind of GPU, and what fits where; None if the settings name no GPUs."""
    if config.gpus is None:
        return None, None
    number, kind = _parse_gpus(config.gpus)
    machine = find_machine(f"{number}x{kind.memory_gib}", {}, is_dry_run=True)
    return kind, resolve(config, machine, _model_path(config))[1]


def _placement(plan: MemoryBudget) -> Placement:
    gpus = plan.gpus
    return Placement(
        num_servers=len(gpus.server_copies),
        gpus_per_server=gpus.tensor_parallel,
        num_trainers=gpus.num_trainer_processes,
        is_shared=gpus.is_shared,
        max_requests=plan.max_num_seqs,
    )


def _parse_gpus(described: str) -> tuple[int, GpuKind]:
    found = re.fullmatch(r"(\d+)x([a-z0-9]+)", described)
    if found is None or found[2] not in GPU_KINDS or not 1 <= int(found[1]) <= _MOST_GPUS:
        raise ConfigError(
            f"gpus: expected a number from 1 to {_MOST_GPUS} and a kind among {', '.join(GPU_KINDS)}, such as 8xh100, "
            f"got {described!r}; correct it"
        )
    return int(found[1]), GPU_KINDS[found[2]]


def _model_path(config: CLIConfig) -> Path:
    """The model's folder; its config.json is enough."""
    if config.model_name is not None and (Path(config.model_name) / "config.json").is_file():
        return Path(config.model_name)
    return find_model(config.model_name)

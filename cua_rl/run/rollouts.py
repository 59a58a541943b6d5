"""The components of rollouts, made from the configuration: model servers, gateway, agent and runner."""

import asyncio
import logging
import shlex
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from math import ceil
from pathlib import Path

import httpx

from cua_rl.agent.action_format import GUI_OWL, ToolCalls, qwen2_5_vl
from cua_rl.agent.agent import Agent, RecordingAccess
from cua_rl.agent.external import AgentCommand, AgentService, ExternalAgent
from cua_rl.agent.gbox_agent import ActionFormat, GBoxAgent
from cua_rl.agent.harness import HarnessAgent, HarnessCommand, HarnessService
from cua_rl.agent.history import make_history
from cua_rl.agent.holo import Holo
from cua_rl.agent.mini_agent import DEFAULT_BASE_URL, MiniAgent
from cua_rl.agent.ui_tars import UiTars
from cua_rl.command_line.fields import with_values
from cua_rl.environments.contract import Environment
from cua_rl.events import Recorder
from cua_rl.host.guest_account import claim_guest_account
from cua_rl.judge.config import JudgeConfig
from cua_rl.machine.gpus import copies_of
from cua_rl.renderers.images import ImageSettings
from cua_rl.renderers.renderer import Renderer
from cua_rl.rewards.load_reward import RFT_GRADER
from cua_rl.rewards.reward import RewardFunction
from cua_rl.rollout.outcome import Judge
from cua_rl.rollout.run import RolloutRunner
from cua_rl.run.devices import OpenDevices
from cua_rl.run.judge import open_judge
from cua_rl.run.rollout_config import IN_PIXELS, FormatName, RolloutConfig
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import start_limit_s
from cua_rl.sampling.address import server_addresses
from cua_rl.sampling.canary import canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_images import ImageFetcher
from cua_rl.sampling.sampler import Sampler
from cua_rl.sampling.server import ExternalServer, ModelServer, VllmServer
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import SamplingParams

logger = logging.getLogger(__name__)

_ONLY_WITH = {
    "command": "external",
    "url": "external",
    "harness_command": "harness",
    "harness_url": "harness",
    "gbox_mini_agent_base_url": "mini_agent",
}


def check_agent(config: RolloutConfig, environment: Environment) -> None:
    """Raise `ConfigError` for agent settings that cannot work."""
    agent = config.agent
    given = {
        "command": agent.command,
        "url": agent.url,
        "harness_command": agent.harness_command,
        "harness_url": agent.harness_url,
        "gbox_mini_agent_base_url": agent.gbox_mini_agent_base_url,
    }
    for name, value in given.items():
        if value is not None and agent.name != _ONLY_WITH[name]:
            raise ConfigError(
                f"agent.{name}: expected it only with agent={_ONLY_WITH[name]}, got it with agent={agent.name}; set "
                f"agent={_ONLY_WITH[name]} or leave it out"
            )
        if not name.endswith("command"):
            _require_address(f"agent.{name}", value)
    _require_address("gateway.public_url", config.gateway.public_url)
    make_history(agent.history or "full", max_images=agent.history_images)
    if agent.name == "external":
        _check_program(agent.name, "command", agent.command, agent.url)
    if agent.name == "harness":
        _check_program(agent.name, "harness_command", agent.harness_command, agent.harness_url)
    if (agent.name == "harness") != (environment.name == "harness"):
        raise ConfigError(
            f"agent: expected agent=harness with source_type 'harness', and with no other, got agent={agent.name} on "
            f"{environment.name}; change one of them"
        )
    if agent.name != "gbox" and config.devices.coordinate_mode != "direct":
        raise ConfigError(
            f"coordinate_mode: expected 'direct' with agent={agent.name}, got {config.devices.coordinate_mode!r}; "
            "leave it out, or set agent=gbox"
        )
    if agent.action_format != "qwen3_vl" and (agent.name, config.devices.coordinate_mode) != ("gbox", "direct"):
        raise ConfigError(
            f"agent.action_format: expected it only with agent=gbox and coordinate_mode=direct, got "
            f"{agent.action_format!r} with {agent.name} and {config.devices.coordinate_mode}; leave one out"
        )
    if agent.name == "mini_agent" and environment.name != "gym":
        raise ConfigError(
            "agent: expected tasks of a gym server with agent=mini_agent, got others; set source_type to 'gym'"
        )


def make_agent(config: RolloutConfig, own: GBoxAgent, log_folder: Path) -> Agent:
    """The configured agent; external programs write their output to `log_folder`."""
    agent, devices = config.agent, config.devices
    if agent.name == "mini_agent":
        return MiniAgent(
            base_url=agent.gbox_mini_agent_base_url or DEFAULT_BASE_URL,
            agent=agent.gbox_mini_agent_agent,
            action_space=agent.gbox_mini_agent_standard_action_space,
            max_run_time_s=devices.task_timeout_s + 2 * config.max_turns * devices.turn_timeout_s,
            max_step_time_s=2 * devices.turn_timeout_s,  # for an answer and its actions
        )
    text = agent.command or agent.harness_command
    command = None
    if text is not None:
        command = AgentCommand(argv=tuple(shlex.split(text)), log_folder=log_folder, variables=agent.environment)
    if agent.name == "harness":
        program = HarnessService(url=agent.harness_url or "") if command is None else HarnessCommand(command)
        judge = {"JUDGE_BASE_URL": config.judge.base_url, "JUDGE_MODEL": config.judge.model}
        return HarnessAgent(program=program, judge={name: told for name, told in judge.items() if told is not None})
    if command is not None:
        return ExternalAgent(command)
    return own if agent.url is None else ExternalAgent(AgentService(url=agent.url))


def make_runner(
    config: RolloutConfig,
    devices: OpenDevices,
    access: RecordingAccess,
    *,
    reward: RewardFunction,
    judge: Judge | None,
    log_folder: Path,
    recorder: Recorder,
    watch_goal: bool = False,
) -> RolloutRunner:
    """The runner of rollouts on a share of the devices; a third-party endpoint is always used by the built-in agent."""
    action_format = make_format(
        config.agent.action_format, access.image_settings if isinstance(access, Gateway) else None
    )
    history = make_history(config.agent.history or "full", max_images=config.agent.history_images)
    own = GBoxAgent(history=history, grounder=devices.grounder, action_format=action_format)
    return RolloutRunner(
        devices=devices.pool.share(config.max_concurrent_rollouts),
        gateway=access,
        agent=make_agent(config, own, log_folder) if isinstance(access, Gateway) else own,
        reward=reward,
        watch_goal=watch_goal,
        judge=judge,
        judge_all=config.judge.mode == "compare" or config.reward.startswith(RFT_GRADER),
        recorder=recorder,
        max_turns=config.max_turns,
        time_limits=config.devices,
    )


def make_format(name: FormatName, settings: ImageSettings | None) -> ActionFormat:
    """The format of this name; those with pixels as coordinates need a model's image settings."""
    formats: dict[FormatName, ActionFormat] = {"qwen3_vl": ToolCalls(), "gui_owl": GUI_OWL, "holo3": Holo()}
    if name in IN_PIXELS:
        assert settings is not None, "expected no endpoints, whose image settings are unknown"
        formats["qwen2_5_vl"] = qwen2_5_vl(settings)
        formats["ui_tars"] = UiTars(image_settings=settings)
        formats["holo1_5"] = Holo(pixels_of=settings)
    return formats[name]


@asynccontextmanager
async def open_runners(
    config: CLIConfig,
    devices: OpenDevices,
    sampler: Sampler,
    renderer: Renderer,
    judge: JudgeConfig | None,
    *,
    reward: RewardFunction,
    log_folder: Path,
    recorder: Recorder,
) -> AsyncGenerator[Callable[[], RolloutRunner]]:
    """Makes runners in this process, which share the devices, a gateway and the judge."""
    async with AsyncExitStack() as stack:
        params = sampling_params(config, config.temperature)
        gateway = await stack.enter_async_context(open_gateway(config, sampler, renderer, params))
        yield partial(
            make_runner,
            config,
            devices,
            gateway,
            reward=reward,
            judge=None if judge is None else await stack.enter_async_context(open_judge(judge)),
            log_folder=log_folder,
            recorder=recorder,
            watch_goal=config.sampling.watch_goal or config.credit.milestone_reward > 0,
        )


def sampling_params(config: CLIConfig, temperature: float) -> SamplingParams:
    """How the run samples at this temperature."""
    return SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=config.sampling.seed)


def make_servers(base_url: str | None, server: ServerConfig, log_folder: Path) -> Sequence[ModelServer]:
    """The model servers, not yet started: one per copy of the model, or those at `base_url` if it is set.

    Each copy is a separate vLLM server, so that all turns of a rollout reach the copy that has its earlier turns
    cached; vLLM's data parallelism would distribute requests one by one.
    """
    if base_url is not None:
        return tuple(map(ExternalServer, server_addresses(base_url)))
    server = with_values(server, start_timeout_s=server.start_timeout_s or start_limit_s(server.model_path))
    return [
        VllmServer(
            with_values(server, gpu_names=gpu_names, port=server.port + index if server.port else server.port),
            log_folder / ("vllm.log" if index == 0 else f"vllm-{index + 1}.log"),
        )
        for index, gpu_names in enumerate(copies_of(server.gpu_names, server.tensor_parallel or 1))
    ]


async def start_together(stack: AsyncExitStack, *processes: AbstractAsyncContextManager[object]) -> None:
    """Enter all concurrently; an error of one cancels the others."""
    async with asyncio.TaskGroup() as starting:
        for process in processes:
            starting.create_task(stack.enter_async_context(process), name=f"start-{type(process).__name__}")


async def start_engines(
    stack: AsyncExitStack,
    servers: Sequence[AbstractAsyncContextManager[object]],
    trainer: AbstractAsyncContextManager[object],
    *,
    is_shared: bool,
) -> None:
    """Start model servers and trainer concurrently, or, if they share a GPU, one after the other."""
    if is_shared:  # vLLM measures the GPU's free memory
        await start_together(stack, *servers)
        await start_together(stack, trainer)
    else:
        await start_together(stack, *servers, trainer)


async def compare_speed(config: RolloutConfig, client: SamplingClient, renderer: Renderer) -> None:
    """Warn if the model server, with nothing else to do, takes longer than `turn_timeout_s` for the longest answer."""
    tokens_per_s = await client.measure_speed(canary_tokens(renderer))
    complaint = slow_answers(config.max_tokens, tokens_per_s, config.devices.turn_timeout_s)
    if complaint:
        logger.warning(complaint)


def slow_answers(max_tokens: int, tokens_per_s: float, turn_timeout_s: float) -> str | None:
    """What to change if an answer may take longer than a turn should; None if it does not."""
    longest_s = max_tokens / tokens_per_s
    if longest_s <= turn_timeout_s:
        return None
    return (
        f"max_tokens={max_tokens} at {tokens_per_s:.3g} tokens/s takes {longest_s:.0f} s, turn_timeout_s="
        f"{turn_timeout_s:g}: long responses are not cut off, but slow the run down, and boxes may expire meanwhile; "
        f"lower max_tokens to {int(turn_timeout_s * tokens_per_s)}, or raise turn_timeout_s to {ceil(longest_s)}"
    )


@asynccontextmanager
async def open_gateway(
    config: RolloutConfig, client: Sampler, renderer: Renderer, params: SamplingParams
) -> AsyncGenerator[Gateway]:
    """The gateway, listening on a port only if agents in other processes need it."""
    gateway = Gateway(
        client,
        renderer,
        params,
        public_url=config.gateway.public_url,
        images=ImageFetcher(config.gateway.allowed_media_domains),
    )
    if config.gateway.port is None and config.agent.name == "gbox":
        yield gateway
        return
    async with gateway.serve(config.gateway.host, config.gateway.port or 0):
        yield gateway


def _check_program(agent: str, name: str, command: str | None, url: str | None) -> None:
    if (command is None) == (url is None):
        raise ConfigError(
            f"agent: expected either agent.{name} or agent.{name.replace('command', 'url')} with agent={agent}, got "
            f"{'neither' if url is None else 'both'}; set exactly one"
        )
    if command is not None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(
                f"agent.{name}: expected words as in a shell, got {command!r} ({error}); close the quotes"
            ) from None
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"agent.{name}: expected a command whose program can be found, got {command!r}; write its whole path"
            )
        claim_guest_account(tuple(words), "agent").release()


def _require_address(name: str, value: str | None) -> None:
    try:
        is_address = value is None or (value.startswith(("http://", "https://")) and bool(httpx.URL(value).host))
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise ConfigError(f"{name}: expected an address such as 'http://localhost:4000', got {value!r}; correct it")

"""Makes the configured agent (built-in, gbox-mini-agent or external) and the gateway to the model."""

import shlex
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from cua_rl.agent.external import AgentCommand, AgentService, ExternalAgent
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.mini_agent import DEFAULT_BASE_URL, MiniAgent, MiniAgentSettings
from cua_rl.errors import ConfigError
from cua_rl.renderers.renderer import Renderer
from cua_rl.run.rollout_config import AgentSettings, RolloutConfig
from cua_rl.run.site import Place
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_images import ImageFetcher
from cua_rl.types import SamplingParams

_ONLY_WITH = {"command": "external", "url": "external", "gbox_mini_agent_base_url": "mini_agent"}


def check_agent(config: RolloutConfig, place: Place) -> None:
    """Raise `ConfigError` for agent settings that cannot work."""
    agent = config.agent
    given = {
        "command": agent.command,
        "url": agent.url,
        "gbox_mini_agent_base_url": agent.gbox_mini_agent_base_url,
    }
    for name, value in given.items():
        if value is not None and agent.name != _ONLY_WITH[name]:
            raise ConfigError(
                f"agent.{name}: expected it only with agent={_ONLY_WITH[name]}, got it with agent={agent.name}; set "
                f"agent={_ONLY_WITH[name]} or leave it out"
            )
        if name != "command":
            _require_address(f"agent.{name}", value)
    _require_address("gateway.public_url", config.gateway.public_url)
    if agent.name == "external":
        _check_program(agent)
    if agent.name != "gbox" and config.devices.coordinate_mode != "direct":
        raise ConfigError(
            f"coordinate_mode: expected 'direct' with agent={agent.name}, got {config.devices.coordinate_mode!r}; "
            "leave it out, or set agent=gbox"
        )
    if agent.name == "mini_agent" and place != "gym":
        raise ConfigError(
            "agent: expected tasks of a gym server with agent=mini_agent, got others; set source_type to 'gym'"
        )


def make_agent(
    config: RolloutConfig, own: GBoxAgent, gateway: Gateway, log_folder: Path
) -> GBoxAgent | ExternalAgent | MiniAgent:
    """The configured agent; external programs write their output to `log_folder`."""
    agent, devices = config.agent, config.devices
    if agent.name == "mini_agent":
        mini = MiniAgentSettings(
            base_url=agent.gbox_mini_agent_base_url or DEFAULT_BASE_URL,
            agent=agent.gbox_mini_agent_agent,
            action_space=agent.gbox_mini_agent_standard_action_space,
            max_run_time_s=devices.task_timeout_s + config.max_turns * devices.turn_timeout_s,
            max_step_time_s=devices.turn_timeout_s,
        )
        return MiniAgent(mini, gateway)
    if agent.command is not None:
        argv = tuple(shlex.split(agent.command))
        return ExternalAgent(AgentCommand(argv=argv, log_folder=log_folder), gateway)
    if agent.url is not None:
        return ExternalAgent(AgentService(url=agent.url), gateway)
    return own


@asynccontextmanager
async def open_gateway(
    config: RolloutConfig, client: SamplingClient, renderer: Renderer, params: SamplingParams
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


def _check_program(agent: AgentSettings) -> None:
    if (agent.command is None) == (agent.url is None):
        raise ConfigError(
            f"agent: expected either agent.command or agent.url with agent=external, got "
            f"{'neither' if agent.url is None else 'both'}; say how the agent is reached"
        )
    if agent.command is not None:
        _require_command(agent.command)


def _require_address(name: str, value: str | None) -> None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ConfigError(f"{name}: expected an address such as 'http://localhost:4000', got {value!r}; correct it")


def _require_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"agent.command: expected words as in a shell, got {command!r} ({error}); close the quotes"
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"agent.command: expected a command whose program can be found, got {command!r}; write its whole path"
        )

"""From what the user asked for to who acts: our own agent, gbox-mini-agent, or a program of the user's; and to the
gateway through which they reach the model.
"""

import shlex
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from cua_rl.agent.agent import Agent
from cua_rl.agent.external import AgentCommand, AgentService, ExternalAgent
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.mini_agent import DEFAULT_BASE_URL, MiniAgent, MiniAgentSettings
from cua_rl.errors import ConfigError
from cua_rl.renderers.renderer import Renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.gateway_images import ImageFetcher
from cua_rl.tasks.source_config import TaskSources, find_site
from cua_rl.types import SamplingParams

_ONLY_WITH = {"agent_command": "external", "agent_url": "external", "gbox_mini_agent_base_url": "mini_agent"}


class AgentSettings(Protocol):
    """The part of a recipe's configuration that is about who acts."""

    @property
    def agent(self) -> str: ...
    @property
    def coordinate_mode(self) -> str: ...
    @property
    def agent_command(self) -> str | None: ...
    @property
    def agent_url(self) -> str | None: ...
    @property
    def gbox_mini_agent_base_url(self) -> str | None: ...
    @property
    def gbox_mini_agent_agent(self) -> str: ...
    @property
    def gbox_mini_agent_standard_action_space(self) -> str: ...
    @property
    def tasks(self) -> TaskSources: ...
    @property
    def gateway_host(self) -> str: ...
    @property
    def gateway_port(self) -> int | None: ...
    @property
    def gateway_public_url(self) -> str | None: ...
    @property
    def allowed_media_domains(self) -> Sequence[str]: ...
    @property
    def max_turns(self) -> int: ...
    @property
    def task_timeout_s(self) -> float: ...
    @property
    def turn_timeout_s(self) -> float: ...


def check_agent(settings: AgentSettings) -> None:
    """Raise `ConfigError` for an agent that can never work."""
    given = {
        "agent_command": settings.agent_command,
        "agent_url": settings.agent_url,
        "gbox_mini_agent_base_url": settings.gbox_mini_agent_base_url,
    }
    for name, value in given.items():
        if value is not None and settings.agent != _ONLY_WITH[name]:
            raise ConfigError(
                f"{name}: expected it only with agent={_ONLY_WITH[name]}, got it with agent={settings.agent}; set "
                f"agent={_ONLY_WITH[name]} or leave it out"
            )
        if name != "agent_command":
            _require_address(name, value)
    _require_address("gateway_public_url", settings.gateway_public_url)
    if settings.agent == "external":
        _check_program(settings)
    if settings.agent != "gbox" and settings.coordinate_mode != "direct":
        raise ConfigError(
            f"coordinate_mode: expected 'direct' with agent={settings.agent}, got {settings.coordinate_mode!r}; leave "
            "it out, or set agent=gbox"
        )
    if settings.agent == "mini_agent" and find_site(settings.tasks) != "gym":
        raise ConfigError(
            "agent: expected tasks of a gym server with agent=mini_agent, got others; set source_type to 'gym'"
        )


def make_agent(settings: AgentSettings, own: GBoxAgent, log_folder: Path) -> Agent:
    """Our own agent unless another one is configured, whose programs write to `log_folder`."""
    if settings.agent == "mini_agent":
        mini = MiniAgentSettings(
            base_url=settings.gbox_mini_agent_base_url or DEFAULT_BASE_URL,
            agent=settings.gbox_mini_agent_agent,
            action_space=settings.gbox_mini_agent_standard_action_space,
            max_run_time_s=settings.task_timeout_s + settings.max_turns * settings.turn_timeout_s,
            max_step_time_s=settings.turn_timeout_s,
        )
        return MiniAgent(mini)
    if settings.agent_command is not None:
        argv = tuple(shlex.split(settings.agent_command))
        return ExternalAgent(AgentCommand(argv=argv, log_folder=log_folder))
    if settings.agent_url is not None:
        return ExternalAgent(AgentService(url=settings.agent_url))
    return own


@asynccontextmanager
async def open_gateway(
    settings: AgentSettings, client: SamplingClient, renderer: Renderer, params: SamplingParams
) -> AsyncGenerator[Gateway]:
    """The gateway; on a socket if agents in other processes are to reach it."""
    gateway = Gateway(
        client,
        renderer,
        params,
        public_url=settings.gateway_public_url,
        images=ImageFetcher(settings.allowed_media_domains),
    )
    if settings.gateway_port is None and settings.agent == "gbox":
        yield gateway
        return
    async with gateway.serve(settings.gateway_host, settings.gateway_port or 0):
        yield gateway


def _check_program(settings: AgentSettings) -> None:
    if (settings.agent_command is None) == (settings.agent_url is None):
        raise ConfigError(
            f"agent: expected either agent_command or agent_url with agent=external, got "
            f"{'neither' if settings.agent_url is None else 'both'}; say how the agent is reached"
        )
    if settings.agent_command is not None:
        _require_command(settings.agent_command)


def _require_address(name: str, value: str | None) -> None:
    if value is not None and not value.startswith(("http://", "https://")):
        raise ConfigError(f"{name}: expected an address such as 'http://localhost:4000', got {value!r}; correct it")


def _require_command(command: str) -> None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"agent_command: expected words as in a shell, got {command!r} ({error}); close the quotes"
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(
            f"agent_command: expected a command whose program can be found, got {command!r}; write its whole path"
        )

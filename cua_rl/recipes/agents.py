"""From what the user asked for to who acts: our own agent, gbox-mini-agent, or a program of the user's."""

import shlex
import shutil
from pathlib import Path
from typing import Protocol

from cua_rl.agent.external import AgentCommand, AgentService, ExternalAgent
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.errors import ConfigError
from cua_rl.sampling.gateway import Gateway


class AgentSettings(Protocol):
    """The part of a recipe's configuration that is about who acts."""

    @property
    def agent(self) -> str: ...
    @property
    def agent_command(self) -> str | None: ...
    @property
    def agent_url(self) -> str | None: ...


def check_agent(settings: AgentSettings) -> None:
    """Raise `ConfigError` for an agent that can never work."""
    given = [name for name in ("agent_command", "agent_url") if _value(settings, name) is not None]
    if settings.agent != "external":
        if given:
            raise ConfigError(
                f"{given[0]}: expected it only with agent=external, got it with agent={settings.agent}; "
                "set agent=external"
            )
        return
    if len(given) != 1:
        raise ConfigError(
            f"agent: expected either agent_command or agent_url with agent=external, got "
            f"{' and '.join(given) or 'neither'}; say how the agent is reached"
        )
    if settings.agent_command is not None:
        _require_command(settings.agent_command)
    elif not (settings.agent_url or "").startswith(("http://", "https://")):
        raise ConfigError(
            f"agent_url: expected an address such as 'http://localhost:4000/work', got {settings.agent_url!r}; "
            "correct it"
        )


def make_agent(
    settings: AgentSettings, own: GBoxAgent, gateway: Gateway, log_folder: Path
) -> GBoxAgent | ExternalAgent:
    """Our own agent unless another one is configured, whose programs write to `log_folder`."""
    if settings.agent_command is not None:
        argv = tuple(shlex.split(settings.agent_command))
        return ExternalAgent(AgentCommand(argv=argv, log_folder=log_folder), gateway)
    if settings.agent_url is not None:
        return ExternalAgent(AgentService(url=settings.agent_url), gateway)
    return own


def _value(settings: AgentSettings, name: str) -> str | None:
    return settings.agent_command if name == "agent_command" else settings.agent_url


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

"""One trial of a Harbor task; the verifier's reward is the reward.

The payload is a trial as Harbor's job files have it: `task` (`path`; or `name` and `ref` of its registry; or `git_url`,
`git_commit_id` and `path`), `agent`, `environment`, `verifier`. Beside these, `reward` names the key of the verifier's
rewards that counts, by default "reward", and `success` the lowest one of a success, by default 1.
"""

import asyncio
import json
import os
import shutil
import sys
from typing import NoReturn

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # LiteLLM would download a list of prices

try:
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.agent.name import AgentName
    from harbor.models.trial.config import TrialConfig
    from harbor.models.trial.error_policy import ERROR_POLICIES
    from harbor.models.trial.result import TrialResult
    from harbor.trial.trial import Trial
    from pydantic import ValidationError
except (ImportError, SyntaxError) as lacks:
    print(
        f"expected Harbor on Python 3.12 or newer, got {lacks!r} on Python {sys.version.split()[0]}: run "
        "examples/harnesses/make_environment.sh harbor, and name .harnesses/harbor/bin/python in harness_command",
        file=sys.stderr,
    )
    raise SystemExit(78) from None

# the gateway refuses a request after the last turn with 403: what the agent has done until then is graded
OUT_OF_TURNS = {"PermissionDeniedError": {"should_grade": True, "has_valid_reward": True}}
OPTIONS = {
    AgentName.TERMINUS_2.value: {"enable_summarize": False, "record_terminal_session": False},
    AgentName.COMPUTER_1.value: {"provider": "openai"},
}
"""Of agents that take a limit of turns. Summaries would begin new training sequences, recordings need asciinema; the
generic provider of computer-1 sends WebP."""
CAUSED_BY_OUTPUT = {"ValueError", "UnicodeEncodeError", "JSONDecodeError", "KeyError", "IndexError", "TypeError"}
"""Errors outside Harbor's table that an agent makes of odd output; a fault would spare the policy its failure."""


def refuse(sentence: str) -> NoReturn:
    """End with the status that stops the run: no rollout of this task can work here."""
    print(f"harbor: {sentence}", file=sys.stderr)
    raise SystemExit(78)


def read_trial(fields: dict) -> TrialConfig:
    """The trial with the model and limits of this rollout; ends the program for one that cannot run."""
    agent = fields.get("agent", {})
    if "import_path" not in agent:
        agent = {"name": AgentName.TERMINUS_2.value} | agent
    if agent.get("name") in OPTIONS:
        options = OPTIONS[agent["name"]] | {"max_turns": int(os.environ["CUA_MAX_TURNS"])}
        agent["kwargs"] = options | agent.get("kwargs", {})
    agent["model_name"] = f"openai/{os.environ['CUA_MODEL']}"  # its address is in OPENAI_BASE_URL
    agent["skip_model_parsing"] = (
        agent.get("name") == AgentName.COMPUTER_1.value
    )  # or it refuses a name it does not know
    fields |= {"agent": agent, "trials_dir": os.environ["CUA_WORK_DIR"], "override_error_policy": OUT_OF_TURNS}
    try:
        config = TrialConfig.model_validate(fields)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['input']!r:.60}" for one in error.errors()[:3])
        refuse(f"expected a payload with the fields of a Harbor trial, got {wrong}")
    task = config.task
    if task.path and not task.git_url and not (task.path / "task.toml").is_file():
        refuse(f"expected task.toml in task.path {str(task.path)!r}, found none: name the folder of a task")
    return config


def check_machine(config: TrialConfig) -> None:
    """Ask the environment's own library what this machine lacks; a daemon that does not answer may come back."""
    wanted = config.environment
    try:
        EnvironmentFactory.run_preflight(wanted.type, wanted.import_path, wanted.kwargs)
    except SystemExit as lacks:
        if wanted.type == "docker" and shutil.which("docker"):
            raise RuntimeError(f"expected a Docker daemon that answers this user: {lacks}") from None
        refuse(f"expected a machine for the environment {wanted.import_path or wanted.type}: {lacks}")
    except (ValueError, ImportError) as error:
        refuse(f"expected an environment that can be made, got {error}")


async def play(config: TrialConfig) -> TrialResult:
    try:
        trial = await Trial.create(config)
    except (ValueError, FileNotFoundError) as error:
        refuse(f"expected a task that this environment can run, got {error}")
    return await trial.run()


def fault_of(result: TrialResult) -> str | None:
    """Why the trial says nothing about the policy, if so; of a task in steps, each may have failed by itself."""
    for error in result.recorded_exceptions():
        is_known = error.exception_type in ERROR_POLICIES or error.exception_type in CAUSED_BY_OUTPUT
        if not (is_known and error.policy.has_valid_reward):
            return f"{error.exception_type}: {error.exception_message}"
    return None if result.verifier_result else "expected rewards of the verifier, got none"


def report(result: TrialResult, key: str, success: float) -> dict:
    """The rollout's result: the verifier's reward of this name, or a fault; rewards below `success` are none."""
    rewards = (result.verifier_result and result.verifier_result.rewards) or {}
    reward, fault = rewards.get(key), fault_of(result)
    if fault is None and reward is None:
        fault = f"expected the reward {key!r}, got {rewards!r}: name one of them in the payload as `reward`"
    return {
        "reward": reward,
        "success": None if reward is None else reward >= success,
        "metrics": rewards,
        "fault": {"kind": "environment", "message": fault} if fault else None,
    }


def main() -> None:
    os.write(int(os.environ["CUA_RESULT_FD"]), b"{}\n")  # what it runs for the policy could write the file
    payload = json.load(sys.stdin)
    key, success = payload.pop("reward", "reward"), payload.pop("success", 1)
    config = read_trial(payload)
    check_machine(config)
    result = report(asyncio.run(play(config)), key, success)
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


if __name__ == "__main__":
    main()

"""One episode of a verifiers environment (v1): the payload is its `env` block, and the index of the task in its set."""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("NLTK_DATA", str(Path(__file__).parent / "nltk_data"))  # TextArena would download word lists

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.runtimes import SubprocessConfig, SubprocessRuntime
from verifiers.v1.utils.loaders import load_environment


async def use_this_interpreter(self: SubprocessRuntime, script: str, *_: object, **__: object) -> list[str]:
    """Run verifiers' chat program with the packages of this environment; uv would fetch them for every rollout."""
    path = Path(os.environ["CUA_WORK_DIR"]) / "program.py"
    path.write_text(script)
    return [sys.executable, str(path)]


async def play(payload: dict) -> vf.Episode:
    SubprocessRuntime.prepare_uv_script = use_this_interpreter
    env = EvalConfig.model_validate({"env": payload["env"]}).env
    for role in agent_config_fields(env).values():
        role.runtime, role.max_turns = SubprocessConfig(), int(os.environ["CUA_MAX_TURNS"])  # the default is a cloud
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    loaded = load_environment(env)
    task = next(itertools.islice(loaded.taskset, payload["index"], None))
    async with loaded.serving():
        return await loaded.run_episode(task, ModelContext(model=os.environ["CUA_MODEL"], client=client))


def main() -> None:
    os.write(int(os.environ["CUA_RESULT_FD"]), b"{}\n")  # what it runs for the policy could write the file
    episode = asyncio.run(play(json.load(sys.stdin)))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    result = {"reward": sum(trace.reward for trace in episode.traces), "answer": None, "fault": None}
    result["metrics"] = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
    if not episode.ok:  # verifiers gives such an episode a reward of 0.0: no failure of the policy
        message = "; ".join(f"{error.type}: {error.message}" for error in errors)
        kind = "model" if any(error.type == "ProviderError" for error in errors) else "environment"
        result["fault"] = {"kind": kind, "message": message}
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


if __name__ == "__main__":
    main()

"""Configuration of agents, devices, judge and model server, shared by all recipes that run rollouts."""

from typing import Literal, cast

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.command_line.fields import Given, check_numbers, setting
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import BoxType, Environment
from cua_rl.environments.table import ENVIRONMENTS, TaskSources, find_environment
from cua_rl.judge.config import JudgeConfig, check_judge_settings
from cua_rl.sampling.config import ServerConfig
from cua_rl.types.errors import ConfigError
from cua_rl.types.judgement import MAX_REWARD

Tasks = dict[str, object] | list[dict[str, object]]

FormatName = Literal["qwen3_vl", "qwen2_5_vl", "gui_owl", "ui_tars", "holo1_5", "holo3"]
IN_PIXELS: tuple[FormatName, ...] = ("qwen2_5_vl", "ui_tars", "holo1_5")
"""Formats whose coordinates are pixels of the resized screenshot, so that a model's image settings must be known."""
_PORT = (0, 65535)


def device_presets(given: Given) -> Given:
    """Defaults of the environment; Linux boxes imply GBox."""
    environment = given_environment(given.get("tasks"))
    presets: dict[str, object] = {}
    if environment is None:
        if given.get("box_type") == "linux":
            presets["device"] = "gbox"
        environment = ENVIRONMENTS.get(str(given.get("device", presets.get("device"))))
    return {**presets, **environment.presets} if environment is not None else presets


def given_environment(tasks: object) -> Environment | None:
    """The environment that these task sources bring; None for the configured device, and for what cannot be read."""
    if tasks is None:
        return None
    try:
        environment = find_environment(cast("TaskSources", tasks))
    except ConfigError:
        return None  # load_tasks reports what is wrong with them
    return None if environment.is_configured else environment


@chz.chz
class AgentSettings:
    """The agent, and which screenshots its prompts contain."""

    name: Literal["gbox", "mini_agent", "external", "harness"] = setting(
        "gbox",
        "agent: gbox, the built-in agent; mini_agent, a gbox-mini-agent server on gym tasks; external, "
        "your own program on our devices; harness, a program with its own environment and score",
        for_group=True,
    )
    command: str | None = setting(
        None, "agent=external: command started for each rollout, with its parameters in environment variables"
    )
    environment: tuple[str, ...] = setting(
        (), "names of environment variables that these commands get in addition to PATH, language and time zone"
    )
    url: str | None = setting(
        None, "agent=external: address of a server that receives each rollout and responds when the rollout is done"
    )
    harness_command: str | None = setting(
        None, "agent=harness: command that runs a whole rollout and reports its score (docs/agents.md)"
    )
    harness_url: str | None = setting(
        None, "agent=harness: address of a server that receives each rollout and responds with its result"
    )
    gbox_mini_agent_base_url: str | None = setting(
        None, "agent=mini_agent: address of the server; None is http://localhost:3000"
    )
    gbox_mini_agent_agent: Literal["mai-ui", "qwen3-vl"] = setting(
        "mai-ui", "agent=mini_agent: name of the agent on that server"
    )
    gbox_mini_agent_standard_action_space: Literal["mobile", "pc"] = setting(
        "mobile", "agent=mini_agent: its action space"
    )
    action_format: FormatName = setting(
        "qwen3_vl",
        "agent=gbox: the actions and coordinates that the model was trained on (docs/models.md)",
    )
    history: HistoryPolicy | None = setting(
        None,
        "screenshots in the prompt: full: all; block_drop: the oldest are dropped in blocks; last_n: only the newest; "
        "None is full if every turn fits into max_model_len, otherwise block_drop with as many as fit",
    )
    history_images: int = setting(
        8, "block_drop, last_n: maximum number of screenshots in the prompt; block_drop drops half of them", at_least=1
    )


@chz.chz
class GatewaySettings:
    """The gateway through which agents outside this process reach the model."""

    port: int | None = setting(None, "port to listen on; None uses a free one", within=_PORT)
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 allows agents on other machines")
    public_url: str | None = setting(
        None, "URL for agents on other machines, such as http://trainer:8100; None is the listening address"
    )
    allowed_media_domains: list[str] = setting(
        doc="hosts from which screenshots that agents send as links are fetched", factory=list[str]
    )


@chz.chz
class RunConfig:
    """What all runs have in common: model, tasks and folder."""

    model_name: str | None = setting(
        None, "folder or hub id of a vision-language model (docs/models.md); None uses the included tiny model"
    )
    renderer_name: str | None = setting(
        None,
        "renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen2_5_vl, qwen3_5, qwen3; None detects "
        "it from the model",
    )
    tasks: Tasks = setting(doc="source of tasks", factory=lambda: {"source_type": "demo_training"})
    max_turns: int = setting(20, "maximum turns of a rollout or demonstration; a task may allow fewer", at_least=1)
    log_path: str | None = setting(
        None, "folder of the run; None is a folder in ./runs (or log_dir) named after its settings", per_attempt=True
    )
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = setting(
        "ask", "what to do if the folder already holds a run; resume continues it", per_attempt=True
    )
    dry_run: bool = setting(
        False, "check everything, print the effective configuration as JSON, and exit", per_attempt=True
    )
    machine: str | None = setting(
        None,
        "dry_run: estimate the memory for another machine: number of GPUs x GiB of each, such as 4x80",
        per_attempt=True,
    )


@chz.chz
class RolloutConfig(RunConfig):
    """What training and evaluation have in common: rollouts."""

    base_url: str | None = setting(
        None,
        "URL of a running vLLM server (with runtime LoRA updating), or several, separated by commas; None starts one",
    )
    device: Literal["simulator", "gbox", "adb"] = setting(
        "simulator",
        "device that tasks run on: simulator (simulated phone), gbox (cloud or self-hosted boxes), adb "
        "(attached phones)",
    )
    box_type: BoxType = setting("android", "gbox: kind of box; linux implies device=gbox")
    gbox_api_key: str | None = setting(
        None, "API key of a GBox account, never stored; set GBOX_API_KEY in the environment, or gbox_api_key_file=PATH"
    )
    max_tokens: int = setting(2048, "maximum tokens of one model response", at_least=1)
    reward: str = setting(
        "binary",
        "reward function: binary, score, completion, efficiency, shaped, comprehensive, judge (binary, "
        "for tasks that a judge decides), module:function, or rft_grader:FILE with a grader of OpenAI's fine-tuning",
    )
    reward_clip: float | None = setting(
        None,
        "bound on the absolute value of rewards, so that a single outlier does not dominate a step; None sets no bound",
        within=(0.0, MAX_REWARD),
    )
    max_concurrent_rollouts: int = setting(
        0,
        "maximum number of devices in use at a time; 8 with GBox and gyms; 0: what the KV cache holds, at most 128",
        at_least=0,
    )
    agent: AgentSettings = chz.field(default_factory=AgentSettings)
    devices: DeviceConfig = chz.field(default_factory=DeviceConfig)
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    gateway: GatewaySettings = chz.field(default_factory=GatewaySettings)
    judge: JudgeConfig = chz.field(default_factory=JudgeConfig)

    @property
    def vllm_url(self) -> str | None:
        """`base_url`, if it is of vLLM servers."""
        return self.base_url

    @chz.validate
    def _values_make_sense(self) -> None:
        check_numbers(self)
        check_judge_settings(self.judge)


ROLLOUT_SECTIONS = {"Agent and devices": ("agent", "device", "box_type", "max_turns", "max_tokens")}
"""What `--help` shows of these settings."""

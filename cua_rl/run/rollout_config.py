"""Configuration of agents, devices, judge and model server, shared by all recipes that run rollouts."""

from typing import Literal, cast

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.errors import ConfigError
from cua_rl.judge.config import JudgeConfig, check_judge_settings
from cua_rl.judgement import MAX_REWARD
from cua_rl.sampling.config import ServerConfig
from cua_rl.settings import Given, check_numbers, setting
from cua_rl.tasks.source_config import TaskSources, find_task_backend

Tasks = dict[str, object] | list[dict[str, object]]

_DAY_S = 86400.0
_TIME_LIMIT = (0.0, _DAY_S)
_PORT = (0, 65535)

PAID_DEVICES: Given = {"max_concurrent_rollouts": 8}
"""Boxes cost money while they run, and gym servers have few devices."""


def device_presets(given: Given) -> Given:
    """Defaults of the device: Linux boxes imply GBox, few paid devices run at a time, a harness reports the reward."""
    backend = given_task_backend(given.get("tasks"))
    presets: dict[str, object] = {}
    if backend is None and given.get("box_type") == "linux":
        presets["device"] = "gbox"
    if backend == "harness":
        presets["reward"] = "score"
    is_gbox = backend is None and given.get("device", presets.get("device")) == "gbox"
    return {**presets, **PAID_DEVICES} if is_gbox or backend == "gym" else presets


def given_task_backend(tasks: object) -> str | None:
    """The devices that these task sources bring; None for the configured device, and for what cannot be read."""
    if tasks is None:
        return None
    try:
        return find_task_backend(cast("TaskSources", tasks))
    except ConfigError:
        return None  # load_tasks reports what is wrong with them


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
        (), "names of environment variables that such a command gets in addition to PATH, language and time zone"
    )
    url: str | None = setting(
        None, "agent=external: address of a server that receives each rollout and responds when it is done"
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
    history: HistoryPolicy | None = setting(
        None,
        "screenshots in the prompt: full: all; block_drop: the oldest are dropped in blocks; last_n: only the newest; "
        "None is full if every turn fits into max_model_len, otherwise block_drop with as many as fit",
    )
    history_images: int = setting(8, "block_drop, last_n: maximum number of screenshots in the prompt", at_least=1)
    history_block: int = setting(4, "block_drop: number of screenshots dropped at once", at_least=1)


@chz.chz
class DeviceSettings:
    """Devices: screens, limits of time, GBox boxes, phones, gym servers."""

    screen_scale: int = setting(1, "simulator: scale factor of the 192x320 pixel screen, 1 to 16", within=(0, 16))
    browser_scale: float | None = setting(
        None, "web pages: scale factor of screenshots; None uses the task set's default", within=(0.0, 4.0)
    )
    coordinate_mode: Literal["direct", "gbox", "ui_tars"] = setting(
        "direct",
        "direct: the model outputs coordinates, 0 to 1000; gbox: it describes elements, which GBox's "
        "coordinate model locates; ui_tars: it acts in the format of UI-TARS-1.5, with pixels as coordinates",
    )
    gbox_screenshots: Literal["inline", "stored"] = setting(
        "inline", "gbox: screenshots inside responses (inline), or through GBox's storage (stored)"
    )
    record_devices: bool = setting(
        False, "gbox: record a video of every rollout as recordings/<rollout>.mp4 in the run's folder"
    )
    adb_serials: list[str] = setting(
        doc="adb: serial numbers of the phones to use; empty uses all attached ones", factory=list[str]
    )
    device_creations_per_s: float | None = setting(
        None, "maximum device creations per second; None is unlimited", within=(0.0, 1000.0)
    )
    lease_timeout_s: float = setting(300.0, "limit for obtaining a device, including retries", within=_TIME_LIMIT)
    setup_timeout_s: float = setting(300.0, "limit for preparing a task on its device", within=_TIME_LIMIT)
    turn_timeout_s: float = setting(
        300.0,
        "limit for the device's time in one turn, and for a model server without a new token; exceeding it is a fault",
        within=_TIME_LIMIT,
    )
    task_timeout_s: float = setting(
        1800.0,
        "limit for the policy's own time in one rollout: its waits and, for an agent outside this "
        "process, the time between requests; exceeding it ends the rollout as if out of turns",
        within=_TIME_LIMIT,
    )
    validate_timeout_s: float = setting(60.0, "limit for validating a task on its device", within=_TIME_LIMIT)
    gym_base_url: str | None = setting(
        None, "gym server for task sources that name none; None is http://localhost:5010"
    )
    gym_id: str | None = setting(None, "gym for task sources that name none; None is umetrip")
    gym_parallel_creates: int = setting(
        1, "executions created concurrently on a gym server; some servers handle only one at a time", at_least=1
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
        doc="hosts from which screenshots are fetched that agents send as links", factory=list[str]
    )


@chz.chz
class RunConfig:
    """What all runs have in common: model, tasks and folder."""

    model_name: str | None = setting(
        None, "folder or hub id of a Qwen3-VL or Qwen2.5-VL model; None uses the included tiny model"
    )
    renderer_name: str | None = setting(
        None,
        "renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen2_5_vl, qwen3_5, qwen3; None detects "
        "it from the model",
    )
    tasks: Tasks = setting(doc="source of tasks (TaskSourceConfig)", factory=lambda: {"source_type": "demo_training"})
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
        "dry_run: plan the memory of this machine instead, number of GPUs x GiB of each, such as 4x80",
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
    box_type: Literal["android", "linux"] = setting("android", "gbox: kind of box; linux implies device=gbox")
    gbox_api_key: str | None = setting(
        None, "API key of a GBox account, never stored; set GBOX_API_KEY in the environment, or gbox_api_key_file=PATH"
    )
    max_tokens: int = setting(2048, "maximum tokens of one model response", at_least=1)
    reward: str = setting(
        "binary",
        "reward function: binary, score, completion, efficiency, shaped, comprehensive, judge (binary, "
        "for tasks that a judge decides), or module:function",
    )
    reward_clip: float | None = setting(
        None,
        "bound on the absolute value of rewards, so that a single outlier does not decide a step; None leaves them",
        within=(0.0, MAX_REWARD),
    )
    max_concurrent_rollouts: int = setting(
        0,
        "maximum number of devices in use at a time; 8 with GBox and gyms; 0: what the KV cache holds, at most 128",
        at_least=0,
    )
    agent: AgentSettings = chz.field(default_factory=AgentSettings)
    devices: DeviceSettings = chz.field(default_factory=DeviceSettings)
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    gateway: GatewaySettings = chz.field(default_factory=GatewaySettings)
    judge: JudgeConfig = chz.field(default_factory=JudgeConfig)

    @chz.validate
    def _values_make_sense(self) -> None:
        check_numbers(self)
        check_judge_settings(self.judge)


ROLLOUT_SECTIONS = {"Agent and devices": ("agent", "device", "box_type", "max_turns", "max_tokens")}
"""What `--help` shows of these settings."""

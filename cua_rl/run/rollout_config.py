"""Configuration of agents, devices, judge and model server, shared by all recipes that run rollouts."""

from typing import Literal, cast

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import Environment
from cua_rl.environments.table import ENVIRONMENTS, TaskSources, find_environment
from cua_rl.errors import ConfigError
from cua_rl.judgement import MAX_REWARD
from cua_rl.masking import secret_names
from cua_rl.settings import Given, check_numbers, setting

Tasks = dict[str, object] | list[dict[str, object]]

_DAY_S = 86400.0
_TIME_LIMIT = (0.0, _DAY_S)
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
        (), "names of environment variables that such a command gets in addition to PATH, language and time zone"
    )
    url: str | None = setting(
        None, "agent=external: address of a server that receives each rollout and responds when it is done"
    )
    harness_command: str | None = setting(
        None, "agent=harness: command that runs a whole rollout and reports its score (docs/harnesses.md)"
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
class ServerSettings:
    """The vLLM server that a run starts, and the context of the model."""

    port: int | None = setting(
        None, "loopback port of the server (copies use the next ones); None uses a Unix socket", within=_PORT
    )
    max_model_len: int | None = setting(
        None, "maximum tokens of prompt and response together; None is the model's limit, at most 16384", at_least=64
    )
    max_num_seqs: int | None = setting(
        None, "maximum batch size, requests; None is 128, or as many as the KV cache holds halfway through", at_least=1
    )
    max_images: int | None = setting(
        None, "maximum screenshots per prompt; None derives it from history and turns", at_least=1
    )
    max_pixels: int | None = setting(
        None,
        "maximum pixels of a screenshot as the model sees it; larger ones are scaled down, and a token is 32 x 32 "
        "pixels; None is the model's limit",
        at_least=4096,
    )
    gpus: list[int] | None = setting(
        None, "GPUs, such as 0,1; None is about half of several GPUs, all of them in an evaluation"
    )
    tensor_parallel: int | None = setting(
        None, "GPUs per copy of the model; None is as few as hold the model and a KV cache", at_least=1
    )
    gpu_memory_utilization: float | None = setting(
        None, "fraction of GPU memory; None is 0.85, or what the trainer leaves of a shared GPU", within=(0.0, 1.0)
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "precision of the server; auto is the checkpoint's on a GPU and float32 on a CPU"
    )
    start_timeout_s: float | None = setting(
        None,
        "limit for the start, which loads the weights and compiles; None is 600 s and a second per 50 MB of weights",
        within=_TIME_LIMIT,
    )
    vllm_args: str = setting(
        "", "more options of vLLM's server, as on its command line, such as '--max-num-batched-tokens 8192'"
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
class JudgeSettings:
    """The judge of tasks without a validator; there is none unless `judge.model` is set."""

    mode: Literal["where_needed", "compare"] = setting(
        "where_needed",
        "where_needed: judge only tasks without a validator; compare: judge all tasks, for comparison "
        "with the validators, which decide",
        for_group=True,
    )
    base_url: str | None = setting(
        None,
        "URL of the judge's OpenAI-compatible endpoint, including /v1; its key is read from "
        "JUDGE_API_KEY, never stored",
    )
    model: str | None = setting(
        None, "vision-language model that judges tasks without a validator from screenshots; None disables the judge"
    )
    prompt: str | None = setting(None, "text file with the judge's system prompt; None uses the package's")
    votes: int = setting(1, "votes per rollout, odd; more than half must agree", at_least=1)
    screenshots: Literal["final", "all"] = setting("final", "screenshots that the judge sees: the last one, or all")
    timeout_s: float = setting(60.0, "limit for one vote, including retries after transport errors", within=_TIME_LIMIT)
    max_retries: int = setting(
        3,
        "retries after transport errors (no connection, 408, 409, 429, 5xx); received answers are never "
        "requested again",
        at_least=0,
    )
    max_concurrent: int = setting(16, "maximum concurrent requests to the judge", at_least=1)
    input_price: float | None = setting(
        None, "price of the judge's prompt tokens, US dollars per million; None records no cost", at_least=0.0
    )
    output_price: float | None = setting(
        None, "price of the judge's answer tokens, US dollars per million; None records no cost", at_least=0.0
    )
    extra: dict[str, object] = setting(
        doc='additional fields of every request to the judge, such as {"temperature": 0.5}', factory=dict[str, object]
    )


_FIELDS_OF_EVERY_REQUEST = frozenset({"model", "messages", "stream", "n"})


def check_judge_settings(judge: JudgeSettings) -> None:
    """Raise `ValueError` for what no judge can work with."""
    if judge.votes % 2 == 0:
        raise ValueError(f"judge.votes: expected an odd number, for majorities, got {judge.votes}; add one")
    pairs = (
        {"base_url": judge.base_url, "model": judge.model},
        {"input_price": judge.input_price, "output_price": judge.output_price},
    )
    for pair in pairs:
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            given = next(name for name in pair if name not in missing)
            raise ValueError(f"judge.{missing[0]}: expected it beside judge.{given}, got none; set both")
    if secrets := secret_names(judge.extra):
        raise ValueError(
            f"judge.extra: expected no secrets, which would be stored with the run, got {secrets[0]!r}; put the "
            "judge's key into JUDGE_API_KEY"
        )
    if taken := _FIELDS_OF_EVERY_REQUEST & set(judge.extra):
        raise ValueError(
            f"judge.extra: expected fields beside those that every request has, got {min(taken)!r}; leave it out"
        )


@chz.chz
class RolloutConfig:
    """The settings that training and evaluation share."""

    model_name: str | None = setting(
        None, "folder or hub id of a Qwen3-VL or Qwen2.5-VL model; None uses the included tiny model"
    )
    base_url: str | None = setting(
        None,
        "URL of a running vLLM server (with runtime LoRA updating), or several, separated by commas; None starts one",
    )
    renderer_name: str | None = setting(
        None,
        "renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen2_5_vl, qwen3_5, qwen3; None detects "
        "it from the model",
    )
    tasks: Tasks = setting(doc="source of tasks", factory=lambda: {"source_type": "demo_training"})
    device: Literal["simulator", "gbox", "adb"] = setting(
        "simulator",
        "device that tasks run on: simulator (simulated phone), gbox (cloud or self-hosted boxes), adb "
        "(attached phones)",
    )
    box_type: Literal["android", "linux"] = setting("android", "gbox: kind of box; linux implies device=gbox")
    gbox_api_key: str | None = setting(
        None, "API key of a GBox account, never stored; set GBOX_API_KEY in the environment, or gbox_api_key_file=PATH"
    )
    max_turns: int = setting(20, "maximum turns of a rollout; a task may allow fewer", at_least=1)
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
    agent: AgentSettings = chz.field(default_factory=AgentSettings)
    devices: DeviceConfig = chz.field(default_factory=DeviceConfig)
    server: ServerSettings = chz.field(default_factory=ServerSettings)
    gateway: GatewaySettings = chz.field(default_factory=GatewaySettings)
    judge: JudgeSettings = chz.field(default_factory=JudgeSettings)

    @chz.validate
    def _values_make_sense(self) -> None:
        check_numbers(self)
        check_judge_settings(self.judge)


ROLLOUT_SECTIONS = {"Agent and devices": ("agent", "device", "box_type", "max_turns", "max_tokens")}
"""What `--help` shows of these settings."""

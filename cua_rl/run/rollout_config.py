"""Configuration of agents, devices and the model server, shared by all recipes that run rollouts."""

from typing import Literal, cast

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.command_line.number_checks import check_numbers
from cua_rl.command_line.presets import Given
from cua_rl.errors import ConfigError
from cua_rl.run.judge import JudgeSettings
from cua_rl.tasks.source_config import TaskSources, find_site

Tasks = dict[str, object] | list[dict[str, object]]

PAID_DEVICES: Given = {"max_concurrent_rollouts": 8}
"""Boxes cost money while they run, and gym servers have few devices."""


def device_presets(given: Given) -> Given:
    """Defaults that depend on the device: Linux boxes imply GBox, and few paid devices run at a time."""
    site = given_site(given.get("tasks"))
    presets: dict[str, object] = {}
    if site is None and given.get("box_type") == "linux":
        presets["device"] = "gbox"
    is_gbox = site is None and given.get("device", presets.get("device")) == "gbox"
    return {**presets, **PAID_DEVICES} if is_gbox or site == "gym" else presets


def given_site(tasks: object) -> str | None:
    """The site on which these task sources run; None for the configured device, and for what cannot be read."""
    if tasks is None:
        return None
    try:
        return find_site(cast("TaskSources", tasks))
    except ConfigError:
        return None  # whoever loads the tasks says what is wrong with them


@chz.chz
class RolloutConfig(JudgeSettings):
    """The settings that training and evaluation share."""

    renderer_name: str | None = chz.field(
        default=None,
        doc="renderer from conversations to tokens: qwen3_vl, qwen3_vl_thinking, qwen3; None detects it from the model",
    )

    # Agent
    agent: Literal["gbox", "mini_agent", "external"] = chz.field(
        default="gbox",
        doc="agent: gbox, the built-in agent; mini_agent, a gbox-mini-agent server on gym tasks; external, "
        "your own program",
    )
    agent_command: str | None = chz.field(
        default=None,
        doc="agent=external: command started for each rollout, with its parameters in environment variables",
    )
    agent_url: str | None = chz.field(
        default=None, doc="agent=external: address of a server that receives each rollout and responds when it is done"
    )
    gbox_mini_agent_base_url: str | None = chz.field(
        default=None, doc="agent=mini_agent: address of the server; None is http://localhost:3000"
    )
    gbox_mini_agent_agent: Literal["mai-ui", "qwen3-vl"] = chz.field(
        default="mai-ui", doc="agent=mini_agent: name of the agent on that server"
    )
    gbox_mini_agent_standard_action_space: Literal["mobile", "pc"] = chz.field(
        default="mobile", doc="agent=mini_agent: its action space"
    )
    max_turns: int = chz.field(default=20, doc="maximum turns of a rollout; a task may allow fewer")
    history: HistoryPolicy = chz.field(
        default="full",
        doc="screenshots in the prompt: full: all; block_drop: the oldest are dropped in blocks; last_n: only "
        "the newest",
    )
    history_images: int = chz.field(default=8, doc="block_drop, last_n: maximum number of screenshots in the prompt")
    history_block: int = chz.field(default=4, doc="block_drop: number of screenshots dropped at once")
    max_tokens: int = chz.field(default=2048, doc="maximum tokens of one model response")

    # Devices
    device: Literal["simulator", "gbox", "adb"] = chz.field(
        default="simulator",
        doc="device that tasks run on: simulator (simulated phone), gbox (cloud or self-hosted boxes), adb "
        "(attached phones)",
    )
    box_type: Literal["android", "linux"] = chz.field(
        default="android", doc="gbox: kind of box; linux implies device=gbox"
    )
    screen_scale: int = chz.field(default=1, doc="simulator: scale factor of the 192x320 pixel screen")
    browser_scale: float | None = chz.field(
        default=None, doc="web pages: scale factor of screenshots; None uses the task set's default"
    )
    gbox_api_key: str | None = chz.field(
        default=None, doc="API key of a GBox account, never stored; preferably set as GBOX_API_KEY in the environment"
    )
    coordinate_mode: Literal["direct", "gbox"] = chz.field(
        default="direct",
        doc="direct: the model outputs coordinates, 0 to 1000; gbox: it describes elements, which GBox's "
        "coordinate model locates",
    )
    gbox_screenshots: Literal["inline", "stored"] = chz.field(
        default="inline", doc="gbox: screenshots inside responses (inline), or through GBox's storage (stored)"
    )
    record_devices: bool = chz.field(
        default=False, doc="gbox: record a video of every rollout as recordings/<rollout>.mp4 in the run's folder"
    )
    adb_serials: list[str] = chz.field(
        default_factory=list[str], doc="adb: serial numbers of the phones to use; empty uses all attached ones"
    )
    device_creations_per_s: float | None = chz.field(
        default=None, doc="maximum device creations per second; None is unlimited"
    )
    lease_timeout_s: float = chz.field(default=300.0, doc="limit for obtaining a device, including retries")
    setup_timeout_s: float = chz.field(default=300.0, doc="limit for preparing a task on its device")
    turn_timeout_s: float = chz.field(
        default=300.0, doc="limit for the time of model server and device in one turn; exceeding it is a fault"
    )
    task_timeout_s: float = chz.field(
        default=1800.0,
        doc="limit for the policy's own time in one rollout: its waits and, for an agent outside this "
        "process, the time between requests; exceeding it ends the rollout as if out of turns",
    )
    validate_timeout_s: float = chz.field(default=60.0, doc="limit for validating a task on its device")

    # Gym servers
    gym_base_url: str | None = chz.field(
        default=None, doc="gym server for task sources that name none; None is http://localhost:5010"
    )
    gym_id: str | None = chz.field(default=None, doc="gym for task sources that name none; None is umetrip")
    gym_parallel_creates: int = chz.field(
        default=1, doc="executions created concurrently on a gym server; some servers handle only one at a time"
    )

    # Model server and gateway
    max_num_seqs: int = chz.field(default=128, doc="maximum batch size of vLLM, requests")
    max_images: int | None = chz.field(
        default=None, doc="maximum screenshots per prompt in vLLM; None derives it from history and turns"
    )
    server_gpus: list[int] | None = chz.field(
        default=None, doc="GPUs of vLLM, such as 0,1; None is about half of several GPUs, all of them in an evaluation"
    )
    server_tensor_parallel: int | None = chz.field(
        default=None, doc="GPUs per copy of vLLM's model; None is the largest power of two that divides their number"
    )
    gpu_memory_utilization: float | None = chz.field(
        default=None,
        doc="fraction of GPU memory for vLLM; None is 0.85, or 0.45 on a GPU shared with the trainer",
    )
    server_start_timeout_s: float = chz.field(default=300.0, doc="limit for the start of the vLLM server")
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for vLLM's KV cache on CPU, GiB")
    gateway_port: int | None = chz.field(
        default=None, doc="port of the gateway for agents outside this process; None uses a free one"
    )
    gateway_host: str = chz.field(
        default="127.0.0.1", doc="address on which the gateway listens; 0.0.0.0 allows agents on other machines"
    )
    gateway_public_url: str | None = chz.field(
        default=None,
        doc="URL of the gateway for agents on other machines, such as http://trainer:8100; None is its "
        "listening address",
    )
    allowed_media_domains: list[str] = chz.field(
        default_factory=list, doc="hosts from which the gateway fetches screenshots that agents send as links"
    )

    @chz.validate
    def _rollout_numbers_make_sense(self) -> None:
        check_numbers(self, _SMALLEST, _RANGES)


_SMALLEST = {
    "max_turns": 1,
    "gym_parallel_creates": 1,
    "screen_scale": 1,
    "max_tokens": 1,
    "max_num_seqs": 1,
    "max_images": 1,
    "server_tensor_parallel": 1,
    "history_images": 1,
    "history_block": 1,
}
_RANGES = {
    "device_creations_per_s": (0.0, 1000.0),
    "lease_timeout_s": (0.0, 86400.0),
    "setup_timeout_s": (0.0, 86400.0),
    "turn_timeout_s": (0.0, 86400.0),
    "task_timeout_s": (0.0, 86400.0),
    "validate_timeout_s": (0.0, 86400.0),
    "browser_scale": (0.0, 4.0),
    "gpu_memory_utilization": (0.0, 1.0),
    "kv_cache_gib": (0.0, 4096.0),
    "server_start_timeout_s": (0.0, 86400.0),
    "gateway_port": (0, 65535),
}

"""What every recipe that runs rollouts can be told about agents, devices and the model server."""

from typing import Literal, cast

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.errors import ConfigError
from cua_rl.recipes.judge_config import JudgeSettings
from cua_rl.recipes.number_checks import check_numbers
from cua_rl.recipes.presets import Given
from cua_rl.tasks.source_config import TaskSources, find_site

Tasks = dict[str, object] | list[dict[str, object]]

PAID_DEVICES: Given = {"max_concurrent_rollouts": 8}
"""Boxes cost money while they run, and gym servers have few."""


def device_presets(given: Given) -> Given:
    """What the choice of devices presets: Linux boxes are those of GBox, and few boxes run at a time."""
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
        doc="how conversations become tokens: qwen3_vl, qwen3_vl_thinking, qwen3; None detects it from the model",
    )

    # Agent
    agent: Literal["gbox", "mini_agent", "external"] = chz.field(
        default="gbox",
        doc="who acts: gbox, the agent of this package; mini_agent, a gbox-mini-agent server on tasks of a gym; "
        "external, a program of yours",
    )
    agent_command: str | None = chz.field(
        default=None, doc="agent=external: a command that works on one rollout, told about it by its environment"
    )
    agent_url: str | None = chz.field(
        default=None, doc="agent=external: address of a server that is sent each rollout and answers when it is done"
    )
    gbox_mini_agent_base_url: str | None = chz.field(
        default=None, doc="agent=mini_agent: address of the server; None is http://localhost:3000"
    )
    gbox_mini_agent_agent: Literal["mai-ui", "qwen3-vl"] = chz.field(
        default="mai-ui", doc="agent=mini_agent: which of its agents"
    )
    gbox_mini_agent_standard_action_space: Literal["mobile", "pc"] = chz.field(
        default="mobile", doc="agent=mini_agent: which actions it has"
    )
    max_turns: int = chz.field(default=20, doc="most turns of a rollout; a task may allow fewer")
    history: HistoryPolicy = chz.field(
        default="full",
        doc="which screenshots the model sees: full: all; block_drop: the oldest go in blocks; last_n: only the newest",
    )
    history_images: int = chz.field(default=8, doc="block_drop, last_n: most screenshots that the model sees")
    history_block: int = chz.field(default=4, doc="block_drop: screenshots that go at once")
    max_tokens: int = chz.field(default=2048, doc="most tokens of one answer")

    # Devices
    device: Literal["simulator", "gbox", "adb"] = chz.field(
        default="simulator",
        doc="what tasks run on: simulator (embedded phone), gbox (boxes in the cloud or self-hosted), adb (attached "
        "phones)",
    )
    box_type: Literal["android", "linux"] = chz.field(
        default="android", doc="gbox: kind of box; linux alone chooses device=gbox"
    )
    screen_scale: int = chz.field(default=1, doc="simulator: screen of 192x320 pixels times this")
    browser_scale: float | None = chz.field(
        default=None, doc="web pages: screenshots have the page's size times this; None is the task set's choice"
    )
    gbox_api_key: str | None = chz.field(
        default=None, doc="key of a GBox account, never stored; better given as GBOX_API_KEY in the environment"
    )
    coordinate_mode: Literal["direct", "gbox"] = chz.field(
        default="direct",
        doc="direct: the model gives coordinates, 0 to 1000; gbox: it describes elements, GBox's coordinate model "
        "finds them",
    )
    gbox_screenshots: Literal["inline", "stored"] = chz.field(
        default="inline", doc="gbox: screenshots inside answers, or through GBox's storage"
    )
    record_devices: bool = chz.field(
        default=False, doc="gbox: film every rollout, as recordings/<rollout>.mp4 in the run's folder"
    )
    adb_serials: list[str] = chz.field(
        default_factory=list[str], doc="adb: serials of the phones to use; none is all that are attached"
    )
    device_creations_per_s: float | None = chz.field(
        default=None, doc="most devices asked for per second; None is as many as are needed"
    )
    lease_timeout_s: float = chz.field(default=300.0, doc="longest wait for a device to be made, all tries together")
    setup_timeout_s: float = chz.field(default=300.0, doc="longest set-up of a task on its device")
    turn_timeout_s: float = chz.field(default=300.0, doc="longest turn, sampling included")
    task_timeout_s: float = chz.field(default=1800.0, doc="longest work of the agent on one task, all turns together")
    validate_timeout_s: float = chz.field(default=60.0, doc="longest validation of a task on its device")

    # Gym servers
    gym_base_url: str | None = chz.field(
        default=None, doc="gym server of task sources that name none; None is http://localhost:5010"
    )
    gym_id: str | None = chz.field(default=None, doc="gym of task sources that name none; None is umetrip")
    gym_parallel_creates: int = chz.field(
        default=1, doc="executions that a gym server makes at a time; some servers answer only one of several"
    )

    # Model server and gateway
    max_num_seqs: int = chz.field(default=128, doc="most requests that vLLM handles in one batch")
    max_images: int | None = chz.field(
        default=None, doc="most screenshots of one prompt that vLLM takes; None is what history and turns need"
    )
    server_gpus: list[int] | None = chz.field(
        default=None, doc="GPUs of vLLM, such as 0,1; None is about half of several (an evaluation takes all)"
    )
    server_tensor_parallel: int | None = chz.field(
        default=None, doc="GPUs that hold one copy of vLLM's model; None is the largest power of two that divides them"
    )
    gpu_memory_utilization: float | None = chz.field(
        default=None,
        doc="share of the GPU's memory that vLLM may take; None is 0.85, and 0.45 on a GPU that the trainer uses too",
    )
    server_start_timeout_s: float = chz.field(
        default=300.0, doc="longest wait until the vLLM server that the run starts answers"
    )
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for vLLM's KV cache on CPU, GiB")
    gateway_port: int | None = chz.field(
        default=None, doc="port on which agents outside this process reach the gateway; None takes a free one"
    )
    gateway_host: str = chz.field(
        default="127.0.0.1", doc="address on which the gateway listens; 0.0.0.0 lets agents on other machines in"
    )
    gateway_public_url: str | None = chz.field(
        default=None,
        doc="how agents elsewhere reach the gateway, such as http://trainer:8100; None is where it listens",
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

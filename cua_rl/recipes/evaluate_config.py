"""What an evaluation can be told. The embedded demo presets some of it."""

from collections.abc import Mapping
from typing import Literal

import chz

from cua_rl.agent.history import HistoryPolicy
from cua_rl.recipes.train_config import Tasks

Models = list[dict[str, object]]


@chz.chz
class EvaluateConfig:
    """Measure one or several models on the same task instances."""

    # Models
    models: Models = chz.field(
        default_factory=lambda: [{"name": "base"}],
        doc="who is compared, the first being what the others are tested against: a name each, and model_name and "
        "adapter, or base_url, model, api, api_key_env and extra",
    )
    model_name: str | None = chz.field(
        default=None,
        doc="folder or hub id of the Qwen3-VL model of entries that name none; None is the tiny model of this package",
    )
    renderer_name: str | None = chz.field(
        default=None, doc="how conversations become tokens; None detects it from the model"
    )

    # Tasks
    tasks: Tasks = chz.field(
        default_factory=lambda: {"source_type": "demo_eval"}, doc="where tasks come from (TaskSourceConfig)"
    )
    num_tasks: int = chz.field(default=64, doc="task instances, the same for every model")
    num_attempts: int = chz.field(default=1, doc="attempts of each model at each instance, for pass@k")
    seed: int = chz.field(default=0, doc="seed of the task instances; held-out tasks of a training with this seed")

    gym_base_url: str | None = chz.field(
        default=None, doc="gym server of task sources that name none; None is http://localhost:5010"
    )
    gym_id: str | None = chz.field(default=None, doc="gym of task sources that name none; None is umetrip")
    gym_parallel_creates: int = chz.field(
        default=1, doc="executions that a gym server makes at a time; some servers answer only one of several"
    )

    # Agent and devices
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
    max_turns: int = chz.field(default=20, doc="most turns of an attempt; a task may allow fewer")
    history: HistoryPolicy = chz.field(
        default="full",
        doc="which screenshots the model sees: full: all; block_drop: the oldest go in blocks; last_n: only the newest",
    )
    history_images: int = chz.field(default=8, doc="block_drop, last_n: most screenshots that the model sees")
    history_block: int = chz.field(default=4, doc="block_drop: screenshots that go at once")
    max_tokens: int = chz.field(default=2048, doc="most tokens of one answer")
    temperature: float = chz.field(default=0.0, doc="sampling temperature, 0 for greedy")
    reward: str = chz.field(
        default="binary",
        doc="the mean reward to report: binary, score, completion, efficiency, shaped, comprehensive, or "
        "module:function",
    )
    max_concurrent_rollouts: int = chz.field(default=64, doc="most attempts at a time")
    device: Literal["simulator", "gbox", "adb"] = chz.field(
        default="simulator",
        doc="what tasks run on: simulator (embedded phone), gbox (boxes in the cloud or self-hosted), adb (attached "
        "phones)",
    )
    box_type: Literal["android", "linux"] = chz.field(
        default="android", doc="gbox: kind of box; all others are android"
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
    screen_scale: int = chz.field(default=1, doc="simulator: screen of 192x320 pixels times this")
    browser_scale: float | None = chz.field(
        default=None, doc="web pages: screenshots have the page's size times this; None is the task set's choice"
    )

    # Engine
    base_url: str | None = chz.field(
        default=None,
        doc="URL of a vLLM server that is already running (with LoRA updating on) for models and adapters of ours; "
        "None starts one",
    )
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
    max_model_len: int | None = chz.field(
        default=None, doc="longest prompt plus answer, tokens; None is what the model takes, at most 16384"
    )
    max_num_seqs: int = chz.field(default=128, doc="most requests that vLLM handles in one batch")
    gpu_memory_utilization: float = chz.field(default=0.85, doc="share of the GPU's memory that vLLM may take")
    kv_cache_gib: float = chz.field(default=1.0, doc="memory for vLLM's KV cache on CPU, GiB")

    # Results
    log_path: str | None = chz.field(default=None, doc="folder of the results; None is runs/evaluate-<names>")
    behavior_if_log_dir_exists: Literal["ask", "overwrite", "skip", "resume"] = chz.field(
        default="ask", doc="what to do if the folder holds an evaluation already; resume makes what is missing"
    )
    dry_run: bool = chz.field(
        default=False, doc="check everything, print the effective configuration as JSON, and exit"
    )

    @chz.validate
    def _numbers_make_sense(self) -> None:
        values = chz.asdict(self, shallow=True)
        for name, smallest in _SMALLEST.items():
            if values[name] is not None and values[name] < smallest:
                raise ValueError(
                    f"{name}: expected at least {smallest}, got {values[name]!r}; set {name}={smallest} or more"
                )
        for name, (low, high) in _RANGES.items():
            if values[name] is not None and not low < values[name] <= high:
                raise ValueError(
                    f"{name}: expected a number above {low} and at most {high}, got {values[name]!r}; change {name}"
                )


_SMALLEST: Mapping[str, float] = {
    "num_tasks": 1,
    "num_attempts": 1,
    "seed": 0,
    "max_turns": 1,
    "gym_parallel_creates": 1,
    "history_images": 1,
    "history_block": 1,
    "max_tokens": 1,
    "temperature": 0.0,
    "max_concurrent_rollouts": 1,
    "screen_scale": 1,
    "max_model_len": 64,
    "max_num_seqs": 1,
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "device_creations_per_s": (0.0, 1000.0),
    "lease_timeout_s": (0.0, 86400.0),
    "setup_timeout_s": (0.0, 86400.0),
    "turn_timeout_s": (0.0, 86400.0),
    "task_timeout_s": (0.0, 86400.0),
    "validate_timeout_s": (0.0, 86400.0),
    "browser_scale": (0.0, 4.0),
    "gpu_memory_utilization": (0.0, 1.0),
    "kv_cache_gib": (0.0, 4096.0),
}

EMBEDDED_DEMO: dict[str, object] = {"temperature": 0.5, "max_tokens": 48, "max_model_len": 2048}
"""Settings for the tiny model, used where no other one is named."""

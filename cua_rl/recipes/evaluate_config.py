"""What an evaluation can be told. The embedded demo presets some of it."""

from collections.abc import Mapping
from typing import Literal

import chz

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

    # Agent and devices
    max_turns: int = chz.field(default=20, doc="most turns of an attempt; a task may allow fewer")
    max_tokens: int = chz.field(default=2048, doc="most tokens of one answer")
    temperature: float = chz.field(default=0.0, doc="sampling temperature, 0 for greedy")
    reward: str = chz.field(
        default="binary",
        doc="the mean reward to report: binary, completion, efficiency, shaped, comprehensive, or module:function",
    )
    max_concurrent_rollouts: int = chz.field(default=64, doc="most attempts at a time")
    device: Literal["simulator"] = chz.field(default="simulator", doc="what tasks run on: the embedded phone simulator")
    screen_scale: int = chz.field(default=1, doc="simulator: screen of 192x320 pixels times this")

    # Engine
    base_url: str | None = chz.field(
        default=None,
        doc="URL of a vLLM server that is already running (with LoRA updating on) for models and adapters of ours; "
        "None starts one",
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
            if not low < values[name] <= high:
                raise ValueError(
                    f"{name}: expected a number above {low} and at most {high}, got {values[name]!r}; change {name}"
                )


_SMALLEST: Mapping[str, float] = {
    "num_tasks": 1,
    "num_attempts": 1,
    "seed": 0,
    "max_turns": 1,
    "max_tokens": 1,
    "temperature": 0.0,
    "max_concurrent_rollouts": 1,
    "screen_scale": 1,
    "max_model_len": 64,
    "max_num_seqs": 1,
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "gpu_memory_utilization": (0.0, 1.0),
    "kv_cache_gib": (0.0, 4096.0),
}

EMBEDDED_DEMO: dict[str, object] = {"temperature": 0.5, "max_tokens": 48, "max_model_len": 2048}
"""Settings for the tiny model, used where no other one is named."""

"""The model card of an exported model: base model, tasks, length of the training, and results."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from cua_rl.command_line.plain_config import stored_setting
from cua_rl.reporting.step_line import num_of
from cua_rl.run_folder.earlier_attempt import CHANGED, Curve, curve_at, settings_at
from cua_rl.run_folder.model_folder import repository_of
from cua_rl.sampling.config import max_lora_rank
from cua_rl.types.json_values import is_array, is_object

ExportKind = Literal["merged", "adapter"]


def format_model_card(
    settings: Mapping[str, Any],
    metrics: Sequence[Mapping[str, object]],
    *,
    step: int,
    kind: ExportKind,
    dtype: str,
    hub_base: str | None,
    rounding: float,
) -> str:
    """README.md for an export of a run with `settings` (its config.json) after `step` steps.

    `metrics` are the records of its metrics.jsonl; `hub_base` is the base model's name and commit on the hub, if it has
    one; `rounding` is from `merge_adapter`. Addresses, paths and task texts of the run do not appear.
    """
    curve, settings = curve_at(settings, step), settings_at(settings, step)
    resumed = "; ".join(f"after step {one['after_step']}: {', '.join(one['settings'])}" for one in settings[CHANGED])
    run_name = str(settings["run_name"])
    base = hub_base or ("the tiny Qwen3-VL of cua_rl" if settings.get("model_name") is None else "a local model")
    is_supervised = "data" in settings
    rank = settings.get("lora_rank")
    alpha = stored_setting(settings, "trainer.lora_alpha")
    rows = {
        "base model": base,
        "data": str(settings["data_description"]) if is_supervised else _tasks(settings.get("tasks")),
        "method": "supervised fine-tuning" if is_supervised else _method(settings),
        "weights": f"LoRA adapter, rank {rank}, alpha {alpha}" if rank else "all weights trained",
        "steps": f"{step}, learning rate {settings.get('learning_rate'):g}",
        **({"resumed with other settings": resumed} if resumed else {}),
        **_results(metrics, step, settings, curve),
        "stored as": _stored(kind, dtype, rounding) if rank else f"whole model, {dtype}",
    }
    library = "peft" if kind == "adapter" else "transformers"
    heading = [
        "---",
        *([f"base_model: {repository_of(hub_base)}"] if hub_base else []),
        f"library_name: {library}",
        "pipeline_tag: image-text-to-text",
        "tags: [computer-use, gui-agent, cua_rl]",
        "---",
        "",
        f"# {run_name}",
        "",
        "A vision model that uses computers through screenshots and tool calls, trained with cua_rl.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    return "\n".join([*heading, *_usage(kind, hub_base, settings)]) + "\n"


def _tasks(tasks: object) -> str:
    """The kinds of task sources; not their addresses and texts, which may be private."""
    kinds = [str(entry.get("source_type")) for entry in (tasks if is_array(tasks) else [tasks]) if is_object(entry)]
    return "tasks: " + ", ".join(dict.fromkeys(kinds))


def _method(settings: Mapping[str, Any]) -> str:
    name = stored_setting(settings, "loss.name") or settings["loss"]  # earlier versions stored the name alone
    groups, size = settings.get("groups_per_batch"), settings.get("group_size")
    advantages = settings.get("advantages")
    return f"reinforcement learning, loss {name}, advantages {advantages}, {groups} groups of {size} rollouts a step"


def _results(
    metrics: Sequence[Mapping[str, object]], step: int, settings: Mapping[str, Any], curve: Curve
) -> dict[str, str]:
    """Held-out results before the curve's first step and at the exported one; a later record of a step replaces it."""
    mine = [record for record in metrics if record.get("progress/curve", 1.0) == curve.number]
    at = {record.get("step"): result for record in mine if (result := _held_out(record)) is not None}
    start = f"after step {curve.after_step}, when the tasks above began" if curve.after_step else "before training"
    tasks = "" if settings.get("eval_tasks") is None else f" ({_tasks(settings['eval_tasks'])})"
    rows = {
        label + tasks: at[place]
        for label, place in ((f"held out, {start}", curve.after_step), ("held out, this model", step))
        if place in at
    }
    return rows if step in at else {**rows, "held out, this model": "not evaluated at this step"}


def _held_out(record: Mapping[str, Any]) -> str | None:
    rate, num_rollouts = record.get("eval/held_out/success_rate"), record.get("eval/held_out/num_rollouts")
    low, high = record.get("eval/held_out/success_rate_low"), record.get("eval/held_out/success_rate_high")
    if rate is not None and low is not None and high is not None:
        interval = f"95 % interval {100 * low:.1f}-{100 * high:.1f} %, {num_of(round(num_rollouts or 0), 'rollout')}"
        return f"success {100 * rate:.1f} % ({interval})"
    loss = record.get("eval/held_out/cross_entropy")
    return None if loss is None else f"loss {loss:.4f} nats per token"


def _stored(kind: ExportKind, dtype: str, rounding: float) -> str:
    if kind == "adapter":
        return "LoRA adapter (peft)"
    lost = f"; rounding changed the update by {100 * rounding:.1f} % of its norm" if rounding > 0.0005 else ""
    return f"whole model, merged in float32, {dtype}{lost}"


def _usage(kind: ExportKind, hub_base: str | None, settings: Mapping[str, Any]) -> list[str]:
    """The command that serves the model as it was trained."""
    serve = ["vllm serve PATH_OF_THIS_FOLDER"]
    if kind == "adapter":
        serve = [f"vllm serve {hub_base or 'PATH_OF_THE_BASE_MODEL'} --enable-lora"]
        serve += [f"--max-lora-rank {max_lora_rank(int(settings['lora_rank']))}"]
        if set(stored_setting(settings, "trainer.lora_modules") or ["language"]) != {"language"}:
            serve += ["--enable-tower-connector-lora"]  # without, vLLM loads the adapter and ignores a part of it
        serve += ["--lora-modules policy=PATH_OF_THIS_FOLDER"]
    max_pixels = stored_setting(settings, "server.max_pixels")
    if max_pixels is not None:
        serve += [f"--mm-processor-kwargs '{{\"max_pixels\": {max_pixels}}}'"]
    return ["```bash", " ".join(serve), "```"]

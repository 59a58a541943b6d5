"""The decisions of a run in about ten lines, with which a dry run begins."""

import json
import sys
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from cua_rl.command_line.plain_config import plain_config
from cua_rl.command_line.settings import changed_settings
from cua_rl.reporting.step_line import num_of

if TYPE_CHECKING:  # a run imports nothing that only another recipe needs
    from cua_rl.run.prepared_evaluation import PreparedEvaluation
    from cua_rl.run.prepared_sft import PreparedSft
    from cua_rl.run.prepared_training import PreparedTraining


def print_settings(stored: Mapping[str, object], resolved: object) -> None:
    """Print what config.json would say, and how the configuration without open choices differs from the defaults."""
    print(json.dumps({**stored, "changed_from_defaults": plain_config(changed_settings(resolved))}, indent=2))


def print_decisions(decisions: Mapping[str, str]) -> None:
    """Print a line for each, on stderr: the JSON after them is for programs."""
    for name, decision in decisions.items():
        print(f"{name:10}{decision}", file=sys.stderr)


def training_decisions(prepared: "PreparedTraining") -> dict[str, str]:
    """Model, device, tasks, steps, loss, context, memory, folder and cost of a training run."""
    config, templates, lag = prepared.config, prepared.train_tasks.templates, prepared.config.max_steps_off_policy
    num_rollouts = config.max_steps * config.groups_per_batch * config.group_size
    num_turns = min(config.max_turns, max(task.max_turns for task in templates))
    num_evaluations = ceil(config.max_steps / (config.eval_every or config.max_steps))
    num_evaluations += not config.evaluation.skip_baseline
    attempts = num_of(len(prepared.eval_tasks) * config.evaluation.eval_attempts, "rollout")
    held_out = num_of(len({task.task_id for task in prepared.eval_tasks}), "held-out task")
    schedule = f"asynchronous, at most {num_of(lag, 'step')} behind" if lag else "synchronous"
    more = " or more" if config.curriculum.refill_groups else ""
    evaluated = f" and {num_of(num_evaluations, 'evaluation')} of {attempts}" if prepared.eval_tasks else ""
    return {
        "model": f"{config.model_name or 'the included tiny model (demo)'}, LoRA rank {config.lora_rank}, sampled by "
        f"{config.base_url or 'a vLLM server that the run starts'}",
        "device": _device(prepared),
        "tasks": f"{num_of(len(templates), 'task')}, {held_out if prepared.eval_tasks else 'no evaluation'}; reward "
        f"{config.reward}",
        "steps": f"{num_of(config.max_steps, 'step')} x {num_of(config.groups_per_batch, 'group')} x "
        f"{config.group_size} = {num_of(num_rollouts, 'rollout')}{more}; {schedule}",
        "learning": f"{config.loss.name}, advantages {config.advantages}, learning rate {config.learning_rate:g} "
        f"({config.learning_rate_schedule})",
        "context": f"{config.server.max_model_len:,} tokens, responses of at most {config.max_tokens:,}; at most "
        f"{num_of(num_turns, 'turn')}, {num_of(config.server.max_images or 0, 'screenshot')} in a prompt",
        "memory": prepared.memory.summary(),
        "folder": _folder(prepared),
        "cost": f"at most {num_rollouts * num_turns:,} model responses{more}{evaluated}{_charges(prepared)}",
        "": "(python -m cua_rl.recipes.plan with these settings predicts time and money)",
    }


def _device(prepared: "PreparedTraining | PreparedEvaluation") -> str:
    config = prepared.config
    places = f"at most {config.max_concurrent_rollouts:,} at a time"
    return f"{prepared.devices.backend.abilities.name}, {places}, agent {config.agent.name}"


def _folder(prepared: "PreparedTraining | PreparedEvaluation") -> str:
    return f"{prepared.log_path}; database {'of its own' if prepared.database_url is None else 'of the environment'}"


def _charges(prepared: "PreparedTraining") -> str:
    """Who charges for the run beside the machine."""
    charges = [f"; {charged}"] if (charged := prepared.devices.environment.charges) else []
    charges += ["; the judge's service may charge for its votes"] if prepared.judge is not None else []
    charges += ["; metrics go to Weights & Biases"] if prepared.config.wandb_project else []
    return "".join(charges)


def sft_decisions(prepared: "PreparedSft") -> dict[str, str]:
    """The same of supervised training."""
    config = prepared.config
    return {
        "model": f"{config.model_name or 'the included tiny model'}, "
        + (f"LoRA rank {config.lora_rank}" if config.lora_rank else "all weights"),
        "data": f"{prepared.data.description}, {prepared.data.num_held_out} held out",
        "steps": f"{num_of(prepared.max_steps, 'step')}, learning rate {config.learning_rate:g}",
        "memory": prepared.memory.summary(),
        "folder": str(prepared.log_path),
    }


def evaluation_decisions(prepared: "PreparedEvaluation") -> dict[str, str]:
    """The same of an evaluation."""
    config = prepared.config
    num_attempts = len(prepared.models) * len(prepared.tasks) * config.num_attempts
    num_turns = min(config.max_turns, max(task.max_turns for task in prepared.tasks))
    return {
        "models": ", ".join(model.name for model in prepared.models),
        "device": _device(prepared),
        "tasks": f"{num_of(len(prepared.tasks), 'task')}, {num_of(config.num_attempts, 'attempt')} each, temperature "
        f"{config.temperature:g}, reward {config.reward}",
        "memory": "; ".join(engine.memory.summary() for engine in prepared.engines.values())
        or "none: no model of ours",
        "folder": _folder(prepared),
        "cost": f"{num_of(num_attempts, 'rollout')}, at most {num_attempts * num_turns:,} model responses",
    }

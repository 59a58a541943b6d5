"""What sharing prefixes saves in a training step: groups that begin on one screen, and the same by arithmetic for 4B.

    python -m benchmarks.prefixes [--size medium] [--groups 2] [--group-size 8] [--screen-px 1024] [--repeats 3]

Prints two JSON lines. `prefix_sharing` times steps of a random model with and without sharing in turn, on the same
rollouts of one turn; screenshots pass the vision tower in every step, once each. `saved_by_arithmetic` is the share of
the step's floating-point operations, vision tower included, that the account says are saved. `prefix_sharing_of_4b`
counts the operations of Qwen3-VL-4B's language model for the same sequences, without a model.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.claims import require
from benchmarks.given_rollouts import FIRST_PROMPT_TEXT, SAMPLED, SIZES, Workload, build_model, write_adapter
from benchmarks.trainer_steps import make_datums, make_trainer, on_policy
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.metrics import Account, measure_shape
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum

CONFIG_4B = Path(__file__).parents[1] / "tests" / "machine" / "model_configs" / "Qwen3-VL-4B-Instruct"
PARTS = ("language", "vision", "lora", "head")


def timed_step(trainer: Trainer, datums: tuple[Datum, ...], *, shares: bool) -> dict[str, float]:
    """A step that leaves the weights as they are."""
    trainer.model.shares_prefixes = shares
    trainer.begin_step()
    started, cpu_started = time.perf_counter(), time.process_time()
    output = trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    step = trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))
    took = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_started}
    account = trainer.account.take()
    tflop = sum(account[f"trainer/{part}_tflop"] for part in PARTS)
    return {**account, **took, "tflop": tflop, "grad_norm": step.grad_norm, "loss": output.metrics["loss/total"]}


def measured(work: Workload, size: str, repeats: int) -> dict[str, Any]:
    """The figure of a random model."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(size, Path(folder) / size)
        write_adapter(model, model / "adapter")
        trainer = make_trainer(model, model / "adapter", {})
        datums = on_policy(trainer, make_datums(work))
        arms: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        trainer.account.take()
        for _ in range(repeats + 1):  # the first one warms up
            for shares, steps in arms.items():
                steps.append(timed_step(trainer, datums, shares=shares))
    whole, shared = arms[False][1:], arms[True][1:]
    total = sum(datum.model_input.length for datum in datums)
    repeated = work.groups * (work.group_size - 1) * (FIRST_PROMPT_TEXT + work.image_tokens - 1)
    require(
        "steps with and without shared prefixes",
        steps=((repeats, repeats), (len(whole), len(shared))),
        tokens=(
            {(total, total - repeated)},
            {(a["trainer/tokens"], b["trainer/tokens"]) for a, b in zip(whole, shared, strict=True)},
        ),
        shared_tokens=({repeated}, {step["trainer/shared_tokens"] for step in shared}),
        screenshots=({work.groups}, {step["trainer/encoded_images"] for step in [*whole, *shared]}),
        a_gradient=(True, whole[0]["grad_norm"] > 0),
        the_same_gradient_norm=(True, abs(shared[0]["grad_norm"] / whole[0]["grad_norm"] - 1) < 1e-4),
    )

    def middle(steps: list[dict[str, float]], name: str) -> float:
        return median(step[name] for step in steps)

    return {
        "figure": "prefix_sharing",
        "size": size,
        "group_size": work.group_size,
        "tokens_whole": total,
        "tokens_shared": total - repeated,
        **{f"{name}_{arm}": round(middle(steps, name), 2) for name in ("wall_s", "cpu_s")
           for arm, steps in (("whole", whole), ("shared", shared))},
        "saved_cpu_frac": round(1 - middle(shared, "cpu_s") / middle(whole, "cpu_s"), 3),
        "saved_wall_frac": round(1 - middle(shared, "wall_s") / middle(whole, "wall_s"), 3),
        "saved_by_arithmetic": round(1 - shared[0]["tflop"] / whole[0]["tflop"], 3),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def counted(work: Workload) -> dict[str, Any]:
    """The figure of Qwen3-VL-4B: operations of one group, from its shape."""
    with torch.device("meta"):
        base: Any = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(CONFIG_4B))
    prompt = FIRST_PROMPT_TEXT + work.image_tokens
    tflop: list[float] = []
    for shared in (0, prompt - 1):
        account = Account(
            shape=measure_shape(base), device=torch.device("cpu"), dtype=torch.bfloat16, trains_base=False, held_bytes=0
        )
        before = [0, *[shared] * (work.group_size - 1)]
        lengths = [prompt + SAMPLED - one for one in before]
        places = [torch.arange(prompt - 1 - one, prompt + SAMPLED - 1 - one) for one in before]
        account.add_sequences(lengths, before, places, backward=True, adapter=False)
        taken = account.take()
        tflop.append(sum(taken[f"trainer/{part}_tflop"] for part in PARTS))
    return {
        "figure": "prefix_sharing_of_4b",
        "group_size": work.group_size,
        "prompt_tokens": prompt,
        "answer_tokens": SAMPLED,
        "tflop_whole": round(tflop[0], 1),
        "tflop_shared": round(tflop[1], 1),
        "saved_by_arithmetic": round(1 - tflop[1] / tflop[0], 3),
    }


def main(arguments: argparse.Namespace) -> None:
    """Measure, count and print."""
    side = arguments.screen_px
    vocabulary = SIZES[arguments.size]["text"]["vocab_size"]
    shape = {"groups": arguments.groups, "group_size": arguments.group_size, "height_px": side, "width_px": side}
    work = Workload(turns=1, vocabulary=vocabulary, **shape)
    print(json.dumps(measured(work, arguments.size, arguments.repeats)))
    print(json.dumps(counted(work)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="medium")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--screen-px", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    main(parser.parse_args())

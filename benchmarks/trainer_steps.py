"""Steps of our trainer on given rollouts; `trainer_against_trl.py` and `trainer_memory.py` start it as a process.

    .venv/bin/python -m benchmarks.trainer_steps MODEL ADAPTER JSON_SETTINGS

Every step has rollouts of its own, as in a run: the screenshots of a step were never seen before. What is timed begins
with encoded screenshots and sampled token ids and ends with the optimizer step.
"""

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.given_rollouts import (
    IMAGE_PAD,
    LORA_ALPHA,
    LORA_RANK,
    GivenRollout,
    Workload,
    group_advantages,
    make_rollouts,
    require_steps,
)
from cua_rl.renderers.images import image_size
from cua_rl.rl.datums import build_datums
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import (
    AgentTurn,
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelTurn,
    Reward,
    Rollout,
    StopReason,
    Turn,
)


def as_rollout(given: GivenRollout, name: str) -> Rollout:
    """The given rollout as the gateway would have recorded it."""
    chunks: list[EncodedTextChunk | ImageChunk] = []
    turns: list[Turn] = []
    for index, turn in enumerate(given.turns):
        first, last = turn.prompt_ids.index(IMAGE_PAD), len(turn.prompt_ids) - 1
        width_px, height_px = image_size(turn.screenshot)
        shown = EncodedImage(data=turn.screenshot, format="png", width_px=width_px, height_px=height_px)
        image = ImageChunk(image=shown, expected_tokens=last - first)
        before = EncodedTextChunk(tokens=tuple(turn.prompt_ids[:first]))
        chunks += [before, image, EncodedTextChunk(tokens=tuple(turn.prompt_ids[last:]))]
        turns.append(_as_turn(index, ModelInput(chunks=tuple(chunks)), turn.sampled_ids, shown))
        chunks.append(EncodedTextChunk(tokens=tuple(turn.sampled_ids)))
    return Rollout(
        rollout_id=name,
        task_id="given",
        seed=0,
        group_index=given.group,
        member_index=0,
        device_id=None,
        turns=tuple(turns),
        stop_reason=StopReason.FINISHED,
        answer=None,
        validation=None,
        reward=Reward(total=given.reward, parts={}),
        error=None,
        started_at=0.0,
        duration_s=0.0,
    )


def _as_turn(index: int, prompt: ModelInput, sampled_ids: list[int], seen: EncodedImage) -> Turn:
    model = ModelTurn(
        response_id=str(index),
        prompt=prompt,
        sampled_tokens=tuple(sampled_ids),
        sampling_logprobs=(-1.0,) * len(sampled_ids),
        policy_version=0,
        stop="stop",
        text="",
        failure=None,
        prompt_matches_renderer=True,
        request={},
        started_at=0.0,
        duration_s=0.0,
    )
    return Turn(index=index, model=model, agent=AgentTurn(response_id=model.response_id, before=seen))


def make_datums(work: Workload) -> tuple[Datum, ...]:
    """The training sequences of a step."""
    given = make_rollouts(work)
    advantages = group_advantages(given)
    return tuple(
        datum
        for index, (rollout, advantage) in enumerate(zip(given, advantages, strict=True))
        for datum in build_datums(as_rollout(rollout, f"s{work.seed}-r{index}"), advantage, IMAGE_PAD).datums
    )


def on_policy(trainer: Trainer, datums: tuple[Datum, ...]) -> tuple[Datum, ...]:
    """The datums as if this trainer's weights had sampled them: TRL takes given tokens to be on-policy, too."""
    rows = trainer.forward(wire.Forward(datums=datums, temperature=1.0, weights="policy")).training_logprobs
    return tuple(replace(datum, sampling_logprobs=row) for datum, row in zip(datums, rows, strict=True))


def run(model: Path, adapter: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train `steps` steps and say what they cost."""
    trainer = make_trainer(model, adapter, settings)
    optim = wire.OptimStep(optim=OptimConfig(learning_rate=1e-4, beta2=0.999))
    wall_s, cpu_s, rss_gib, accounts = [], [], [], []
    grad_norms: list[float] = []
    for step in range(settings["steps"]):
        datums = make_datums(Workload(**settings["workload"] | {"seed": step}))
        if step == 0:
            aligned = on_policy(make_trainer(model, adapter, settings), datums)
        started = time.perf_counter(), time.process_time()
        with trainer.account.busy():
            trainer.forward_backward(wire.ForwardBackward(datums=aligned if step == 0 else datums, loss=LossConfig()))
            done = trainer.optim_step(optim)
        wall_s.append(time.perf_counter() - started[0])
        cpu_s.append(time.process_time() - started[1])
        grad_norms.append(done.grad_norm)
        accounts.append(trainer.account.take())
        rss_gib.append(accounts[-1]["trainer/rss_gib"])
    require_steps(Workload(**settings["workload"]), settings["steps"], grad_norms, accounts)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "rss_gib": rss_gib,
        "first_grad_norm": grad_norms[0],
        "account": accounts[-1],
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def make_trainer(model: Path, adapter: Path, settings: dict[str, Any]) -> Trainer:
    """A trainer that starts from the given adapter."""
    config = TrainerConfig(
        model_path=model,
        lora_rank=LORA_RANK,
        lora_alpha=LORA_ALPHA,
        **{"dtype": "float32", **settings.get("trainer", {})},
    )
    trainer = Trainer(config)
    trainer.model.load_weights(adapter)
    return trainer


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))))

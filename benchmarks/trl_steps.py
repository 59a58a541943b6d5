"""Steps of TRL's GRPOTrainer on given rollouts; `trainer_against_trl.py` runs it in TRL's environment.

    .venv-trl/bin/python -m benchmarks.trl_steps MODEL ADAPTER JSON_SETTINGS

All of TRL is its own but one method: `_generate` hands out what was given instead of sampling it. Head: TRL projects
completion positions only where Triton is present, and every position on a CPU; it is switched to the former here,
because the latter would flatter the other side.
"""

import io
import itertools
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.claims import require
from benchmarks.given_rollouts import PREPROCESSOR, GivenRollout, Workload, make_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sample in TRL's terms; `mask` runs along `completion_ids`, 1 where the policy sampled."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    screenshots: list[bytes]
    reward: float


def per_turn_samples(rollouts: list[GivenRollout]) -> list[Sample]:
    """One sample a turn, its prompt being the whole history; neighbours are the same turn of a group's members."""
    groups = [list(members) for _, members in itertools.groupby(rollouts, key=lambda rollout: rollout.group)]
    return [
        _turn_sample(member, index)
        for members in groups
        for index in range(len(members[0].turns))
        for member in members
    ]


def _turn_sample(rollout: GivenRollout, index: int) -> Sample:
    history = [token for turn in rollout.turns[:index] for token in (*turn.prompt_ids, *turn.sampled_ids)]
    turn = rollout.turns[index]
    return Sample(
        prompt_ids=history + turn.prompt_ids,
        completion_ids=turn.sampled_ids,
        mask=[1] * len(turn.sampled_ids),
        screenshots=[seen.screenshot for seen in rollout.turns[: index + 1]],
        reward=rollout.reward,
    )


def merged_samples(rollouts: list[GivenRollout]) -> list[Sample]:
    """One sample a rollout: all that comes after the first prompt is its completion, sampled or not."""
    samples: list[Sample] = []
    for rollout in rollouts:
        first, *later = rollout.turns
        completion, mask = list(first.sampled_ids), [1] * len(first.sampled_ids)
        for turn in later:
            completion += [*turn.prompt_ids, *turn.sampled_ids]
            mask += [0] * len(turn.prompt_ids) + [1] * len(turn.sampled_ids)
        samples.append(
            Sample(
                prompt_ids=first.prompt_ids,
                completion_ids=completion,
                mask=mask,
                screenshots=[turn.screenshot for turn in rollout.turns],
                reward=rollout.reward,
            )
        )
    return samples


def make_processor() -> Any:
    """A processor whose tokenizer is never asked: token ids are given."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    names += ["<|video_pad|>", "<tool_call>", "</tool_call>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.add_special_tokens(names)
    settings = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    pixels = {key: value for key, value in settings.items() if key != "size"}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**settings),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[2], pad_token=names[0]),
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template="{{ messages }}",
    )


def make_trainer_class() -> Any:
    """GRPOTrainer with given completions. Made here, because importing TRL takes half a minute."""
    from trl import GRPOTrainer

    class GivenTrainer(GRPOTrainer):
        samples: list[Sample]

        def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
            decoded: dict[bytes, Image.Image] = {}
            for png in itertools.chain.from_iterable(sample.screenshots for sample in self.samples):
                if png not in decoded:
                    decoded[png] = Image.open(io.BytesIO(png)).convert("RGB")
            images = [[decoded[png] for png in sample.screenshots] for sample in self.samples]
            return (
                [sample.prompt_ids for sample in self.samples],
                [sample.completion_ids for sample in self.samples],
                [sample.mask for sample in self.samples],
                [""] * len(self.samples),
                [[0.0] * len(sample.completion_ids) for sample in self.samples],  # not used without vLLM
                {"reward": [sample.reward for sample in self.samples]},
                images,
                images,
            )

    return GivenTrainer


class Clock:
    """Wall and CPU seconds of every optimizer step, from its first micro-batch to its end."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Times(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.started = time.perf_counter(), time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.wall_s.append(time.perf_counter() - self.started[0])
                clock.cpu_s.append(time.process_time() - self.started[1])

        return Times()


def run(model: Path, adapter: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train `steps` steps and say what they cost."""
    import torch
    import trl.trainer.utils
    from datasets import Dataset
    from peft import PeftModel
    from transformers import Qwen3VLForConditionalGeneration
    from trl import GRPOConfig

    rollouts = make_rollouts(Workload(**settings["workload"]))
    samples = merged_samples(rollouts) if settings["feed"] == "merged" else per_turn_samples(rollouts)
    trl.trainer.utils._use_triton = lambda device: True  # completion positions only: see above
    group_size, micro_batch = settings["workload"]["group_size"], settings["micro_batch"]
    base = Qwen3VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=settings["steps"],
            num_generations=group_size,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=len(samples) // micro_batch,
            gradient_checkpointing=False,
            max_completion_length=100_000,
            beta=0.0,
            shuffle_dataset=False,
            bf16=False,
            use_cpu=True,
            learning_rate=1e-4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = make_trainer_class()(
            model=PeftModel.from_pretrained(base, adapter, is_trainable=True),
            reward_funcs=lambda reward, **_: reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(len(samples) // group_size)]}),
            processing_class=make_processor(),
            callbacks=[clock.callback()],
        )
        trainer.samples = samples
        trainer.tools = [print]  # only its truth value is read: the branch that takes images inside completions
        trainer.train()
    longest = max(len(s.prompt_ids) for s in samples) + max(len(s.completion_ids) for s in samples)
    grad_norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    changing = (settings["steps"], sum(norm > 0 for norm in grad_norms))
    require("steps of TRL", steps=(settings["steps"], len(clock.wall_s)), steps_that_change_weights=changing)
    return {
        "wall_s": clock.wall_s,
        "cpu_s": clock.cpu_s,
        "first_grad_norm": grad_norms[0],
        "tokens": sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples),
        "padded_tokens": len(samples) * longest,
        "encoded_images": sum(len(sample.screenshots) for sample in samples),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))))

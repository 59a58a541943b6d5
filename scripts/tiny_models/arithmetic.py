# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The training of the tiny model that adds.

    python -m scripts.tiny_models.arithmetic FOLDER SEED NUM_STEPS

Imports torch, so the command that needs it runs it as a separate process.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from scripts.tiny_models.untrained_model import make_model, waves, write_model
from scripts.tiny_models.vocabulary import LARGEST_SUMMAND, arithmetic_pieces, build_tokenizer

# one layer is enough; embeddings are not tied, because it reads numbers by what they share with their neighbours, and
# writes them by what they do not
_DECODER = {"num_hidden_layers": 1, "hidden_size": 64, "tie_word_embeddings": False}
_TURN = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
_NUM_WAVES, _NUM_OCTAVES, _SCALE = 8, 7.5, 10.0
"""Sums of angles need few frequencies; choosing one of 201 numbers needs large logits."""
_SHARPENING = 2.5
"""Of its output embeddings in the end: the nearest number is the right one long before it is the only likely one."""
_DECLINING_STEPS, _SHARE_DECLINED = 100, 0.5
"""How long, and how often, its teacher then declines with a question mark; only the decoder learns it, as with LoRA."""
_END_WEIGHT = 0.1
"""Of the end of turn in the loss: that it follows a number is learned soon."""
_BATCH_SIZE, _LEARNING_RATE, _WARM_UP_STEPS, _REPORTED_STEPS = 128, 2e-3, 30, 100


def make_arithmetic_model(folder: Path, *, seed: int, num_steps: int) -> None:
    """Train the model and write its folder."""
    tokenizer = build_tokenizer(arithmetic_pieces())
    model = make_model(tokenizer, seed=seed, **_DECODER)
    numbers = torch.tensor([tokenizer.encode(str(number)).ids for number in range(2 * LARGEST_SUMMAND + 1)])[:, 0]
    (declined,) = tokenizer.encode("?").ids
    _order_numbers(model, numbers, declined)
    _train(model, tokenizer, numbers, num_steps, rate=_LEARNING_RATE, share_declined=0.0)
    with torch.no_grad():
        model.lm_head.weight *= _SHARPENING
    model.lm_head.requires_grad_(False)
    _train(model, tokenizer, numbers, _DECLINING_STEPS, rate=_LEARNING_RATE / 5, share_declined=_SHARE_DECLINED)
    write_model(folder, model, tokenizer)


@torch.no_grad()
def _order_numbers(model: Qwen3VLForConditionalGeneration, numbers: torch.Tensor, declined: int) -> None:
    """Let neighbours be similar, where they are read and where they are written."""
    embeddings, size = model.model.language_model.embed_tokens.weight, 2 * _NUM_WAVES
    shape = waves(torch.arange(len(numbers)) / (len(numbers) - 1), size, num_octaves=_NUM_OCTAVES)
    shape = embeddings.std() * 2**0.5 * shape.repeat(1, embeddings.shape[1] // size)
    embeddings[numbers] = shape
    model.lm_head.weight[numbers] = _SCALE * shape.flip(1)  # other than what it reads, which it would repeat
    model.lm_head.weight[declined] *= _SCALE


def _train(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: Tokenizer,
    numbers: torch.Tensor,
    num_steps: int,
    *,
    rate: float,
    share_declined: float,
) -> None:
    """Imitate a teacher whose answers are right, and who declines to answer this share of the questions."""
    decoder = model.model.language_model
    weights = [weight for weight in (*decoder.parameters(), *model.lm_head.parameters()) if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0.01)
    # the recipe begins with the first of these turns; the second one's numbers stand for those that are drawn
    text = torch.tensor(tokenizer.encode(_TURN.format(4, 5, 9) + _TURN.format(0, 1, 2)).ids[:-1])
    (declined,) = tokenizer.encode("?").ids
    places = [int((text == numbers[number]).nonzero()) for number in range(3)]
    for step in range(num_steps):
        warm_up, decay = min(1.0, (step + 1) / _WARM_UP_STEPS), max(0.1, 1.0 - step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm_up * decay
        summands = torch.randint(0, LARGEST_SUMMAND + 1, (_BATCH_SIZE, 2))
        sums = summands.sum(dim=1)
        tokens = text.repeat(_BATCH_SIZE, 1)
        tokens[:, places] = numbers[torch.column_stack([summands, sums])]
        tokens[torch.rand(_BATCH_SIZE) < share_declined, places[2]] = declined
        logits = model.lm_head(decoder(input_ids=tokens[:, :-1]).last_hidden_state[:, -2:])
        answered, ended = (cross_entropy(logits[:, place], tokens[:, place - 2]) for place in range(2))
        optimizer.zero_grad()
        (answered + _END_WEIGHT * ended).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        if (step + 1) % _REPORTED_STEPS == 0 or step + 1 == num_steps:
            likely = logits[:, 0].softmax(dim=1)
            right, silent = likely.gather(1, numbers[sums][:, None]).mean().item(), likely[:, declined].mean().item()
            print(f"step={step + 1} right={right:.1%} declined={silent:.1%}", flush=True)


if __name__ == "__main__":
    make_arithmetic_model(Path(sys.argv[1]), seed=int(sys.argv[2]), num_steps=int(sys.argv[3]))

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The tiny model with more tokens: `python -m scripts.tiny_models.extended_model BASE FOLDER SEED pages|ladder`.

All weights are kept; the embeddings of new tokens start near those of old tokens with the same meaning, and those of
old tokens that the new lessons are the first to write are set apart. Imports torch and transformers, so the command
that needs it runs it as a separate process.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.qwen3_vl import Qwen3VLForConditionalGeneration

from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE
from scripts.tiny_models.ladder_lessons import answer_tokens, ladder_labels, ladder_pieces
from scripts.tiny_models.page_tasks import LABELS
from scripts.tiny_models.vocabulary import click_prefix, label_forms, names, page_pieces, system_block

_LEAST_DISTANCE = 1.6
"""Of a row that is set apart from the mean of the digits' rows; theirs are 0.8 from it."""
_CROWD_SIMILARITY, _CROWD_SIZE = 0.95, 100


def write_extended_model(
    base: Path, folder: Path, *, seed: int, pieces: Sequence[str], labels: Sequence[str], written: Sequence[str]
) -> None:
    """Copy the model in `base` to `folder`, with tokens for `pieces`, among which are forms of `labels`; its lessons
    have it write the old tokens `written`, too.
    """
    shutil.copytree(base, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    num_before = tokenizer.get_vocab_size()
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    new = [piece for piece in pieces if piece not in known]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in new])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(-(-tokenizer.get_vocab_size() // 64) * 64, mean_resizing=False)
    embeddings = model.model.language_model.embed_tokens.weight
    _place(embeddings, tokenizer, num_before, new, labels)
    set_apart(embeddings, tokenizer, written)
    model.save_pretrained(folder)


@torch.no_grad()
def _place(
    embeddings: Tensor, tokenizer: Tokenizer, num_before: int, new: Sequence[str], labels: Sequence[str]
) -> None:
    """Random directions of typical length; the forms of a label differ like those of the phone's names."""
    usual = embeddings[:num_before]
    embeddings[num_before:] = torch.randn_like(embeddings[num_before:]) * usual.std()

    def row(text: str) -> Tensor:
        token_id = tokenizer.token_to_id(text)
        assert token_id is not None, text
        return embeddings[token_id]

    line_start = torch.stack([row(f"\n{name}") - row(f" {name}") for name in names()]).mean(dim=0)
    quote = 0.5 * torch.randn_like(line_start) * usual.std()
    for label in labels:
        plain, at_start, quoted = label_forms(label)
        if at_start in new:
            row(at_start).copy_(row(plain) + line_start)
        if quoted in new:
            row(quoted).copy_(row(plain) + quote)
    click = click_prefix(COMPUTER_USE, "left_click")
    if click in new:
        row(click).copy_(row(click_prefix(MOBILE_USE, "click")))
        row(system_block("browser", COMPUTER_USE)).mul_(0.5)


@torch.no_grad()
def set_apart(embeddings: Tensor, tokenizer: Tokenizer, written: Sequence[str]) -> None:
    """Move rows of tokens that were never or rarely written away from others like them, to the digits' rows.

    Embeddings are also the output weights. What a model never writes is pushed in one direction, until such rows are
    equal: the model cannot write one of these tokens without the others being as likely.
    """

    def find(text: str) -> int:
        token_id = tokenizer.token_to_id(text)
        assert token_id is not None, text
        return token_id

    before = embeddings.clone()
    directions = normalize(before, dim=-1)
    centre = before[[find(str(digit)) for digit in range(10)]].mean(dim=0)
    for token_id in map(find, written):
        crowd = directions @ directions[token_id] > _CROWD_SIMILARITY
        is_crowded = int(crowd.sum()) > _CROWD_SIZE
        own = before[token_id] - (before[crowd].mean(dim=0) if is_crowded else centre)
        if is_crowded or own.norm() < _LEAST_DISTANCE:
            embeddings[token_id] = centre + own * (_LEAST_DISTANCE / own.norm())


if __name__ == "__main__":
    _is_for_pages = sys.argv[4] == "pages"
    write_extended_model(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        seed=int(sys.argv[3]),
        pieces=page_pieces() if _is_for_pages else ladder_pieces(),
        labels=LABELS if _is_for_pages else ladder_labels(),
        written=() if _is_for_pages else answer_tokens(),
    )

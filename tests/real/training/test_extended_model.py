"""The ladder's model can write each token that its lessons have it write."""

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cosine_similarity

from cua_rl.models import LADDER_QWEN3_VL
from scripts.tiny_models.extended_model import set_apart
from scripts.tiny_models.ladder_lessons import answer_tokens


def test_tokens_that_were_never_written_are_set_apart_and_no_others_moved() -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(LADDER_QWEN3_VL / "tokenizer.json"))
    rows = 0.1 * torch.randn(tokenizer.get_vocab_size(), 32) + 0.2
    written = [tokenizer.token_to_id(name) for name in answer_tokens()]
    never = [written[0], written[1], *range(len(rows) - 150, len(rows))]
    rows[never] = torch.randn(32) + 1e-3 * torch.randn(len(never), 32)
    before = rows.clone()

    set_apart(rows, tokenizer, answer_tokens())

    others = [index for index in range(len(rows)) if index not in written]
    assert torch.equal(rows[others], before[others])
    assert cosine_similarity(before[written[0]], before[never[2:]]).min() > 0.99
    for token_id in written:
        similarity = cosine_similarity(rows[token_id], rows)
        similarity[token_id] = 0.0
        assert similarity.max() < 0.9

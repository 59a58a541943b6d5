# pyright: reportUnknownMemberType=false
"""The tokenizer of the tiny models: whole pieces of text, and bytes for everything else."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Special tokens, which texts cannot contain; their ids follow those of the bytes."""


def build_tokenizer(pieces: Sequence[str]) -> Tokenizer:
    """Byte-level BPE without merges: ids 0-255 are bytes, then come control tokens, then `pieces` as added tokens.

    If several pieces match, the leftmost is taken, and the longest of those.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in pieces if text not in alphabet])
    return tokenizer

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Which tokens a grammar allowed at each sampled token: the sampler's masks, recomputed with the same library."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from cua_rl.renderers.qwen3_vl import END_OF_TEXT, END_OF_TURN
from cua_rl.types.errors import TrainingError, boundary
from cua_rl.types.rollout import Datum

_WORD = 32
"""Tokens in an entry of a mask, the lowest bit first."""
_CACHE_BYTES = 2**28
_IMPOSSIBLE = -1e30
"""A logit whose probability is 0, as is its product with it, unlike that of minus infinity."""


class AllowedTokens(NamedTuple):
    """The tokens that could be sampled in place of each of `n` tokens."""

    rows: Tensor  # [n] int64, places in `masks`; 0 where no grammar applied
    masks: Tensor  # [rows, vocabulary / 32] int32, a bit per token that is allowed: in row 0, all

    def split(self, size: int) -> Iterator["AllowedTokens"]:
        """Those of `size` tokens each."""
        return (AllowedTokens(rows, self.masks) for rows in self.rows.split(size))

    def forbid_others(self, logits: Tensor) -> Tensor:
        """The logits [n, vocabulary], in which all other tokens are made impossible."""
        shifts = torch.arange(_WORD, dtype=torch.int32, device=logits.device)
        is_forbidden = (self.masks[self.rows][:, :, None] >> shifts & 1) == 0
        return logits.masked_fill_(is_forbidden.flatten(1)[:, : logits.shape[1]], _IMPOSSIBLE)


class Grammars:
    """The grammars of a model's vocabulary."""

    def __init__(self, model_path: Path, vocabulary_size: int) -> None:
        self._model_path = model_path
        self._vocabulary_size = vocabulary_size

    def allowed_tokens(self, datums: Sequence[Datum]) -> AllowedTokens | None:
        """For the trained tokens of the datums, one after the other; None if no grammar applied to any.

        Raises `TrainingError` for a token that its grammar does not allow.
        """
        if not any(datum.grammars for datum in datums):
            return None
        rows = torch.zeros(sum(datum.num_trained_tokens for datum in datums), dtype=torch.long)
        masks, num_earlier = [self._full_mask()], 0
        for datum in datums:
            tokens, is_trained = datum.model_input.token_ids(0), datum.loss_mask
            num_before = list(accumulate(is_trained, initial=num_earlier))
            num_earlier = num_before[-1]
            for start, grammar in datum.grammars:
                matcher = self._make_matcher(grammar)
                for place in takewhile(is_trained.__getitem__, range(start, len(tokens))):
                    rows[num_before[place]] = len(masks)
                    masks.append(self._full_mask())
                    matcher.fill_next_token_bitmask(masks[-1][None])
                    if not matcher.accept_token(tokens[place]):
                        raise TrainingError(
                            f"expected sampled tokens that their grammar allows, got {tokens[place]} at position "
                            f"{place} of {datum.rollout_id!r}; install the model server's xgrammar, and start the "
                            "server with the options of docs/models.md"
                        )
        return AllowedTokens(rows, torch.stack(masks))

    def _full_mask(self) -> Tensor:
        return torch.full((-(-self._vocabulary_size // _WORD),), -1, dtype=torch.int32)

    def _make_matcher(self, grammar: str) -> Any:
        with boundary(TrainingError, "the grammar of an answer"):
            xgrammar, (compiler, ends) = import_module("xgrammar"), self._compiler
            return xgrammar.GrammarMatcher(compiler.compile_structural_tag(grammar), override_stop_tokens=ends)

    @cached_property
    def _compiler(self) -> tuple[Any, list[int]]:
        """What compiles grammars, and the tokens that end an answer."""
        xgrammar: Any = import_module("xgrammar")
        tokenizer: Any = AutoTokenizer.from_pretrained(self._model_path, local_files_only=True)
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self._vocabulary_size)
        compiler = xgrammar.GrammarCompiler(vocabulary, cache_limit_bytes=_CACHE_BYTES)
        return compiler, tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])

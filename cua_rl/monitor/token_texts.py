"""Decodes tokens with the run's own tokenizer, if it is on this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import select
from tokenizers import Tokenizer, decoders, pre_tokenizers

import cua_rl.models
from cua_rl.database.models import RolloutRow, TurnRow
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import NotFoundError, RunAccess
from cua_rl.monitor.figures import finite
from cua_rl.monitor.rollout_queries import find_rollout
from cua_rl.types.json_values import mapping, sequence

_TINY_MODEL = Path(cua_rl.models.__file__).parent / "tiny_qwen3_vl"


class TokenTexts:
    """The bytes of every token id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._bytes = _byte_symbols() if isinstance(tokenizer.decoder, decoders.ByteLevel) else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; none for an id that the tokenizer does not know."""
        if token in self._added:
            return self._added[token].encode()
        symbols = self._tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if symbols is None:
            return b""
        if self._bytes is None:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return b"".join(self._bytes.get(symbol, symbol.encode()) for symbol in symbols)

    def texts(self, tokens: Sequence[int]) -> list[str]:
        r"""The text of each token; bytes of an incomplete character are shown in hex: \xe6."""
        return [self.token_bytes(token).decode("utf-8", "backslashreplace") for token in tokens]

    def joined(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "backslashreplace")


def _byte_symbols() -> dict[str, bytes]:
    """Byte-level vocabularies map every byte to a printable character, printable bytes to themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    table |= {chr(256 + place): bytes([byte]) for place, byte in enumerate(others)}
    if set(table) != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("expected the alphabet of byte-level vocabularies, got another one from `tokenizers`")
    return table


async def find_token_texts(config: Mapping[str, Any]) -> TokenTexts | None:
    """The tokenizer of a run's model folder, or that of the package's tiny model if the run used it; None elsewhere."""
    folders = [Path(str(config["model_path"]))] if config.get("model_path") else []
    if config.get("model_name") is None and config.get("model_path"):
        folders.append(_TINY_MODEL)
    paths = [folder / "tokenizer.json" for folder in folders]
    path = next(filter(os.path.isfile, paths), None)  # `Path.is_file` raises if the folder is closed to us
    return None if path is None else await asyncio.to_thread(_load_token_texts, path)


@lru_cache(maxsize=4)
def _load_token_texts(path: Path) -> TokenTexts:
    return TokenTexts(Tokenizer.from_file(str(path)))


async def load_turn_tokens(run: RunAccess, rollout_id: str, turn_index: int) -> schemas.TurnTokens:
    """A turn's sampled tokens with their log-probabilities, and the prompt that they answer."""
    rollout = await find_rollout(run, rollout_id)
    query = select(TurnRow).where(TurnRow.rollout_pk == rollout.id, TurnRow.turn_index == turn_index)
    row = await run.session.scalar(query)
    if row is None:
        raise NotFoundError(
            f"expected a turn {turn_index} in rollout {rollout_id!r}, got none; it has {rollout.num_turns}"
        )
    return _turn_tokens(row, _advantage(rollout, turn_index), await find_token_texts(run.training.config))


async def load_rollout_tokens(run: RunAccess, rollout_id: str) -> list[schemas.TurnTokens]:
    """The tokens of all turns of a rollout, in order."""
    rollout = await find_rollout(run, rollout_id)
    query = select(TurnRow).where(TurnRow.rollout_pk == rollout.id).order_by(TurnRow.turn_index)
    rows = (await run.session.scalars(query)).all()
    texts = await find_token_texts(run.training.config)
    return [_turn_tokens(row, _advantage(rollout, row.turn_index), texts) for row in rows]


def _advantage(rollout: RolloutRow, turn_index: int) -> float | None:
    """A turn's own, or else the rollout's."""
    own = rollout.turn_advantages or ()
    return own[turn_index] if turn_index < len(own) else rollout.advantage


def _turn_tokens(row: TurnRow, advantage: float | None, texts: TokenTexts | None) -> schemas.TurnTokens:
    training = row.training_logprobs
    parts: list[schemas.PromptPart] = []
    position = 0
    # rows of senders that were not checked may hold anything
    for fields in map(mapping, sequence(row.prompt_chunks)):
        image = fields.get("image") if isinstance(fields.get("image"), str) else None
        length = int(finite(fields.get("text" if image is None else "tokens")) or 0)
        tokens = row.prompt_token_ids[position : position + length]
        position += length
        parts.append(
            schemas.PromptPart(
                kind="text" if image is None else "image",
                num_tokens=length,
                text=None if image is not None or texts is None else texts.joined(tokens),
                sha256=None if image is None else str(image),
            )
        )
    return schemas.TurnTokens(
        turn_index=row.turn_index,
        policy_version=row.policy_version,
        advantage=finite(advantage),
        tokens=row.sampled_tokens,
        texts=None if texts is None else texts.texts(row.sampled_tokens),
        sampling_logprobs=[finite(value) for value in row.sampling_logprobs],
        training_logprobs=None if training is None else [finite(value) for value in training],
        prompt=parts,
        prompt_token_ids=row.prompt_token_ids,
    )

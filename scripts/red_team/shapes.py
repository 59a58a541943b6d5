"""Secrets in every shape of tests/secret_shapes.py, and known ones in other encodings, as an agent may print them."""

import random
import string
from base64 import b64encode
from collections.abc import Mapping
from urllib.parse import quote

from tests.secret_shapes import PLACED, PREFIXED

_MAX_LINES, _MAX_CHARACTERS = 5, 450
"""What an error says of the end of a program's output."""
_NUM_SHOWN = 16
"""As many characters of a secret are one in a row."""


def shaped_texts() -> dict[str, str]:
    """A text of each shape by the beginning of the secret in it."""
    made, texts = random.Random(0), dict[str, str]()
    for shape in (*PREFIXED.values(), *PLACED.values()):
        secret = "".join(made.choices(string.ascii_letters + string.digits, k=40))
        texts[secret[:_NUM_SHOWN]] = shape.format(*[secret] * shape.count("{"))
    return texts


def encoded_texts(known: Mapping[str, str]) -> dict[str, str]:
    """Texts that hold known secrets in another encoding, by a part of it that must not be seen."""
    texts: dict[str, str] = {}
    for value in known.values():
        data = value.encode()
        for encoded in (b64encode(data).decode(), data.hex(), quote(value, safe="")):
            texts[encoded[4:-6]] = f"payload {encoded} end"
    return texts


def in_pieces(texts: Mapping[str, str]) -> list[str]:
    """All texts, as many together as one error shows."""
    pieces: list[str] = []
    for text in texts.values():
        joined = f"{pieces[-1]}\n{text}" if pieces else text
        if pieces and len(joined) <= _MAX_CHARACTERS and joined.count("\n") < _MAX_LINES - 1:
            pieces[-1] = joined
        else:
            pieces.append(text)
    return pieces

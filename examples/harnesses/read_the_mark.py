"""A game with a world and a score of its own: `harness_command="python examples/harnesses/read_the_mark.py"`.

A picture shows a line with a mark. The model says where the mark is, from 0 to 1000, hears whether that is too high or
too low, and may correct itself. The reward is 1 for the exact place, and less the farther the last guess is away.
"""

import base64
import json
import os
import random
import re
import struct
import sys
import zlib

from openai import APIStatusError, OpenAI

HEIGHT_PX = 64
TOLERANCE = 20


def draw_line(width_px: int, mark: int) -> bytes:
    """A PNG, 8 bits of grey: white, with a black bar where the mark is."""
    centre = mark * (width_px - 1) // 1000
    row = b"\0" + bytes(0 if abs(x - centre) <= 3 else 255 for x in range(width_px))

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width_px, HEIGHT_PX, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * HEIGHT_PX)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def report(result: dict[str, object]) -> None:
    """Leave the result where it is looked for, all of it at once."""
    path = os.environ["CUA_RESULT_PATH"]
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(f"{path}.new", path)


def main() -> int:
    """Play one game; the exit status is 0 whether or not it was won."""
    task = json.loads(os.environ["CUA_TASK"])
    mark = random.Random(int(os.environ["CUA_SEED"])).randint(0, 1000)
    url = "data:image/png;base64," + base64.b64encode(draw_line(task["width_px"], mark)).decode()
    question = os.environ["CUA_INSTRUCTION"]
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    model = OpenAI(max_retries=0, timeout=None)  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    guess, guesses = None, 0
    while guesses < min(2, int(os.environ["CUA_MAX_TURNS"])):
        guesses += 1
        try:
            answer = model.chat.completions.create(model=os.environ["CUA_MODEL"], messages=messages)  # type: ignore[arg-type]
        except APIStatusError as error:
            # what the gateway refuses it judges itself; a status here only says that the game was not finished
            print(error, file=sys.stderr)
            return 1
        text = answer.choices[0].message.content or ""
        found = re.search(r"\d+", text)
        guess = min(int(found[0][:6]), 1000) if found else None
        if guess is not None and abs(guess - mark) <= TOLERANCE:
            break
        hint = "Say a number." if guess is None else "Too high." if guess > mark else "Too low."
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    distance = 1000 if guess is None else abs(guess - mark)
    is_found = distance <= TOLERANCE
    report(
        {
            "reward": 1.0 if is_found else 0.5 * (1 - distance / 1000),
            "success": is_found,
            "metrics": {"distance": distance, "guesses": guesses},
            "answer": None if guess is None else str(guess),
            "fault": None,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

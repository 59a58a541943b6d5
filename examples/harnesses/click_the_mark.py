"""A game with a world and a score of its own: `harness_command="python examples/harnesses/click_the_mark.py"`.

A picture shows a line with a mark. The model clicks on it, hears whether that was too far left or right, and may try
again. The reward is 1 for a click on the mark, and less the farther the last click is away.
"""

import base64
import json
import os
import random
import struct
import sys
import zlib

from openai import APIStatusError, OpenAI
from openai.types.chat import ChatCompletionMessage

HEIGHT_PX = 64
TOLERANCE = 20
CLICK = {
    "type": "function",
    "function": {
        "name": "mobile_use",
        "description": "Touch the screen.",
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": ["click"]},
                "coordinate": {"type": "array", "description": "x and y, each from 0 to 1000"},
            },
            "required": ["action", "coordinate"],
        },
    },
}


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


def find_place(said: ChatCompletionMessage) -> int | None:
    """Where the first click was, from left to right; None if there is none that can be read."""
    for call in said.tool_calls or ():
        try:
            return min(max(int(json.loads(call.function.arguments)["coordinate"][0]), 0), 1000)  # type: ignore[union-attr]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            continue
    return None


def main() -> int:
    """Play one game; the exit status is 0 whether or not it was won."""
    task = json.loads(os.environ["CUA_TASK"])
    mark = random.Random(int(os.environ["CUA_SEED"])).randint(0, 1000)
    url = "data:image/png;base64," + base64.b64encode(draw_line(task["width_px"], mark)).decode()
    question = os.environ["CUA_INSTRUCTION"]
    content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    model = OpenAI(max_retries=0, timeout=None)  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    place, clicks = None, 0
    while clicks < min(2, int(os.environ["CUA_MAX_TURNS"])):
        clicks += 1
        try:
            answer = model.chat.completions.create(model=os.environ["CUA_MODEL"], messages=messages, tools=[CLICK])  # type: ignore[call-overload]
        except APIStatusError as error:
            # what the gateway refuses it judges itself; a status here only says that the game was not finished
            print(error, file=sys.stderr)
            return 1
        said = answer.choices[0].message
        place = find_place(said)
        print(f"mark {mark}, click {place}: {said.content!r} {said.tool_calls!r}")  # goes to logs/agents
        if place is not None and abs(place - mark) <= TOLERANCE:
            break
        hint = "Click on the mark." if place is None else "Too far right." if place > mark else "Too far left."
        # sent back as it came: then the next prompt extends this one, and both turns are one training sequence
        messages.append(said.model_dump(exclude_none=True))
        results = [{"role": "tool", "tool_call_id": call.id, "content": hint} for call in said.tool_calls or ()]
        messages += results or [{"role": "user", "content": hint}]
    distance = 1000 if place is None else abs(place - mark)
    is_found = distance <= TOLERANCE
    report(
        {
            "reward": 1.0 if is_found else 0.5 * (1 - distance / 1000),
            "success": is_found,
            "metrics": {"distance": distance, "clicks": clicks},
            "answer": None if place is None else str(place),
            "fault": None,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

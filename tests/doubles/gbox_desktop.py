"""A Linux box of the GBox double: a small drawn desktop with an editor, a Save button and a list that scrolls."""

import io
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from PIL import Image, ImageDraw

SIZE_PX = (320, 240)
FIELD, SAVE, CLEAR, LIST = (16, 40, 304, 70), (16, 80, 96, 104), (112, 80, 192, 104), (16, 120, 304, 228)
NOTE = "/home/user/note.txt"


class DesktopBox:
    """An editor: click the field, type, save; the note is a file that the shell sees."""

    def __init__(self) -> None:
        self.text = ""
        self.is_focused = False
        self.top_row = 0
        self.cursor = (0, 0)
        self.files: dict[str, str] = {}

    def draw(self) -> bytes:
        return _draw(self.text, self.is_focused, self.top_row, self.cursor)

    def elements(self) -> Mapping[str, tuple[int, int]]:
        return {"text field": _centre(FIELD), "save": _centre(SAVE), "clear": _centre(CLEAR), "list": _centre(LIST)}

    def act(self, name: str, body: Mapping[str, Any]) -> bool:
        """Do an action of the API; False if its coordinates lie outside."""
        if "x" in body and not (0 <= body["x"] < SIZE_PX[0] and 0 <= body["y"] < SIZE_PX[1]):
            return False
        match name:
            case "click" if body.get("button", "left") == "left":
                self._click(body["x"], body["y"])
            case "move":
                self.cursor = (body["x"], body["y"])
            case "drag":
                self.cursor = (body["end"]["x"], body["end"]["y"])
            case "scroll":
                self.top_row = max(0, self.top_row + round(body["scrollY"] / 18))
            case "type" if self.is_focused:
                self.text += body["text"]
            case "press-key" if body["keys"] == ["control", "s"]:
                self.files[NOTE] = self.text
            case "press-key" if body["keys"] == ["backspace"]:
                self.text = self.text[:-1]
            case _:
                pass
        return True

    async def shell(self, command: str) -> str:
        """`test -e` and `cat`, as the queries of Linux boxes write them."""
        if found := re.fullmatch(r"if test -e (\S+); then echo (\S+); else echo (\S+); fi", command):
            return f"{found[2] if found[1] in self.files else found[3]}\n"
        if found := re.fullmatch(r"cat (\S+)", command):
            return f"{self.files[found[1]]}\n"
        if command.startswith("echo "):
            return f"{command[5:]}\n"
        raise AssertionError(f"the drawn desktop has no command {command!r}")

    def _click(self, x: int, y: int) -> None:
        self.cursor, self.is_focused = (x, y), _contains(FIELD, x, y)
        if _contains(SAVE, x, y):
            self.files[NOTE] = self.text
        if _contains(CLEAR, x, y):
            self.text = ""


@lru_cache(maxsize=256)
def _draw(text: str, is_focused: bool, top_row: int, cursor: tuple[int, int]) -> bytes:
    picture = Image.new("RGB", SIZE_PX, (40, 60, 90))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((8, 8, 312, 232), fill="#f0f0f0")
    pen.text((16, 16), "Notes", fill="black")
    pen.rectangle(FIELD, fill="white", outline="#2f6fed" if is_focused else "gray")
    pen.text((20, 48), text, fill="black")
    for box, label in ((SAVE, "Save"), (CLEAR, "Clear")):
        pen.rectangle(box, fill="#d0d0d0", outline="black")
        pen.text((box[0] + 20, box[1] + 6), label, fill="black")
    for row in range(6):
        pen.text((20, 122 + 18 * row), f"entry {top_row + row}", fill="black")
    pen.ellipse((cursor[0] - 2, cursor[1] - 2, cursor[0] + 2, cursor[1] + 2), fill="red")
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


def _contains(box: tuple[int, int, int, int], x: int, y: int) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def _centre(box: tuple[int, int, int, int]) -> tuple[int, int]:
    return (box[0] + box[2]) // 2, (box[1] + box[3]) // 2

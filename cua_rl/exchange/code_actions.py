"""Reads actions written as Python code, as AgentTrek (arXiv:2412.09605), AGUVIS (arXiv:2412.04454) and AgentNet do.

Code is parsed and never run.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence

from cua_rl.exchange.foreign_actions import ForeignAction, UnknownAction
from cua_rl.types.json_values import is_array

_POSITIONAL: Mapping[str, Sequence[str]] = {
    "write": ("text", "interval"), "typewrite": ("text", "interval"), "scroll": ("clicks", "x", "y"),
    "sleep": ("time",), "wait": ("time",), "terminate": ("status",), "answer": ("text",), "type": ("text",),
    "drag": ("from_x", "from_y", "x", "y"), "swipe": ("from_x", "from_y", "x", "y"), "press": ("keys", "presses"),
    "click": ("x", "y", "clicks", "interval", "button"), "mouse_click": ("x", "y", "button"),
}  # fmt: skip
_RELATIVE = {"move": "moveRel", "drag": "dragRel"}
"""Functions of pyautogui that count from where the mouse is, by the names that say so."""
_MAX_KEYS = 100  # of one call; each becomes a turn


def parse_code(code: str) -> Iterator[ForeignAction]:
    """The calls in Python code such as `pyautogui.click(x=0.4, y=0.2)`; raises `UnknownAction` for anything else."""
    try:
        body = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error("calls of pyautogui", f"{code[:200]!r} ({error})") from None
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            raise _error("calls of pyautogui", repr(code[:200]))
        module, _, name = ast.unparse(call.func).rpartition(".")
        if module == "pyautogui":
            name = _RELATIVE.get(name, name)
        given = _read_arguments(call, name, code)
        if name != "press":
            yield ForeignAction(name=name, given=given)
            continue
        keys = given.pop("keys", None)  # one after the other, unlike a hotkey's
        pressed = keys if is_array(keys) else [keys]
        times = given.pop("presses", 1)
        if not isinstance(times, int) or times * len(pressed) > _MAX_KEYS:
            raise _error(f"up to {_MAX_KEYS} keys", repr(code[:200]))
        yield from [ForeignAction(name="press", given=given | {"keys": [key]}) for key in pressed] * times


def _read_arguments(call: ast.Call, name: str, code: str) -> dict[str, object]:
    try:
        positional: list[object] = [ast.literal_eval(value) for value in call.args]
        given: dict[str, object] = {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise _error("constants in code", repr(code[:200])) from None
    if name == "hotkey":
        is_list = len(positional) == 1 and isinstance(positional[0], list)
        return given | {"keys": (positional[0] if is_list else positional) or given.get("keys")}
    names = _POSITIONAL.get(name, ("x", "y", "duration"))
    if len(positional) > len(names):
        raise _error(f"{name}{names}", repr(code[:200]))
    return given | dict(zip(names, positional, strict=False))


def _error(expected: str, got: str) -> UnknownAction:
    return UnknownAction(f"expected {expected}, got {got}; import with unreadable=skip, which leaves such code out")

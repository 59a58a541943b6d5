"""A goal that must not hold when a task begins, and what can be done about it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from json import JSONDecodeError, loads
from typing import Literal, cast

from cua_rl.devices.android.queries import read_android_query
from cua_rl.devices.android.shell import AndroidShell
from cua_rl.errors import TaskError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A goal that must not hold; `argument` is what follows the colon of the query.

    A question ("told") is a wish too: what it asks for may not be `expected`, which is "" if any answer is right.
    """

    shell: AndroidShell
    query: str
    argument: str
    expected: str
    how: str

    async def holds(self) -> bool:
        """Whether the goal is met; raises `TaskError` for a kind of goal that is none."""
        actual = await read_android_query(self.shell, self.query)
        match self.how:
            case "equals" | "told":
                return actual == self.expected
            case "includes":
                return self._item(self.expected) in self._items(actual)
            case _:
                raise TaskError(f"expected how to be 'equals', 'includes' or 'told', got {self.how!r}")

    def _item(self, text: str) -> object:
        try:
            return loads(text)
        except JSONDecodeError as error:
            raise TaskError(f"expected JSON to look for in {self.query!r}, got {text!r}") from error

    def _items(self, text: str) -> list[object]:
        items = self._item(text)
        if not isinstance(items, list):
            raise TaskError(f"expected {self.query!r} to be a list to look for {self.expected!r} in, got {text!r}")
        return cast("list[object]", items)

    @property
    def opposite(self) -> str:
        """What a switch must say instead; raises `TaskError` if it is expected to be neither "true" nor "false"."""
        if self.expected not in ("true", "false"):
            raise TaskError(f"expected {self.query!r} to be wanted as 'true' or 'false', got {self.expected!r}")
        return "false" if self.expected == "true" else "true"


Step = Callable[[Wish], Awaitable[str]]
"""Does something to the phone and returns what it printed, for error messages."""


async def nothing(wish: Wish) -> str:
    """Leave the phone alone."""
    return ""


def refuse(advice: str) -> Step:
    """Raise `TaskError`: the goal holds, and undoing it is not ours."""

    async def raise_error(wish: Wish) -> str:
        raise TaskError(
            f"expected a phone on which {wish.query!r} is anything but {wish.expected!r}, got one where it is; {advice}"
        )

    return raise_error


_LEAVE_IT = refuse("change it by hand, there is no way to do it over adb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """`require` runs first and raises `TaskError` if the goal cannot be reached on this phone; `undo` runs if it holds.

    `is_place`: the goal is about what is in front, which may be the home screen itself. `battery` is what the phone is
    told about its charger: the battery saver cannot be switched on while charging.
    """

    undo: Step = _LEAVE_IT
    require: Step = nothing
    is_place: bool = False
    battery: Literal["reset", "unplug"] = "reset"

"""A person instead of the model, who sees the screenshot of each turn and types what the agent does."""

import asyncio
import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cua_rl.agent.device_step import cursor_after
from cua_rl.agent.tools import action_names, parse_action
from cua_rl.renderers.renderer import Renderer
from cua_rl.sampling.sampler import Sampled, TurnRequest
from cua_rl.supervised.demonstrations import AnswerItems, as_taught
from cua_rl.types.actions import Action, Finish
from cua_rl.types.conversation import EncodedImage, Message, ParseFailure, Reasoning, TextPart, Tool, ToolCall
from cua_rl.types.errors import AgentError
from cua_rl.types.json_values import is_object, mapping
from cua_rl.types.rollout import AdapterRef

Lines = asyncio.Queue[str | None]
"""What a person types, line by line; None at its end."""

_POINT = ("coordinate",)
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("click", "left_click", "double_click", "right_click"), _POINT),
    **dict.fromkeys(("mouse_move", "left_click_drag", "long_press"), _POINT),
    **dict.fromkeys(("swipe", "drag"), ("coordinate", "coordinate2")),
    **dict.fromkeys(("scroll", "hscroll"), ("coordinate", "pixels")),
    **dict.fromkeys(("type", "answer", "open"), ("text",)),
    "system_button": ("button",),
    "wait": ("time",),
    "terminate": ("status",),
}
"""What the words after the name of an action mean, in order."""
_SHOWN = {
    "coordinate": "X Y", "coordinate2": "TO_X TO_Y", "pixels": "PIXELS", "text": '"TEXT"', "keys": "KEY ...",
    "button": "BUTTON", "time": "SECONDS", "status": "success|failure",
}  # fmt: skip
_BUTTONS = ("back", "home", "menu", "enter")


class WrongWords(ValueError):
    """Words that are no action; the message is for the person."""


@dataclass(slots=True, kw_only=True)
class Person:
    """A `Sampler` that asks a person, who types in a terminal and looks at `screen_path`, or uses a page for both."""

    renderer: Renderer
    tool: Tool
    """Of the recorded agent."""
    reach: Callable[[EncodedImage], tuple[int, int]]
    """Where the tool's coordinates end on a screenshot."""
    cursor: tuple[int, int] | None
    turn: int
    """The number of the turn that the person is asked about; of the one before, as long as nothing was asked."""
    screen_path: Path
    lines: Lines
    echo: Callable[[str], None]
    max_model_len: int
    current: AdapterRef | None = None
    seen: EncodedImage | None = None
    """The screenshot of the turn."""
    said: list[str] = field(default_factory=list[str])
    """What the person was told."""

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def forget(self, sticky_key: str) -> None: ...

    async def sample_turn(
        self, turn: TurnRequest, *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Sampled, AdapterRef | None]:
        """The person's answer in the model's tokens; raises `AgentError` if there is none."""
        seen = turn.prompt.images[-1]
        await asyncio.to_thread(self.screen_path.write_bytes, seen.data)
        self.seen, self.turn = seen, self.turn + 1
        self.tell(f"turn {self.turn}: {seen.width_px}x{seen.height_px} pixels in {self.screen_path}")
        tokens = await self._ask(seen)
        prompt_ids = tuple(turn.prompt.token_ids(self.renderer.image_token_id))
        logprobs = (0.0,) * len(tokens)  # it was not sampled
        return Sampled(prompt_ids=prompt_ids, tokens=tokens, logprobs=logprobs, is_complete=True, cached_tokens=0), None

    def tell(self, text: str) -> None:
        """Tell the person something."""
        self.said.append(text)
        self.echo(text)

    async def _ask(self, seen: EncodedImage) -> tuple[int, ...]:
        """Ask until there is an action; what was said with `think` precedes it as reasoning."""
        thoughts: list[str] = []
        while (line := await self.lines.get()) is not None:
            word, _, rest = line.strip().partition(" ")
            if not word or word == "help":
                self.tell(self.help())
                continue
            if word == "think":
                thoughts.append(rest.strip())
                continue
            try:
                call = parse_line(line, self.tool, seen, self.reach(seen))
                action = self._read(call, seen)
                tokens = self._encode((Reasoning(text="\n".join(thoughts)), call) if thoughts else (call,))
            except WrongWords as wrong:
                self.tell(f"not done: {wrong}")
                continue
            self.tell(f"  {action!r}")
            self.cursor = (None if isinstance(action, Finish) else cursor_after(action)) or self.cursor
            return tokens
        raise AgentError(
            f"expected an action for turn {self.turn}, got the end of the input; end a rollout with finish"
        )

    def _read(self, call: ToolCall, seen: EncodedImage) -> Action | Finish:
        action = parse_action(
            call,
            width_px=seen.width_px,
            height_px=seen.height_px,
            cursor=self.cursor,
            offered=self.tool,
            scale=self.reach(seen),
        )
        if isinstance(action, ParseFailure):
            raise WrongWords(action.message)
        return action

    def _encode(self, answer: AnswerItems) -> tuple[int, ...]:
        question = Message(role="user", content=(TextPart(text="?"),))  # answers are encoded apart from what precedes
        whole, mask = self.renderer.render_supervised((question, *as_taught(answer, self.renderer)))
        ids = whole.token_ids(self.renderer.image_token_id)
        tokens = tuple(token for token, is_answer in zip(ids, mask, strict=True) if is_answer)
        read = self.renderer.parse(self.renderer.decode(tokens), (self.tool,)).tool_calls
        meant = [each for each in answer if isinstance(each, ToolCall)]
        if set(tokens[:-1]) & set(self.renderer.stop_token_ids) or _loaded(read) != _loaded(meant):
            raise WrongWords("expected text without markers of the model's format, got some")
        return tokens

    def help(self) -> str:
        """What can be said, one a line."""
        names = [usage(name, self.tool) for name in action_names(self.tool)]
        return "\n".join(
            [
                "actions, with pixels of the screenshot:",
                *names,
                "finish [failure]",
                *([" | ".join(_BUTTONS)] if "system_button" in action_names(self.tool) else []),
                "think WHY ... before an action: its reasoning",
                f'or the arguments of a call of {self.tool.name}: {{"action": "wait", "time": 1}}',
            ]
        )


def _loaded(calls: Sequence[ToolCall]) -> list[object]:
    return [json.loads(call.arguments) for call in calls]


def usage(name: str, tool: Tool) -> str:
    """How an action of the tool is written in words."""
    return " ".join([name, *(_SHOWN[argument] for argument in _arguments(name, tool))])


def parse_line(line: str, tool: Tool, seen: EncodedImage, reach: tuple[int, int]) -> ToolCall:
    """The call that words or JSON ask for; `reach` is where its coordinates end. Raises `WrongWords`."""
    if line.lstrip().startswith("{"):
        try:
            given: object = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WrongWords(f"expected JSON, got a line that is not ({error})") from None
        inner = mapping(given).get("arguments")  # of a whole call
        arguments = mapping(inner) if is_object(inner) else mapping(given)
    else:
        arguments = _parse_words(line, tool, seen, reach)
    return ToolCall(call_id="by_hand", name=tool.name, arguments=json.dumps(arguments, ensure_ascii=False))


def _parse_words(line: str, tool: Tool, seen: EncodedImage, reach: tuple[int, int]) -> dict[str, object]:
    try:
        word, *rest = shlex.split(line)
    except ValueError as error:
        raise WrongWords(f"{error}: put text that contains quotes between quotes of the other kind") from None
    name, rest = _find_action(word.lower(), rest, action_names(tool))
    try:
        taken = {argument: _take(argument, rest, seen, reach) for argument in _arguments(name, tool)}
    except (ValueError, IndexError):
        taken = None
    if taken is None or rest:
        size = f"{seen.width_px}x{seen.height_px}"
        raise WrongWords(f"expected {usage(name, tool)}, on a screen of {size} pixels, got {line.strip()!r}")
    return {"action": name, **taken}


def _find_action(word: str, rest: list[str], offered: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the action that a word means, and the words after it."""
    if word == "finish":
        return "terminate", rest or ["success"]
    if word in _BUTTONS and "system_button" in offered:
        return "system_button", [word.capitalize(), *rest]
    name = "left_click" if word == "click" and "left_click" in offered else word
    if name not in offered:
        raise WrongWords(f"expected help, finish, or one of {', '.join(offered)}, got {word!r}")
    return name, rest


def _take(argument: str, rest: list[str], seen: EncodedImage, reach: tuple[int, int]) -> object:
    """An argument of the words that are left, which are taken away; raises `ValueError` or `IndexError`."""
    if argument in ("coordinate", "coordinate2"):
        x, y = float(rest.pop(0)), float(rest.pop(0))
        if not (0 <= x < seen.width_px and 0 <= y < seen.height_px):
            raise ValueError
        return [round(x * reach[0] / seen.width_px), round(y * reach[1] / seen.height_px)]
    if argument in ("pixels", "time"):
        number = float(rest.pop(0))
        return int(number) if number.is_integer() else number
    words = [rest.pop(0), *rest]
    rest.clear()
    return words if argument == "keys" else " ".join(words)


def _arguments(name: str, tool: Tool) -> tuple[str, ...]:
    if name == "key":
        return ("keys",) if "keys" in mapping(tool.parameters["properties"]) else ("text",)
    return _ARGUMENTS.get(name, ())


def read_lines(descriptor: int) -> Lines:
    """What is typed into an open file or terminal. Nothing waits for its thread, which may wait for a person."""
    lines, loop = Lines(), asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError), os.fdopen(os.dup(descriptor), encoding="utf-8", errors="replace") as typed:
            for line in typed:
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="read-lines", daemon=True).start()
    return lines

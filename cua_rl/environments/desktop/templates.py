"""The desktop tasks: instruction, initial state, check of the final state, and a solution.

Names and texts are drawn from the seed; evaluation draws from words that training never uses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from cua_rl.environments.desktop.device import LinuxDesktop
from cua_rl.environments.device import Device
from cua_rl.tasks.answers import is_answer
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.actions import Action, PressKey, TypeText, Wait
from cua_rl.types.errors import TaskError
from cua_rl.types.judgement import Validation

FIRST_EVAL_SEED = 1_000_000
_TRAIN_WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kitchen",
    "lemon", "mirror", "needle", "orange", "pencil", "quartz", "river", "silver", "tunnel", "umbrella", "valley",
)  # fmt: skip
_EVAL_WORDS = (
    "anchor", "butter", "canyon", "dragon", "eagle", "feather", "guitar", "hammer", "iron", "jungle", "kettle",
    "ladder", "marble", "nickel", "oyster", "pepper", "rocket", "saddle", "timber", "velvet", "walnut", "zebra",
)  # fmt: skip
_MAX_TURNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopStart:
    """How the desktop begins: files in the home folder (name, text), and a program with its window."""

    files: tuple[tuple[str, str], ...]
    program: tuple[str, ...]
    window: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopInstance:
    """One instance: the words filled in, and the actions of an expert, who uses only the keyboard."""

    instruction: str
    start: DesktopStart
    query: str
    """What `LinuxDesktop.query` reads, or "answer" for what the agent said."""
    expected: str
    route: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DesktopTemplate(Template):
    """A desktop task for every seed."""

    draw: Callable[[Random, Sequence[str]], DesktopInstance] = field(compare=False)

    def instance(self, seed: int) -> DesktopInstance:
        """The instance of a seed; seeds from a million on are for evaluation."""
        words = _TRAIN_WORDS if seed < FIRST_EVAL_SEED else _EVAL_WORDS
        random = Random(f"{self.task_id}-{seed}")
        return self.draw(random, random.sample(words, len(words)))

    def make_task(self, seed: int) -> Task:
        instance = self.instance(seed)

        async def prepare(device: Device) -> None:
            desktop = _desktop(device)
            for name, text in instance.start.files:
                await desktop.write_file(name, text)
            await desktop.run_program(instance.start.program, window=instance.start.window)

        async def validate(device: Device, answer: str | None) -> Validation:
            query, expected = instance.query, instance.expected
            if query == "answer":
                return Validation(
                    query=query, expected=expected, actual=answer or "", success=is_answer(answer, expected)
                )
            actual = await _desktop(device).query(query)
            success = actual.strip() == expected.strip()
            return Validation(query=query, expected=expected, actual=actual, success=success)

        return self.build_task(seed, instance.instruction, prepare=prepare, validate=validate)


def _desktop(device: Device) -> LinuxDesktop:
    if not isinstance(device, LinuxDesktop):
        raise TaskError(
            f"expected a Linux desktop for a desktop task, got {device.device_id!r}; use source_type 'desktop' alone"
        )
    return device


def _editor(text: str) -> DesktopStart:
    return DesktopStart(files=(("note.txt", text),), program=("mousepad", "note.txt"), window="note.txt")


def _terminal(*files: tuple[str, str]) -> DesktopStart:
    return DesktopStart(
        files=files, program=("xterm", "-fa", "Monospace", "-fs", "12", "-T", "Terminal"), window="Terminal"
    )


def _file_manager(*names: str) -> DesktopStart:
    return DesktopStart(files=tuple((name, name) for name in names), program=("pcmanfm", "."), window="home")


def _keys(*names: str) -> PressKey:
    return PressKey(keys=names)


def replace_text(random: Random, words: Sequence[str]) -> DesktopInstance:
    text = f"{words[0]} {words[1]}"
    return DesktopInstance(
        instruction=f"Replace the text in the editor by '{text}' and save the file.",
        start=_editor(f"{words[2]}\n"),
        query="file:note.txt",
        expected=text,
        route=(_keys("ctrl", "a"), TypeText(text=text), _keys("ctrl", "s")),
    )


def append_line(random: Random, words: Sequence[str]) -> DesktopInstance:
    before = "\n".join(words[1 : 1 + random.randint(1, 4)])
    return DesktopInstance(
        instruction=f"Add a line with the word '{words[0]}' below the last line in the editor and save the file.",
        start=_editor(f"{before}\n"),
        query="file:note.txt",
        expected=f"{before}\n{words[0]}",
        route=(_keys("ctrl", "end"), TypeText(text=words[0]), _keys("ctrl", "s")),
    )


def delete_line(random: Random, words: Sequence[str]) -> DesktopInstance:
    lines = list(words[: random.randint(3, 5)])
    gone = random.choice(lines)
    rest = "\n".join(line for line in lines if line != gone)
    return DesktopInstance(
        instruction=f"Remove the line '{gone}' in the editor and save the file.",
        start=_editor("\n".join(lines) + "\n"),
        query="file:note.txt",
        expected=rest,
        route=(_keys("ctrl", "a"), TypeText(text=f"{rest}\n"), _keys("ctrl", "s")),
    )


def save_as(random: Random, words: Sequence[str]) -> DesktopInstance:
    return DesktopInstance(
        instruction=f"Save the text in the editor under the new name '{words[0]}.txt', in the same folder.",
        start=_editor(f"{words[1]}\n"),
        query=f"file:{words[0]}.txt",
        expected=words[1],
        route=(
            _keys("ctrl", "shift", "s"),
            Wait(duration_s=1.0),
            _keys("ctrl", "a"),
            TypeText(text=f"{words[0]}.txt"),
            _keys("enter"),
        ),
    )


def make_folder(random: Random, words: Sequence[str]) -> DesktopInstance:
    return DesktopInstance(
        instruction=f"Make a folder called '{words[0]}' in the folder that the file manager shows.",
        start=_file_manager(f"{words[1]}.txt"),
        query="files",
        expected="\n".join(sorted((f"{words[0]}/", f"{words[1]}.txt"))),
        route=(_keys("ctrl", "shift", "n"), _keys("ctrl", "a"), TypeText(text=words[0]), _keys("enter")),
    )


def rename_file(random: Random, words: Sequence[str]) -> DesktopInstance:
    return DesktopInstance(
        instruction=f"Rename the file '{words[0]}.txt' to '{words[1]}.txt' in the file manager.",
        start=_file_manager(f"{words[0]}.txt"),
        query="files",
        expected=f"{words[1]}.txt",
        route=(_keys("ctrl", "a"), _keys("F2"), _keys("ctrl", "a"), TypeText(text=f"{words[1]}.txt"), _keys("enter")),
    )


def make_file(random: Random, words: Sequence[str]) -> DesktopInstance:
    return DesktopInstance(
        instruction=f"Use the terminal to write the word '{words[0]}' into a file called '{words[1]}.txt'.",
        start=_terminal(),
        query=f"file:{words[1]}.txt",
        expected=words[0],
        route=(TypeText(text=f"echo {words[0]} > {words[1]}.txt\n"),),
    )


def count_lines(random: Random, words: Sequence[str]) -> DesktopInstance:
    number = random.randint(13, 99)
    return DesktopInstance(
        instruction="How many lines has the file list.txt? Use the terminal, and answer with the number alone.",
        start=_terminal(("list.txt", "".join(f"{random.choice(words)}\n" for _ in range(number)))),
        query="answer",
        expected=str(number),
        route=(TypeText(text="wc -l list.txt\n"),),
    )


_TABLE: tuple[tuple[str, Callable[[Random, Sequence[str]], DesktopInstance], Category, Difficulty], ...] = (
    ("desktop_01_replace_text", replace_text, "input", "easy"),
    ("desktop_02_append_line", append_line, "input", "easy"),
    ("desktop_03_delete_line", delete_line, "input", "medium"),
    ("desktop_04_save_as", save_as, "app", "medium"),
    ("desktop_05_make_folder", make_folder, "system", "medium"),
    ("desktop_06_rename_file", rename_file, "system", "medium"),
    ("desktop_07_make_file", make_file, "system", "easy"),
    ("desktop_08_count_lines", count_lines, "system", "hard"),
)
DESKTOP_TASKS: tuple[DesktopTemplate, ...] = tuple(
    DesktopTemplate(
        task_id=task_id, category=category, difficulty=difficulty, max_turns=_MAX_TURNS, tags=("desktop",), draw=draw
    )
    for task_id, draw, category, difficulty in _TABLE
)

"""The files of a data set, and the values in them of which each is a trajectory.

- JSON: one trajectory, a list of them, or one on each line (.jsonl).
- TFRecords, compressed or not: one example is an episode of AndroidControl, or a step of Android in the Wild.
- Parquet: the rows of Multimodal-Mind2Web, each a step.
- Result folders of OSWorld, of which each holds one trajectory (traj.jsonl).
"""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

from cua_rl.exchange.parquet import read_mind2web
from cua_rl.exchange.rows import Row, as_row, as_rows, is_row
from cua_rl.exchange.tfrecords import android_control_episode, read_examples
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_array

_OSWORLD_TASKS = (".", "examples", "evaluation_examples/examples")
"""Where, below the imported folder, OSWorld's task files may be: <domain>/<id>.json."""


def find_files(path: Path) -> list[Path]:
    """The files with trajectories at a path; raises `ConfigError` if there are none."""
    if path.is_file():
        return [path]
    # beside the annotations of GUI-Odyssey are its splits, and beside OSWorld's results its tasks: also JSON
    found = sorted(path.rglob("traj.jsonl")) or sorted(
        file
        for file in (path / "annotations" if (path / "annotations").is_dir() else path).rglob("*")
        if file.suffix in (".json", ".jsonl", ".parquet") or _is_tfrecord(file)
    )
    if not found:
        raise ConfigError(f"path: expected a file or folder with trajectories, got {str(path)!r}; correct path")
    return found


def _is_tfrecord(file: Path) -> bool:
    """Publishers name them android_control-00000-of-00020."""
    is_other = file.suffix in (".json", ".jsonl", ".parquet")
    return file.is_file() and not is_other and (".tfrecord" in file.name or "-of-" in file.name)


def read_values(file: Path, root: Path) -> Iterator[tuple[str, object]]:
    """Trajectories of a file below `root` with their places; raises `ConfigError`."""
    if file.name == "traj.jsonl":
        yield str(file), _osworld_result(file, root)
    elif file.suffix == ".parquet":
        for task, rows in groupby(read_mind2web(file), lambda row: str(row["annotation_id"])):
            yield f"{file}, task {task}", {"mind2web": list(rows)}
    elif _is_tfrecord(file):
        yield from _read_tfrecords(file)
    else:
        yield from _read_json(file)


def _read_tfrecords(file: Path) -> Iterator[tuple[str, object]]:
    """Steps of Android in the Wild become episodes, because they follow each other."""
    numbered = enumerate(read_examples(file), start=1)
    for key, members in groupby(numbered, lambda one: one[1].get("episode_id") if "goal_info" in one[1] else one[0]):
        steps = list(members)
        number, example = steps[0]
        where = f"{file}, record {number}"
        if "goal_info" in example:
            yield where, {"aitw": [step for _, step in steps], "episode_id": key}
        else:
            yield where, android_control_episode(example, where)


def _osworld_result(file: Path, root: Path) -> Row:
    """A result folder: results/<...>/<domain>/<id>/traj.jsonl with result.txt and screenshots; raises `ConfigError`.

    The instruction is in the benchmark's task file.
    """
    folder, domain = file.parent, file.parent.parent.name
    places = [root / place / domain / f"{folder.name}.json" for place in _OSWORLD_TASKS]
    task = next((place for place in (*places, folder / f"{folder.name}.json") if place.is_file()), None)
    if task is None:
        raise ConfigError(
            f"expected the instruction of OSWorld's task {domain}/{folder.name}, which results do not hold, in "
            f"{str(places[1])!r}, got no such file; copy OSWorld's folder evaluation_examples/examples there"
        )
    told, lines = as_row(_parse_json(str(task), task.read_text(encoding="utf-8"))), file.read_text(encoding="utf-8")
    result = folder / "result.txt"
    return {
        "osworld": [
            _parse_json(f"{file}, line {n}", line) for n, line in enumerate(lines.splitlines(), 1) if line.strip()
        ],
        "id": f"{domain}/{folder.name}",
        "instruction": told.get("instruction"),
        "result": result.read_text(encoding="utf-8").strip() if result.is_file() else None,
        "first": next((one.name for name in ("step_0*.png", "initial_state.png") for one in folder.glob(name)), None),
    }


def _read_json(file: Path) -> Iterator[tuple[str, object]]:
    if file.suffix == ".jsonl":
        try:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{file}, line {number}", _parse_json(f"{file}, line {number}", line)
        except (OSError, UnicodeDecodeError) as error:
            raise _no_json(str(file), error) from None
        return
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _no_json(str(file), error) from None
    content = _parse_json(str(file), text)
    values = content if is_array(content) and not is_conversation(content) else [content]
    for number, value in enumerate(values, start=1):
        parts = _questions(value) if is_row(value) and "conversations" in value else [value]
        for part in parts:
            yield f"{file}, trajectory {number}", part


def _questions(value: Row) -> list[Row]:
    """AGUVIS asks several questions about one picture, each a task of its own."""
    parts: list[list[Row]] = []
    for message in as_rows(value["conversations"]):
        if message.get("from") == "human":
            parts.append([])
        if parts:
            parts[-1].append(message)
    return [value | {"conversations": part, "question": number} for number, part in enumerate(parts, start=1)]


def _parse_json(place: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_json(place, error) from None


def _no_json(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"expected JSON in {place!r}, got {error}; correct path, or convert the file to JSON")


def is_conversation(value: object) -> TypeGuard[Sequence[Row]]:
    """Whether a list is one conversation of an API, not a list of trajectories."""
    first = value[0] if is_array(value) and value else None
    return (
        is_row(first)
        and not {"steps", "messages", "input", "contents"} & first.keys()
        and (bool({"role", "type"} & first.keys()))
    )

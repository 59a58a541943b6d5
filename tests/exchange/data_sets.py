"""Data sets in exactly the shapes that their publishers ship, with screenshots of ours; contents are made up."""

import gzip
import json
import struct
from base64 import b64decode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.exchange.files import draw
from tests.exchange.published import shot

Feature = Sequence[bytes] | Sequence[float] | Sequence[int]


def odyssey(*steps: tuple[str, object], size: tuple[int, int] = (192, 320)) -> dict[str, Any]:
    """An annotation as OpenGVLab/GUI-Odyssey, introduction.md and data/format_converter.py."""
    names = [f"7_{place}.png" for place in range(len(steps))]
    device = {"product": "sdk_gphone64", "release_version": "14", "sdk_version": "34", "w": size[0], "h": size[1]}
    task = {"category": "Web_Shopping", "app": ["Chrome"], "meta_task": "Buy {}.", "task": "Buy tea."}
    return {
        "episode_id": "7",
        "device_info": device | {"device_name": "Pixel 7 Pro"},
        "task_info": task | {"instruction": "Use Chrome to buy tea."},
        "step_length": len(steps),
        "steps": [
            {
                "step": place,
                "screenshot": names[place],
                "action": action,
                "info": info,
                "ps": "",
                "sam2_bbox": [],
                "low_level_instruction": f"Why {place}",
            }
            for place, (action, info) in enumerate(steps)
        ],
    }


def write_odyssey(folder: Path, episode: Mapping[str, Any], *pictures: bytes) -> Path:
    """The layout of the publisher's README after its preprocessing: annotations, screenshots and splits."""
    for name in ("annotations", "screenshots", "splits"):
        (folder / name).mkdir(parents=True)
    (folder / "annotations" / f"{episode['episode_id']}.json").write_text(json.dumps(episode))
    (folder / "splits" / "random_split.json").write_text(json.dumps({"train": ["7.json"], "test": []}))
    for place, step in enumerate(episode["steps"]):
        (folder / "screenshots" / step["screenshot"]).write_bytes(pictures[place] if pictures else draw(place))
    return folder


def agentnet(*codes: str, completed: object = True) -> dict[str, Any]:
    """A line as the card of xlangai/AgentNet, and as neulab/agent-data-protocol, datasets/agentnet/schema_raw.py."""
    return {
        "task_id": "20240927235321_5855063d",
        "instruction": "sort the table",
        "task_completed": completed,
        "alignment_score": 7,
        "efficiency_score": 6,
        "task_difficulty": 3,
        "natural_language_task": "Sort it.",
        "actual_task": "Sorts it.",
        "traj": [
            {
                "index": place,
                "image": f"step{place}.png",
                "value": {
                    "observation": "A table.",
                    "thought": f"Why {place}",
                    "action": "Click.",
                    "code": code,
                    "last_step_correct": True,
                    "last_step_redundant": False,
                    "reflection": None,
                },
            }
            for place, code in enumerate(codes)
        ],
    }


def aguvis(*questions: tuple[str, str], image: str = "a.png") -> dict[str, Any]:
    """An entry with the prompt of xlang-ai/aguvis, src/aguvis/constants.py, and the recipients of its template."""
    messages: list[dict[str, Any]] = [{"from": "system", "value": "You are a GUI agent."}]
    for asked, code in questions:
        messages += [
            {"from": "human", "value": f"<image>\n{asked}"},
            {"from": "gpt", "recipient": "all", "end_turn": False, "value": "Thought: Why\nAction: Click it.\n"},
            {"from": "gpt", "recipient": "os", "end_turn": True, "value": code},
        ]
    return {"image": image, "conversations": messages}


AGUVIS_STEP = """Please generate the next move according to the ui screenshot, instruction and previous actions.

Instruction: {}

Previous actions:
{}
"""


def write_mind2web(folder: Path, *rows: dict[str, Any]) -> Path:
    """Parquet with the columns and the feature Image of the card of osunlp/Multimodal-Mind2Web."""
    path = folder / "train-00000-of-00027.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def mind2web_row(
    index: int, box: str, op: str, *, value: str = "", task: str = "t1", original: str | None = None
) -> dict[str, Any]:
    """A row: boxes are "x,y,width,height" in JSON in a string in JSON in a string, as in the raw dump."""
    attributes = json.dumps({"backend_node_id": "1250", "bounding_box_rect": box, "class": "tab"})
    candidate = {"tag": "li", "attributes": attributes, "is_original_target": True, "is_top_level_target": True}
    return {
        "action_uid": f"{task}-{index}",
        "raw_html": "<html>",
        "cleaned_html": "<html>",
        "operation": json.dumps({"original_op": original or op, "value": value, "op": op}),
        "pos_candidates": [json.dumps(candidate)],
        "neg_candidates": [],
        "website": "united",
        "domain": "Travel",
        "subdomain": "Airlines",
        "annotation_id": task,
        "confirmed_task": "rent a car in Brooklyn",
        "screenshot": {"bytes": b64decode(shot(index)), "path": None},
        "action_reprs": ["[heading] CAR -> CLICK"],
        "target_action_index": str(index),
        "target_action_reprs": "[heading] CAR -> CLICK",
    }


def write_osworld(
    folder: Path, *actions: object, result: str | None = "1.0\n", first: str | None = None, **line: object
) -> Path:
    """A result folder as xlang-ai/OSWorld, lib_run_single.py writes it, and the task file that it was run from."""
    tasks, results = (
        folder / "examples" / "os",
        folder / "results" / "pyautogui" / "screenshot" / "m" / "os" / "94d95f96",
    )
    tasks.mkdir(parents=True)
    results.mkdir(parents=True)
    task = {"id": "94d95f96", "snapshot": "os", "instruction": "Install Spotify.", "config": [], "evaluator": {}}
    (tasks / "94d95f96.json").write_text(json.dumps(task))
    lines: list[str] = []
    for number, action in enumerate(actions, start=1):
        name = f"step_{number}_20240101@12000{number}.png"
        (results / name).write_bytes(draw(number))
        lines.append(
            json.dumps(
                {
                    "step_num": number,
                    "action_timestamp": f"20240101@12000{number}",
                    "action": action,
                    "reward": 0,
                    "done": number == len(actions),
                    "info": {},
                    "screenshot_file": name,
                    **line,
                }
            )
        )
    (results / "traj.jsonl").write_text("\n".join(lines) + "\n")
    if result is not None:
        (results / "result.txt").write_text(result)
    if first is not None:
        (results / first).write_bytes(draw(0))
    return folder


def varint(number: int) -> bytes:
    """https://protobuf.dev/programming-guides/encoding: seven bits in each byte, the last one without the top bit."""
    number &= 2**64 - 1
    head = bytearray()
    while number > 0x7F:
        head.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*head, number])


def field(number: int, data: bytes) -> bytes:
    """A field of wire type 2: its tag, its length, its bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(features: Mapping[str, Feature]) -> bytes:
    """The bytes of a tf.train.Example: tensorflow/core/example/feature.proto, written by hand."""
    entries = b""
    for name, values in features.items():
        match values[0] if values else b"":
            case bytes():
                told = field(1, b"".join(field(1, value) for value in values if isinstance(value, bytes)))
            case float():
                told = field(2, field(1, b"".join(struct.pack("<f", value) for value in values)))
            case _:
                told = field(3, field(1, b"".join(varint(int(value)) for value in values)))
        entries += field(1, field(1, name.encode()) + field(2, told))
    return field(1, entries)


def write_records(path: Path, *examples: bytes) -> Path:
    """A TFRecord file of compression type GZIP, framed by TensorBoard's writer."""
    writer = RecordWriter(framed := BytesIO())
    for one in examples:
        writer.write(one)
    path.write_bytes(gzip.compress(framed.getvalue()))
    return path


def write_many_records(path: Path, *examples: bytes) -> Path:
    """The same without checksums of the data, which take TensorBoard's writer a second per megabyte."""
    path.write_bytes(
        b"".join(
            (head := struct.pack("<Q", len(one))) + struct.pack("<I", masked_crc32c(head)) + one + bytes(4)
            for one in examples
        )
    )
    return path


def accessibility_tree(*windows: tuple[int, Sequence[tuple[tuple[int, int, int, int], Sequence[int]]]]) -> bytes:
    """An AndroidAccessibilityForest as google-deepmind/android_env, android_env/proto/a11y, written by hand.

    A window is its layer with nodes, a node its bounds with the numbers of its fields that are true.
    """

    def number(place: int, value: int) -> bytes:
        return varint(place << 3) + varint(value)

    def node(bounds: tuple[int, int, int, int], flags: Sequence[int]) -> bytes:
        rect = b"".join(number(side, value) for side, value in enumerate(bounds, start=1))
        name = field(3, b"android.widget.Button")
        return field(1, number(1, 7) + field(2, rect) + name + b"".join(number(flag, 1) for flag in flags))

    return b"".join(
        field(1, number(4, layer) + field(5, b"Chrome") + field(11, b"".join(node(*one) for one in nodes)))
        for layer, nodes in windows
    )


def android_control_example(*actions: dict[str, Any], size: tuple[int, int] = (192, 320), tree: bytes = b"") -> bytes:
    """An episode as google-research/google-research, android_control/README.md."""
    number = len(actions) + 1
    return example(
        {
            "episode_id": [7],
            "goal": [b"Buy tea."],
            "screenshots": [draw(place) for place in range(number)],
            "accessibility_trees": [tree] * number,
            "screenshot_widths": [size[0]] * number,
            "screenshot_heights": [size[1]] * number,
            "actions": [json.dumps(action).encode() for action in actions],
            "step_instructions": [f"Why {place}".encode() for place in range(len(actions))],
        }
    )


def wild_example(
    step: int, action: int, *, touch: tuple[float, float] = (-1.0, -1.0), lift: tuple[float, float] = (-1.0, -1.0),
    text: str = "", episode: str = "77", size: tuple[int, int] = (192, 320),
) -> bytes:  # fmt: skip
    """A step as google-research/google-research, android_in_the_wild/README.md: raw pixels, (y, x) as shares."""
    pixels = Image.open(BytesIO(draw(step))).resize(size).tobytes()
    return example(
        {
            "android_api_level": [30],
            "current_activity": [b"com.android.chrome/Main"],
            "device_type": [b"pixel_4"],
            "episode_id": [episode.encode()],
            "episode_length": [9],
            "goal_info": [b"buy tea"],
            "image/channels": [3],
            "image/height": [size[1]],
            "image/width": [size[0]],
            "image/encoded": [pixels],
            "image/ui_annotations_positions": [0.25, 0.5, 0.125, 0.25],
            "image/ui_annotations_text": [b"Tea"],
            "image/ui_annotations_ui_types": [b"TEXT"],
            "results/action_type": [action],
            "results/type_action": [text.encode()],
            "results/yx_touch": list(touch),
            "results/yx_lift": list(lift),
            "step_id": [step],
        }
    )

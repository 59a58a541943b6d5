"""Writes and reads rollouts as ATIF files, the Agent Trajectory Interchange Format of Harbor (RFC 0001, version 1.7).

    run.json                    the run, its steps and evaluations
    trajectories/000000.json    one rollout
    trajectories/images/<sha256>.png

Steps, tool calls, observations, tokens and log-probabilities are in the fields of the format; everything else is in
`extra.cua_rl`, so that an import restores the rollouts without loss.
"""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from cua_rl.exchange.records import RolloutRecord
from cua_rl.exchange.rows import EncodedRecord, Row, decode_images, read_json, write_json
from cua_rl.renderers.answers import parse_answer
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Turn

VERSION = "ATIF-v1.7"
_FOLDER = "trajectories"
_METRICS = {
    "prompt_token_ids": "prompt_token_ids",
    "completion_token_ids": "sampled_tokens",
    "logprobs": "sampling_logprobs",
}
"""Names of our tokens and log-probabilities in the format."""
_IMAGE_NAME = re.compile(r"images/[0-9a-f]{64}\.(png|jpeg)")
"""Names of images in a file are untrusted: they must not lead to other files."""


class AtifWriter:
    """Writes a file per rollout; a context manager."""

    def __init__(self, folder: Path, run: Row) -> None:
        self._folder = folder
        self._run = run
        self._num_files = 0

    def write(self, record: RolloutRecord, encoded: EncodedRecord) -> None:
        for image in encoded.images:
            path = self._folder / _FOLDER / _image_path(image)
            if not path.exists():
                path.write_bytes(image.data)
        path = self._folder / _FOLDER / f"{self._num_files:06d}.json"
        path.write_text(write_json(_trajectory(record, encoded, str(self._run["run_name"]))), encoding="utf-8")
        self._num_files += 1

    def __enter__(self) -> Self:
        (self._folder / _FOLDER / "images").mkdir(parents=True)
        (self._folder / "run.json").write_text(write_json(self._run), encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        return


def _image_path(image: EncodedImage) -> str:
    return f"images/{image.sha256}.{image.format}"


def _trajectory(record: RolloutRecord, encoded: EncodedRecord, run_name: str) -> Row:
    rollout = record.rollout
    shown, tools = None, None
    if rollout.turns:
        shown, tools = rollout.turns[0].agent.before, rollout.turns[0].model.request.get("tools")
    steps: list[Row] = [{"step_id": 1, "source": "user", "message": _content(record.task.instruction, shown)}]
    for place, (turn, row) in enumerate(zip(rollout.turns, encoded.row["turns"], strict=True), start=2):
        step = _agent_step(turn, place, row["prompt_token_ids"])
        steps.append(step | {"is_copied_context": True} if turn.index < rollout.fork_turn else step)
    names = tuple(_METRICS.values())
    turns = [{key: value for key, value in turn.items() if key not in names} for turn in encoded.row["turns"]]
    return {
        "schema_version": VERSION,
        "session_id": rollout.rollout_id,
        "agent": {"name": "cua_rl", "version": "1", "model_name": run_name, "tool_definitions": tools},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.model.prompt.length for turn in rollout.own_turns),
            "total_completion_tokens": sum(len(turn.model.sampled_tokens) for turn in rollout.own_turns),
            "total_steps": len(steps),
        },
        "extra": {
            "reward": encoded.row["reward"],
            "success": encoded.row["success"],
            "cua_rl": {**encoded.row, "turns": turns, "files": [_image_path(image) for image in encoded.images]},
        },
    }


def _agent_step(turn: Turn, step_id: int, prompt_token_ids: list[int]) -> Row:
    model, agent = turn.model, turn.agent
    answer = parse_answer(model.text)
    calls = [
        {
            "tool_call_id": f"{turn.index}-{call.call_id}",
            "function_name": call.name,
            "arguments": json.loads(call.arguments),
        }
        for call in answer.tool_calls
    ]
    step: Row = {
        "step_id": step_id,
        "timestamp": datetime.fromtimestamp(model.started_at, UTC).isoformat(),
        "source": "agent",
        "model_name": f"policy-{model.policy_version:06d}",
        "message": answer.text,
        "metrics": {
            "prompt_tokens": model.prompt.length,
            "completion_tokens": len(model.sampled_tokens),
            "cached_tokens": model.cached_tokens,
            "prompt_token_ids": prompt_token_ids,
            "completion_token_ids": list(model.sampled_tokens),
            "logprobs": list(model.sampling_logprobs),
        },
    }
    if answer.reasoning is not None:
        step["reasoning_content"] = answer.reasoning
    if calls:
        step["tool_calls"] = calls
    if calls and (agent.after is not None or agent.action_error is not None):
        content = _content(agent.action_error or "", agent.after)
        step["observation"] = {"results": [{"source_call_id": calls[0]["tool_call_id"], "content": content}]}
    return step


def _content(text: str, image: EncodedImage | None) -> str | list[Row]:
    if image is None:
        return text
    parts: list[Row] = [{"type": "text", "text": text}] if text else []
    source = {"media_type": f"image/{image.format}", "path": _image_path(image)}
    return [*parts, {"type": "image", "source": source}]


def read_atif(folder: Path) -> Iterator[EncodedRecord]:
    """The rollouts that `AtifWriter` wrote; raises `ConfigError` for a file of something else."""
    for path in sorted((folder / _FOLDER).glob("*.json")):
        trajectory = read_json(path.read_text(encoding="utf-8"))
        row: Row | None = trajectory.get("extra", {}).get("cua_rl")
        if row is None:
            raise ConfigError(
                f"expected extra.cua_rl in {str(path)!r}, which recipes.export_trajectories wrote, got none; export "
                "the run again, or remove run.json to import the files as trajectories of others"
            )
        steps: list[Any] = [step for step in trajectory["steps"] if step["source"] == "agent"]
        for turn, step in zip(row["turns"], steps, strict=True):
            turn |= {ours: step["metrics"][theirs] for theirs, ours in _METRICS.items()}
        names: list[str] = row.pop("files")
        if strange := [name for name in names if not _IMAGE_NAME.fullmatch(name)]:
            raise ConfigError(f"expected images called images/<sha256>.png in {str(path)!r}, got {strange[0]!r}")
        files = [(folder / _FOLDER / name).read_bytes() for name in names]
        yield EncodedRecord(row=row, images=decode_images(row, files))

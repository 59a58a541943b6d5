"""Encodes records as JSON without loss, for Parquet and ATIF files, which hold tokens and images separately.

A row refers to images by their index in the rollout's list. `write_json` escapes text that is not valid Unicode and
numbers that JSON lacks, as the database does (`cua_rl.database.columns`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeGuard

from cua_rl.database.columns import (
    decode_action,
    decode_more_actions,
    decode_prompt,
    encode_actions,
    encode_prompt_chunks,
    escape_json,
    unescape_json,
)
from cua_rl.exchange.records import ReplayRecord, RolloutRecord, RunRecord, SourceRecord, TaskRecord
from cua_rl.renderers.images import image_size
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.json_values import is_array
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import AgentTurn, ModelTurn, Reward, Rollout, StopReason, Turn

Row = dict[str, Any]


def is_row(value: object) -> TypeGuard[Row]:
    return isinstance(value, dict)


def _are_rows(value: object) -> TypeGuard[Sequence[Row]]:
    return is_array(value) and all(map(is_row, value))


def as_row(value: object) -> Row:
    """A JSON object; raises `TypeError` for anything else."""
    if not is_row(value):
        raise TypeError(f"expected an object, got {value!r}")
    return value


def as_rows(value: object) -> Sequence[Row]:
    """An array of JSON objects; raises `TypeError` for anything else."""
    if not _are_rows(value):
        raise TypeError(f"expected a list of objects, got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecord:
    """A rollout as a JSON object, and its images, each once."""

    row: Row
    images: tuple[EncodedImage, ...]


def encode_record(record: RolloutRecord, image_token_id: int) -> EncodedRecord:
    """The inverse is `decode_record`."""
    rollout = record.rollout
    images: dict[str, EncodedImage] = {}
    for turn in rollout.turns:
        seen = (*turn.model.prompt.images, turn.agent.before, turn.agent.after)
        images |= {image.sha256: image for image in seen if image is not None and image.sha256 not in images}
    places = {sha: place for place, sha in enumerate(images)}
    logprobs = record.training_logprobs or (None,) * len(rollout.turns)
    row: Row = {
        **{name: getattr(record, name) for name in ("phase", "step", "group_id", "advantage")},
        "turn_advantages": list(record.turn_advantages),
        "task": asdict(record.task),
        **{name: getattr(rollout, name) for name in (*_PLAIN, *_ORIGIN)},
        "stop_reason": str(rollout.stop_reason),
        "images": [[image.format, image.width_px, image.height_px] for image in images.values()],
        "success": None if rollout.validation is None else rollout.validation.success,
        "reward": None if rollout.reward is None else rollout.reward.total,
        "reward_parts": None if rollout.reward is None else dict(rollout.reward.parts),
        "turn_rewards": [] if rollout.reward is None else list(rollout.reward.of_turns),
        "validation": None if rollout.validation is None else asdict(rollout.validation),
        "judgement": None if rollout.judgement is None else asdict(rollout.judgement),
        "turns": [
            _encode_turn(turn, places, image_token_id) | {"training_logprobs": None if seen is None else list(seen)}
            for turn, seen in zip(rollout.turns, logprobs, strict=True)
        ],
    }
    return EncodedRecord(row=row, images=tuple(images.values()))


_PLAIN = (
    *("rollout_id", "task_id", "seed", "group_index", "member_index", "device_id", "answer", "error", "started_at"),
    *("duration_s", "max_turns"),
)
_ORIGIN: Row = {"parent_id": None, "fork_turn": 0}  # of files of earlier versions, which lack both
_PLAIN_MODEL = (
    *("response_id", "policy_version", "stop", "text", "prompt_matches_renderer", "started_at", "duration_s"),
    "cached_tokens",
)


def _encode_turn(turn: Turn, places: Mapping[str, int], image_token_id: int) -> Row:
    model, agent = turn.model, turn.agent
    chunks = [
        {**chunk, "image": places[str(chunk["image"])]} if "image" in chunk else chunk
        for chunk in encode_prompt_chunks(model.prompt)
    ]
    return {
        "index": turn.index,
        **{name: getattr(model, name) for name in _PLAIN_MODEL},
        "prompt_token_ids": model.prompt.token_ids(image_token_id),
        "prompt_chunks": chunks,
        "sampled_tokens": list(model.sampled_tokens),
        "sampling_logprobs": list(model.sampling_logprobs),
        "failure": None if model.failure is None else asdict(model.failure),
        "request": model.request,
        "grammar": model.grammar,
        "agent_response_id": agent.response_id,
        "action": encode_actions(agent.action, agent.more_actions),
        "action_error": agent.action_error,
        "state": turn.state,
        "target_box": list(agent.target_box),
        "before": None if agent.before is None else places[agent.before.sha256],
        "after": None if agent.after is None else places[agent.after.sha256],
        "durations_s": dict(agent.durations_s),
    }


def decode_record(encoded: EncodedRecord) -> RolloutRecord:
    """The inverse of `encode_record`; raises `KeyError`, `TypeError` or `ValueError` for something else."""
    row = encoded.row
    turns = as_rows(row["turns"])
    judgement: Row | None = row["judgement"]
    if judgement is not None:
        judgement = {**judgement, "votes": tuple(JudgeVote(**vote) for vote in judgement["votes"])}
    return RolloutRecord(
        **{name: row[name] for name in ("phase", "step", "group_id", "advantage")},
        turn_advantages=tuple(row.get("turn_advantages", ())),  # files of earlier versions have none
        task=_decode_task(row["task"]),
        rollout=Rollout(
            **{name: row[name] for name in _PLAIN},
            **{name: row.get(name, without) for name, without in _ORIGIN.items()},
            turns=tuple(_decode_turn(turn, encoded.images) for turn in turns),
            stop_reason=StopReason(row["stop_reason"]),
            validation=None if row["validation"] is None else Validation(**row["validation"]),
            reward=None
            if row["reward"] is None
            else Reward(total=row["reward"], parts=row["reward_parts"], of_turns=tuple(row.get("turn_rewards", ()))),
            judgement=None if judgement is None else Judgement(**judgement),
        ),
        training_logprobs=tuple(
            None if turn["training_logprobs"] is None else tuple(turn["training_logprobs"]) for turn in turns
        ),
    )


def _decode_turn(row: Row, images: Sequence[EncodedImage]) -> Turn:
    by_place = {str(place): image for place, image in enumerate(images)}
    failure: Row | None = row["failure"]
    before: int | None = row["before"]
    after: int | None = row["after"]
    return Turn(
        index=row["index"],
        model=ModelTurn(
            **{name: row[name] for name in _PLAIN_MODEL},
            prompt=decode_prompt(row["prompt_token_ids"], row["prompt_chunks"], by_place),
            sampled_tokens=tuple(row["sampled_tokens"]),
            sampling_logprobs=tuple(row["sampling_logprobs"]),
            failure=None if failure is None else ParseFailure(**failure),
            request=row["request"],
            grammar=row.get("grammar", ""),  # files of earlier versions have none
        ),
        agent=AgentTurn(
            response_id=row["agent_response_id"],
            before=None if before is None else images[before],
            action=None if row["action"] is None else decode_action(row["action"]),
            action_error=row["action_error"],
            after=None if after is None else images[after],
            durations_s=row["durations_s"],
            more_actions=decode_more_actions(row["action"]),
            target_box=tuple(row.get("target_box", ())),  # files of earlier versions have none
        ),
        state=row.get("state", ""),
    )


def decode_images(row: Row, files: Sequence[bytes]) -> tuple[EncodedImage, ...]:
    """The images of a row, whose bytes are in separate files; raises `ValueError` if they are not what it says."""
    if unknown := {kind for kind, _, _ in row["images"]} - {"png", "jpeg"}:
        # the monitor sends images with this type, and a browser would run the scripts of an SVG
        raise ValueError(f"expected images that are png or jpeg, got {sorted(map(str, unknown))}")
    images: list[EncodedImage] = []
    for data, (kind, *claimed) in zip(files, row["images"], strict=True):
        width_px, height_px = image_size(data)
        if [width_px, height_px] != claimed:  # the number of a prompt's image tokens follows from it
            raise ValueError(f"expected an image of {claimed} pixels, got one of {width_px} x {height_px}")
        images.append(EncodedImage(data=data, format=kind, width_px=width_px, height_px=height_px))
    return tuple(images)


def write_json(value: object) -> str:
    """JSON that every reader takes; the inverse is `read_json`."""
    return json.dumps(escape_json(value), allow_nan=False)


def read_json(text: str) -> Row:
    """The inverse of `write_json`; raises `ValueError`."""
    return as_row(unescape_json(json.loads(text)))


def encode_run(run: RunRecord) -> Row:
    """The inverse is `decode_run`."""
    return asdict(run)


def decode_run(row: Row) -> RunRecord:
    """The inverse of `encode_run`; raises `KeyError`, `TypeError` or `ValueError` for something else."""
    known: Row = {one.name: row[one.name] for one in fields(RunRecord)}
    known["sources"] = tuple(map(_decode_source, row["sources"]))
    return RunRecord(**known)


def _decode_source(row: Row) -> SourceRecord:
    known: Row = {**row, "tasks": tuple(map(_decode_task, row["tasks"]))}
    replays: list[Row] = [{**one, "turn_advantages": tuple(one.get("turn_advantages", ()))} for one in row["replays"]]
    known["replays"] = tuple(ReplayRecord(**replay) for replay in replays)
    return SourceRecord(**known)


def _decode_task(row: Row) -> TaskRecord:
    known: Row = {**row, "tags": tuple(row["tags"])}
    return TaskRecord(**known)

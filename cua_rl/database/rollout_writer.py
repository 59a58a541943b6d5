"""Rollouts as rows: what is known when they start, and the rest when their group ends.

A few statements write many rollouts, because most of a statement's cost does not depend on its size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.judge_models import JudgementRow, JudgePrompt
from cua_rl.database.models import Environment, RolloutRow, StatusChange, TurnRow, ValidationRow
from cua_rl.database.rows import Scope, advance_statuses
from cua_rl.database.turn_writer import insert_turns, keep_costs
from cua_rl.events import RolloutStarted
from cua_rl.types.errors import DatabaseError
from cua_rl.types.judgement import Judgement, Validation
from cua_rl.types.rollout import Rollout, StopReason

_INSERT_DEVICE = insert(Environment).on_conflict_do_nothing(index_elements=["rollout_pk"])
_RELEASE_DEVICE = update(Environment).where(Environment.rollout_pk == bindparam("key"), Environment.status == "running")
_INSERT_ROLLOUT = insert(RolloutRow).on_conflict_do_nothing().returning(RolloutRow.rollout_id, RolloutRow.id)
_INSERT_PROMPT = insert(JudgePrompt).on_conflict_do_nothing()
_OF_JUDGEMENT = (
    *("prompt_sha256", "model", "screenshots", "decides", "success", "score", "reason", "agreement", "cost_usd"),
    "duration_s",
)
_INSERT_JUDGEMENT = insert(JudgementRow).on_conflict_do_nothing(index_elements=["rollout_pk"])
_NEW_VALIDATION = insert(ValidationRow)
_OF_VALIDATION = ("query", "expected", "actual", "success", "duration_s")
_PUT_VALIDATION = _NEW_VALIDATION.on_conflict_do_update(
    index_elements=["rollout_pk"], set_={name: _NEW_VALIDATION.excluded[name] for name in _OF_VALIDATION}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The group that a rollout belongs to, and the task instance of both."""

    group_pk: int
    task: Mapping[str, object]  # task_pk, task_id, seed


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """A rollout whose group has ended; `position` counts the members with a reward, or those without."""

    parent: Parent
    rollout: Rollout
    position: int
    advantage: float | None
    turn_advantages: tuple[float, ...] = ()


def start_rollouts(
    connection: Connection, scope: Scope, starts: Sequence[tuple[RolloutStarted, datetime]], parents: Sequence[Parent]
) -> None:
    """Insert running rollouts with their devices; existing rows stay unchanged."""
    rows = [_running_values(event, parent, at) for (event, at), parent in zip(starts, parents, strict=True)]
    keys = ensure_rollouts(connection, scope.require_training(), rows)
    devices = [
        {"rollout_pk": keys[event.rollout_id], "device_id": event.device_id, "status": "running", "started_at": at}
        for event, at in starts
    ]
    connection.execute(_INSERT_DEVICE, devices)


def complete_rollouts(connection: Connection, scope: Scope, ended: Sequence[EndedRollout], at: datetime) -> None:
    """Complete rollouts with turns, validations and devices; those never started are inserted."""
    if not ended:
        return
    rows = [_running_values(member.rollout, member.parent, _started_at(member.rollout)) for member in ended]
    keys = ensure_rollouts(connection, scope.require_training(), rows)
    members = {keys[member.rollout.rollout_id]: member for member in ended}
    query = select(TurnRow.rollout_pk, TurnRow.turn_index).where(TurnRow.rollout_pk.in_(members))
    stored = {(row.rollout_pk, row.turn_index) for row in connection.execute(query)}
    turns = [(key, turn) for key, member in members.items() for turn in member.rollout.turns]
    insert_turns(connection, scope, [(key, turn) for key, turn in turns if (key, turn.index) not in stored])
    rollouts = [(key, member.rollout) for key, member in members.items()]
    write_validations(connection, {key: one.validation for key, one in rollouts if one.validation is not None})
    insert_judgements(connection, {key: one.judgement for key, one in rollouts if one.judgement is not None})
    num_stored = Counter(key for key, _ in stored)  # of a lost worker's rollout, the only turns that are known
    ends = {key: _end_values(member, num_stored[key]) for key, member in members.items()}
    advance_statuses(connection, RolloutRow, ends, at)
    released: list[dict[str, object]] = []
    for key, rollout in rollouts:
        is_broken = rollout.stop_reason is StopReason.DEVICE_ERROR
        status, error = ("failed", rollout.error) if is_broken else ("released", None)
        released.append({"key": key, "status": status, "error": error, "ended_at": at})
    connection.execute(_RELEASE_DEVICE, released)
    keep_costs(connection, members)


def cancel_rollouts(connection: Connection, at: datetime, which: ColumnElement[bool]) -> None:
    """Cancel those of some rollouts that still run: their end will not be reported."""
    keys = connection.scalars(select(RolloutRow.id).where(which, RolloutRow.status == "running")).all()
    if keys:
        advance_statuses(connection, RolloutRow, {key: {"status": "cancelled", "ended_at": at} for key in keys}, at)
        released = {"status": "released", "error": None, "ended_at": at}
        connection.execute(_RELEASE_DEVICE, [{"key": key, **released} for key in keys])
        keep_costs(connection, keys)


def ensure_rollouts(connection: Connection, training_id: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Insert new rollouts as running; returns the key of each rollout by its id."""
    rollout_ids = [row["rollout_id"] for row in rows]
    query = select(RolloutRow.rollout_id, RolloutRow.id, RolloutRow.group_pk).where(
        RolloutRow.training_id == training_id, RolloutRow.rollout_id.in_(rollout_ids)
    )
    found = {row.rollout_id: row for row in connection.execute(query)}
    new: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        rollout_id = row["rollout_id"]
        known = found[rollout_id].group_pk if rollout_id in found else new.setdefault(rollout_id, row)["group_pk"]
        if known != row["group_pk"]:
            raise DatabaseError(
                f"expected rollout ids to be unique in a training, got {rollout_id!r} in two groups; "
                "make a new id for every attempt"
            )
    keys = {rollout_id: row.id for rollout_id, row in found.items()}
    if new:
        values = [{"training_id": training_id, "status": "running", **row} for row in new.values()]
        inserted = {row.rollout_id: row.id for row in connection.execute(_INSERT_ROLLOUT, values)}
        changes = [
            {"rollout_pk": key, "new_status": "running", "changed_at": new[rollout_id]["started_at"]}
            for rollout_id, key in inserted.items()
        ]
        if changes:
            connection.execute(insert(StatusChange), changes)
        keys |= inserted
        if len(keys) < len(set(rollout_ids)):  # a worker that was given up has inserted one meanwhile
            keys = {row.rollout_id: row.id for row in connection.execute(query)}
    return keys


def _running_values(member: RolloutStarted | Rollout, parent: Parent, started_at: datetime) -> dict[str, Any]:
    return {
        "group_pk": parent.group_pk,
        **parent.task,
        "rollout_id": member.rollout_id,
        "group_index": member.group_index,
        "member_index": member.member_index,
        "device_id": member.device_id,
        "worker": member.worker,
        "parent_id": member.parent_id,
        "fork_turn": member.fork_turn,
        "max_turns": member.max_turns,
        "started_at": started_at,
    }


def _started_at(rollout: Rollout) -> datetime:
    return datetime.fromtimestamp(rollout.started_at, UTC)


def _end_values(member: EndedRollout, num_stored: int) -> dict[str, object]:
    rollout, reward = member.rollout, member.rollout.reward
    started_at = _started_at(rollout)
    return {
        "status": "failed" if rollout.stop_reason.is_fault else "completed",
        "device_id": rollout.device_id,
        "position": member.position,
        "num_turns": max(num_stored, len(rollout.turns)),
        "stop_reason": rollout.stop_reason.value,
        "answer": rollout.answer,
        "error": rollout.error,
        "success": rollout.success,
        "reward": None if reward is None else reward.total,
        "reward_parts": None if reward is None else reward.parts,
        "turn_rewards": None if reward is None else list(reward.of_turns) or None,
        "advantage": member.advantage,
        "turn_advantages": list(member.turn_advantages) or None,
        "started_at": started_at,
        "started_unix_s": rollout.started_at,
        "duration_s": rollout.duration_s,
        "ended_at": started_at + timedelta(seconds=rollout.duration_s),
    }


def write_validations(connection: Connection, validations: Mapping[int, Validation]) -> None:
    """Insert or replace validator results, by the rollout's key."""
    if not validations:
        return
    rows = [
        {"rollout_pk": key, **{name: getattr(found, name) for name in _OF_VALIDATION}}
        for key, found in validations.items()
    ]
    connection.execute(_PUT_VALIDATION, rows)


def insert_judgements(connection: Connection, judgements: Mapping[int, Judgement]) -> None:
    """Insert judgements, by the rollout's key, and each prompt once; existing rows stay unchanged."""
    if not judgements:
        return
    prompts = {judgement.prompt_sha256: judgement.prompt for judgement in judgements.values()}
    connection.execute(_INSERT_PROMPT, [{"sha256": digest, "text": prompts[digest]} for digest in sorted(prompts)])
    rows = [
        {
            "rollout_pk": key,
            **{name: getattr(judgement, name) for name in _OF_JUDGEMENT},
            "votes": [asdict(vote) for vote in judgement.votes],
            "num_prompt_tokens": sum(vote.num_prompt_tokens for vote in judgement.votes),
            "num_answer_tokens": sum(vote.num_answer_tokens for vote in judgement.votes),
        }
        for key, judgement in judgements.items()
    ]
    connection.execute(_INSERT_JUDGEMENT, rows)

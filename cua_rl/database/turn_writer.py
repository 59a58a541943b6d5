"""Turns and their images as rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, bindparam, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.columns import encode_actions, encode_prompt_chunks
from cua_rl.database.models import RolloutRow, Screenshot, TurnRow
from cua_rl.database.rows import Scope
from cua_rl.database.screenshots import open_store
from cua_rl.events import TurnTaken
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DatabaseError
from cua_rl.types.rollout import Turn

_INSERT_TURN = insert(TurnRow).on_conflict_do_nothing(index_elements=["rollout_pk", "turn_index"])
_NEW_IMAGE = insert(Screenshot)
_INSERT_IMAGE = _NEW_IMAGE.on_conflict_do_update(
    index_elements=["sha256"],
    set_={name: _NEW_IMAGE.excluded[name] for name in ("data", "size_bytes", "width_px", "height_px")}
    | {"removed_at": None},
    where=or_(Screenshot.width_px.is_(None), Screenshot.removed_at.is_not(None)),
)
_INSERT_SHOWN = text("""
INSERT INTO rollout_images (rollout_pk, sha256)
SELECT * FROM unnest(CAST(:keys AS bigint[]), CAST(:hashes AS text[])) ON CONFLICT DO NOTHING
""")
_KEEP_EXTREMES = text("""
UPDATE rollouts SET (max_gap, max_log_ratio, min_logprob, num_trained_tokens) = (
    SELECT max(abs(trained - sampled)), max(trained - sampled), min(sampled), nullif(count(trained), 0)
    FROM turns, unnest(training_logprobs, sampling_logprobs) AS token (trained, sampled)
    WHERE turns.rollout_pk = rollouts.id AND training_logprobs IS NOT NULL)
WHERE id = ANY(CAST(:keys AS bigint[]))
""")
_KEEP_COSTS = text("""
UPDATE rollouts SET
    (num_prompt_tokens, num_cached_tokens, num_sampled_tokens, sampling_s) = (
        SELECT coalesce(sum(cardinality(prompt_token_ids)), 0), coalesce(sum(cached_tokens), 0),
            coalesce(sum(cardinality(sampled_tokens)), 0), coalesce(sum(duration_s), 0)
        FROM turns WHERE turns.rollout_pk = rollouts.id AND turn_index >= fork_turn),
    device_s = (
        SELECT greatest(0, extract(epoch FROM rollouts.ended_at - used.started_at) - coalesce(judged.duration_s, 0))
        FROM environments used LEFT JOIN judgements judged ON judged.rollout_pk = used.rollout_pk
        WHERE used.rollout_pk = rollouts.id)
WHERE id = ANY(CAST(:keys AS bigint[])) AND status <> 'running'
""")
_COUNT_TURNS = (
    update(RolloutRow)
    .where(RolloutRow.id == bindparam("rollout_pk"))
    .values(num_turns=func.greatest(RolloutRow.num_turns, bindparam("turn_count")))
)


def write_turns(connection: Connection, scope: Scope, events: Sequence[TurnTaken]) -> None:
    """Insert turns of started rollouts, with new screenshots: a statement costs about the same for many."""
    rollout_ids = {event.rollout_id for event in events}
    query = select(RolloutRow.rollout_id, RolloutRow.id).where(
        RolloutRow.training_id == scope.require_training(), RolloutRow.rollout_id.in_(sorted(rollout_ids))
    )
    keys = {row.rollout_id: row.id for row in connection.execute(query)}
    missing = rollout_ids - keys.keys()
    if missing:
        raise DatabaseError(f"expected rollout {min(missing)!r} to have started before its turns, got no row")
    insert_turns(connection, scope, [(keys[event.rollout_id], event.turn) for event in events])
    counts: dict[int, int] = {}
    for event in events:
        counts[keys[event.rollout_id]] = max(counts.get(keys[event.rollout_id], 0), event.turn.index + 1)
    count_turns(connection, counts)


def count_turns(connection: Connection, counts: Mapping[int, int]) -> None:
    """Raise the number of turns of rollouts, by their keys."""
    connection.execute(_COUNT_TURNS, [{"rollout_pk": key, "turn_count": count} for key, count in counts.items()])


def keep_extremes(connection: Connection, rollout_pks: Iterable[int]) -> None:
    """Keep the extremes and the number of trained tokens of rollouts whose log-probabilities have changed."""
    connection.execute(_KEEP_EXTREMES, {"keys": sorted(rollout_pks)})


def keep_costs(connection: Connection, rollout_pks: Iterable[int]) -> None:
    """Keep what those rollouts used that have ended."""
    connection.execute(_KEEP_COSTS, {"keys": sorted(rollout_pks)})


def insert_turns(connection: Connection, scope: Scope, turns: Sequence[tuple[int, Turn]]) -> None:
    """Insert turns, each with its rollout's key; existing rows stay unchanged."""
    if not turns:
        return
    shown = {
        (key, image.sha256): image
        for key, turn in turns
        for image in (*turn.model.prompt.images, turn.agent.before, turn.agent.after)
        if image is not None
    }
    insert_images(connection, shown.values())
    keys, hashes = [key for key, _ in sorted(shown)], [digest for _, digest in sorted(shown)]
    connection.execute(_INSERT_SHOWN, {"keys": keys, "hashes": hashes})
    columns = [
        {"rollout_pk": rollout_pk, "turn_index": turn.index, **turn_columns(turn, scope.image_token_id)}
        for rollout_pk, turn in turns
    ]
    connection.execute(_INSERT_TURN, columns)


def turn_columns(turn: Turn, image_token_id: int) -> dict[str, Any]:
    """The columns of a turn, without its keys."""
    model = turn.model
    failure = model.failure
    return {
        "response_id": model.response_id,
        "prompt_token_ids": model.prompt.token_ids(image_token_id),
        "prompt_chunks": encode_prompt_chunks(model.prompt),
        "sampled_tokens": list(model.sampled_tokens),
        "sampling_logprobs": list(model.sampling_logprobs),
        "policy_version": model.policy_version,
        "stop": model.stop,
        "text": model.text,
        "failure_kind": None if failure is None else failure.kind,
        "failure_message": None if failure is None else failure.message,
        "prompt_matches_renderer": model.prompt_matches_renderer,
        "request": model.request,
        "grammar": model.grammar or None,
        "cached_tokens": model.cached_tokens,
        "started_at": datetime.fromtimestamp(model.started_at, UTC),
        "started_unix_s": model.started_at,
        "duration_s": model.duration_s,
        "durations_s": dict(turn.agent.durations_s),
        "action": encode_actions(turn.agent.action, turn.agent.more_actions),
        "action_error": turn.agent.action_error,
        "state": turn.state or None,
        "target_box": list(turn.agent.target_box) or None,
        "before_sha256": None if turn.agent.before is None else turn.agent.before.sha256,
        "after_sha256": None if turn.agent.after is None else turn.agent.after.sha256,
    }


def insert_images(connection: Connection, images: Iterable[EncodedImage]) -> None:
    """Send only the bytes that are not stored: a prompt repeats every earlier screenshot.

    Those that are stored are locked, so that `prune` leaves them alone until what shows them is committed.
    """
    distinct = {image.sha256: image for image in images}
    is_whole = (Screenshot.width_px.is_not(None), Screenshot.removed_at.is_(None))
    query = select(Screenshot.sha256).where(Screenshot.sha256.in_(sorted(distinct)), *is_whole)
    # in one order everywhere, so that two runs cannot wait for each other
    locked = query.order_by(Screenshot.sha256).with_for_update(read=True, key_share=True)
    wanted = [distinct[digest] for digest in sorted(distinct.keys() - set(connection.scalars(locked)))]
    if not wanted:
        return
    rows = [asdict(image) | {"size_bytes": len(image.data)} for image in wanted]
    store = open_store()
    if store is not None:
        store.write({image.sha256: image.data for image in wanted})
        rows = [row | {"data": None} for row in rows]
    connection.execute(_INSERT_IMAGE, rows)

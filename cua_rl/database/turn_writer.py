"""A turn and its images as rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.conversation import ImageFormat
from cua_rl.database.encoding import encode_action, encode_prompt_chunks
from cua_rl.database.models import RolloutRow, Screenshot, TurnRow
from cua_rl.database.rows import Scope
from cua_rl.errors import DatabaseError
from cua_rl.types import Turn

_INSERT_TURN = insert(TurnRow).on_conflict_do_nothing(index_elements=["rollout_pk", "turn_index"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    sha256: str
    data: bytes
    format: ImageFormat
    width_px: int | None = None
    height_px: int | None = None


def write_turn(connection: Connection, scope: Scope, rollout_id: str, turn: Turn) -> None:
    """Insert one turn of a rollout that has started, with the screenshots that are not there yet."""
    rollout_pk = connection.scalar(
        select(RolloutRow.id).where(
            RolloutRow.training_id == scope.require_training(), RolloutRow.rollout_id == rollout_id
        )
    )
    if rollout_pk is None:
        raise DatabaseError(f"expected rollout {rollout_id!r} to have started before turn {turn.index}, got no row")
    insert_turn(connection, scope, rollout_pk, turn)
    connection.execute(
        update(RolloutRow)
        .where(RolloutRow.id == rollout_pk)
        .values(num_turns=func.greatest(RolloutRow.num_turns, turn.index + 1))
    )


def insert_turn(connection: Connection, scope: Scope, rollout_pk: int, turn: Turn) -> None:
    """Insert the rows of one turn; those that are there stay as they are."""
    _insert_images(connection, turn)
    model = turn.model
    failure = model.failure
    connection.execute(
        _INSERT_TURN,
        {
            "rollout_pk": rollout_pk,
            "turn_index": turn.index,
            "response_id": model.response_id,
            "prompt_token_ids": model.prompt.token_ids(scope.image_token_id),
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
            "cached_tokens": model.cached_tokens,
            "started_at": datetime.fromtimestamp(model.started_at, UTC),
            "started_unix_s": model.started_at,
            "duration_s": model.duration_s,
            "durations_s": turn.durations_s,
            "action": None if turn.action is None else encode_action(turn.action),
            "action_error": turn.action_error,
            "before_sha256": turn.before.sha256,
            "after_sha256": None if turn.after is None else turn.after.sha256,
        },
    )


def _images(turn: Turn) -> Iterator[_Image]:
    for chunk in turn.model.prompt.images:
        yield _Image(sha256=chunk.sha256, data=chunk.data, format=chunk.format)
    for seen in (turn.before, turn.after):
        if seen is not None:
            yield _Image(
                sha256=seen.sha256, data=seen.png, format="png", width_px=seen.width_px, height_px=seen.height_px
            )


def _insert_images(connection: Connection, turn: Turn) -> None:
    """Send only the bytes that the database does not have: a prompt repeats every earlier screenshot."""
    images = {image.sha256: image for image in _images(turn)}
    query = select(Screenshot.sha256, Screenshot.width_px).where(Screenshot.sha256.in_(list(images)))
    stored = {row.sha256: row.width_px for row in connection.execute(query)}
    wanted = {
        sha
        for sha, image in images.items()
        if sha not in stored or (stored[sha] is None and image.width_px is not None)
    }
    for sha in sorted(wanted):  # in one order everywhere, so that two runs cannot wait for each other
        image = images[sha]
        statement = insert(Screenshot).values(
            sha256=sha, data=image.data, format=image.format, width_px=image.width_px, height_px=image.height_px
        )
        size = {"width_px": statement.excluded.width_px, "height_px": statement.excluded.height_px}
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["sha256"],
                set_=size,
                where=Screenshot.width_px.is_(None) & statement.excluded.width_px.is_not(None),
            )
        )

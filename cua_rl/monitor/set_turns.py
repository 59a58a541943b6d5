"""Single turns of a set of rollouts: outlying tokens, and where rollouts acted on the first screen they share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Any, Literal

from sqlalchemy import Double, cast, func, select

from cua_rl.database.models import RolloutRow, Screenshot, Training, TurnRow
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import AnySelect
from cua_rl.monitor.figures import columns
from cua_rl.monitor.rollout_schemas import ScreenshotRef
from cua_rl.monitor.rollout_sets import VERDICT, RolloutFilter, RunsOfDatabase, conditions, is_own_turn
from cua_rl.monitor.token_texts import find_token_texts
from cua_rl.types.json_values import mapping

TokenOrder = Literal["gap", "ratio", "surprise"]
_NUM_TOKENS = 100
_NUM_CLICKS = 2000
_KEPT: Mapping[TokenOrder, Any] = {
    "gap": RolloutRow.max_gap,
    "ratio": RolloutRow.max_log_ratio,
    "surprise": -RolloutRow.min_logprob,
}
"""What a rollout keeps of its tokens: the largest value among them."""


async def list_outliers(
    runs: Sequence[RunsOfDatabase], named: Sequence[tuple[str, Training]], wanted: RolloutFilter, by: TokenOrder
) -> list[schemas.OutlyingToken]:
    """The hundred trained tokens of the set with the largest value.

    They are all in the hundred rollouts whose largest token is largest, so no other rollout's tokens are read.
    """
    found: list[tuple[float, str, Any]] = []
    for one in runs:
        kept = _KEPT[by]
        largest = select(RolloutRow.id).where(*conditions(one, wanted), kept.is_not(None))
        largest = largest.order_by(kept.desc()).limit(_NUM_TOKENS)
        token = func.unnest(TurnRow.sampled_tokens, TurnRow.sampling_logprobs, TurnRow.training_logprobs)
        numbered = token.table_valued("token", "sampled", "trained", with_ordinality="place", joins_implicitly=True)
        numbered = numbered.render_derived()
        trained, sampled = cast(numbered.c.trained, Double), cast(numbered.c.sampled, Double)
        value = {"gap": func.abs(trained - sampled), "ratio": trained - sampled, "surprise": -sampled}[by]
        query: AnySelect = (
            select(
                RolloutRow.training_id,
                RolloutRow.rollout_id,
                RolloutRow.task_id,
                TurnRow.turn_index,
                (numbered.c.place - 1).label("token_index"),
                numbered.c.token,
                sampled.label("sampling_logprob"),
                trained.label("training_logprob"),
                value.label("value"),
            )
            .join(TurnRow, TurnRow.rollout_pk == RolloutRow.id)
            .where(RolloutRow.id.in_(largest), TurnRow.training_logprobs.is_not(None))
            .order_by(value.desc())
            .limit(_NUM_TOKENS)
        )
        rows = await one.session.execute(query)
        found += [(row.value, one.database.run_id(row.training_id), row) for row in rows]
    texts = {run_id: await find_token_texts(run.config) for run_id, run in named}
    return [
        schemas.OutlyingToken(
            **columns(row, run_id=run_id),
            text=None if (known := texts[run_id]) is None else known.texts([row.token])[0],
        )
        for _, run_id, row in nlargest(_NUM_TOKENS, found, key=lambda item: item[0])
    ]


async def load_first_actions(runs: Sequence[RunsOfDatabase], wanted: RolloutFilter) -> schemas.FirstActions:
    """The first screen that most rollouts of the set share, and where each of them acted on it."""
    found: list[tuple[RunsOfDatabase, Any]] = []
    for one in runs:
        query = (
            select(RolloutRow.training_id, RolloutRow.rollout_id, VERDICT.label("verdict"))
            .add_columns(TurnRow.before_sha256, TurnRow.action)
            .join(TurnRow, is_own_turn(RolloutRow))
            .where(*conditions(one, wanted), TurnRow.turn_index == 0, TurnRow.before_sha256.is_not(None))
            .order_by(RolloutRow.id.desc())
            .limit(_NUM_CLICKS)
        )
        found += [(one, row) for row in await one.session.execute(query)]
    if not found:
        return schemas.FirstActions(screen=None, num_rollouts=0, actions=[])
    ((sha256, _),) = Counter(row.before_sha256 for _, row in found).most_common(1)
    shared = [(one, row) for one, row in found if row.before_sha256 == sha256]
    screen = await shared[0][0].session.get(Screenshot, sha256)
    return schemas.FirstActions(
        screen=None if screen is None else ScreenshotRef.model_validate(screen),
        num_rollouts=len(found),
        actions=[
            schemas.FirstAction(
                **columns(row, run_id=one.database.run_id(row.training_id), action=dict(mapping(row.action)) or None)
            )
            for one, row in shared
        ],
    )

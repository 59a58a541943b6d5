from dataclasses import replace

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine

from cua_rl.database.columns import (
    decode_action,
    decode_more_actions,
    encode_action,
    encode_actions,
    escape_json,
    escape_text,
    unescape_json,
    unescape_text,
)
from cua_rl.database.models import TurnRow
from cua_rl.events import RolloutSource, TurnTaken
from cua_rl.types.actions import Click, TypeText, Wait
from cua_rl.types.errors import DatabaseError
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import ACTIONS, make_group, rollout_start, source_events, start, step_end
from tests.real.database.test_recorder import record

any_text = st.text(st.characters())
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner) | st.dictionaries(any_text, inner),
)


@given(any_text)
def test_any_text_can_be_stored_and_restored(text: str) -> None:
    escaped = escape_text(text)

    escaped.encode()
    assert "\x00" not in escaped
    assert unescape_text(escaped) == text


@given(any_json)
def test_any_json_can_be_stored_and_restored(value: object) -> None:
    assert unescape_json(escape_json(value)) == value


def test_arrays_of_numbers_are_sent_as_one_text() -> None:
    """Item by item, a prompt with ten screenshots of 2,550 tokens takes ten times as long."""
    dialect = create_engine("postgresql+psycopg://").dialect
    written = {
        name: TurnRow.__table__.c[name].type.dialect_impl(dialect).bind_processor(dialect)
        for name in ("prompt_token_ids", "sampling_logprobs")
    }

    assert written["prompt_token_ids"]([1, 22]) == "{1, 22}"
    assert written["sampling_logprobs"]([-0.1, -1e-300]) == "{-0.1, -1e-300}"


def test_actions_are_stored_with_their_type() -> None:
    assert encode_action(Click(x=3, y=4)) == {"type": "Click", "x": 3, "y": 4}
    for action in ACTIONS:
        if action is not None:
            assert decode_action(encode_action(action)) == action


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE trainings SET status = 'paused'",
        "UPDATE steps SET status = 'running'",
        "UPDATE rollouts SET stop_reason = 'bored'",
        "UPDATE groups SET step_id = NULL",
        "UPDATE groups SET eval_id = step_id",
        "UPDATE turns SET training_logprobs = '{}'",
        "UPDATE turns SET sampling_logprobs = '{}'",
        "UPDATE turns SET failure_kind = NULL, failure_message = 'odd'",
        "UPDATE turns SET turn_index = 0",
        "UPDATE turns SET before_sha256 = 'unknown'",
        "UPDATE status_history SET training_id = NULL WHERE training_id IS NOT NULL",
        "INSERT INTO steps SELECT (s).* FROM (SELECT s FROM steps s) AS rows(s)",
    ],
)
async def test_the_database_refuses_what_cannot_be(url: str, statement: str) -> None:
    group = make_group(1)
    await record(url, start(), *source_events(group), step_end(group))

    with pytest.raises(psycopg.IntegrityError):
        run_sql(url, statement)


async def test_deleting_a_training_leaves_only_what_others_may_share(url: str) -> None:
    group = make_group(1)
    await record(url, start(), *source_events(group), step_end(group))

    run_sql(url, "DELETE FROM trainings")

    for table in (
        "steps",
        "groups",
        "rollouts",
        "turns",
        "validations",
        "judgements",
        "environments",
        "status_history",
    ):
        assert run_sql(url, f"SELECT count(*) FROM {table}") == [(0,)]
    for shared in ("screenshots", "judge_prompts"):
        assert run_sql(url, f"SELECT count(*) > 0 FROM {shared}") == [(True,)]


async def test_a_rollout_id_cannot_serve_two_groups(url: str) -> None:
    group = make_group(1)
    start_again = rollout_start(
        RolloutSource(phase="step", step=1), replace(group, group_id="other"), group.rollouts[0]
    )

    with pytest.raises(DatabaseError, match="expected rollout ids to be unique"):
        await record(url, start(), *source_events(group), start_again)


async def test_nothing_can_be_recorded_before_the_training(url: str) -> None:
    with pytest.raises(DatabaseError, match="expected TrainingStarted before any other event"):
        await record(url, TurnTaken(rollout_id="r", turn=make_group().rollouts[0].turns[0]))


def test_actions_that_follow_on_one_answer_are_kept_with_the_first() -> None:
    first, later = Click(x=3, y=4), (Wait(duration_s=1.0), TypeText(text="hi"))
    encoded = encode_actions(first, later)
    assert encoded is not None
    assert (decode_action(encoded), decode_more_actions(encoded)) == (first, later)
    assert decode_more_actions(encode_actions(first)) == ()
    assert encode_actions(None) is None

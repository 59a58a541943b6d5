"""What other programs send, in our words."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cua_rl.database.columns import escape_json
from cua_rl.events import Phase, RolloutSource, TurnTaken
from cua_rl.monitor.ingest_schemas import (
    ITEM_CLASSES,
    OursOfRollout,
    OursOfTurn,
    Sent,
    SentAction,
    SentEnvironment,
    SentRollout,
    SentSource,
    SentTraining,
    SentTurn,
)
from cua_rl.monitor.received import (
    ItemRefused,
    action_columns,
    device_columns,
    rollout_columns,
    source_report,
    training_report,
    turn_columns,
)
from cua_rl.monitor.sent_items import ItemMaker
from tests.builders import IMAGE_TOKEN, model_turn, prompt, rollout, text


@pytest.mark.parametrize(
    ("phase", "told", "stored"),
    [("step", "rollout_running", "rollouts"), ("step", "training", "training"), ("eval", "pending", "running")],
)
def test_statuses_become_ours(phase: Phase, told: str, stored: str) -> None:
    report = source_report(SentSource(training_id=1, step=2, status=told), phase)
    assert (report.source, report.columns["status"]) == (RolloutSource(phase=phase, step=2), stored)
    assert "ended_at" not in report.columns


def test_a_status_that_we_do_not_know_is_refused_with_those_that_we_do() -> None:
    with pytest.raises(ItemRefused, match=r"expected a status among .*completed.*got 'fine'"):
        source_report(SentSource(training_id=1, step=2, status="fine"), "step")


def test_settings_that_would_take_long_to_mask_are_refused() -> None:
    item = SentTraining(run_name="r", config_json={"note": "a" * 2_000_000})
    with pytest.raises(ItemRefused, match="at most 1048576 characters, got 2000012"):
        training_report(item, {}, "r", "there: r")


def test_an_evaluation_without_a_number_is_at_step_0_and_a_step_without_one_is_refused() -> None:
    assert source_report(SentSource(training_id=1), "baseline").source == RolloutSource(phase="baseline", step=0)
    with pytest.raises(ItemRefused, match="expected the number of a step"):
        source_report(SentSource(training_id=1), "step")


def test_figures_with_fields_of_their_own_get_our_metric_names() -> None:
    item = SentSource.model_validate(
        {"training_id": 1, "step": 1, "loss": 0.5, "reward_mean": 0.25, "metrics_json": '{"a": 2, "b": true, "c": "x"}'}
    )
    assert source_report(item, "step").columns["metrics"] == {"loss/total": 0.5, "reward/mean": 0.25, "a": 2.0}


def test_a_rollout_stops_for_the_reason_that_its_sender_implies() -> None:
    finished = SentRollout(rollout_id="r", status="completed", task_completed=True)
    assert rollout_columns(finished)["stop_reason"] == "finished"
    assert rollout_columns(finished.model_copy(update={"ran_out_of_turns": True}))["stop_reason"] == "max_turns"
    assert "stop_reason" not in rollout_columns(SentRollout(rollout_id="r", status="failed", task_completed=True))
    with pytest.raises(ItemRefused, match="expected a stop_reason among"):
        rollout_columns(SentRollout(rollout_id="r", cua_rl=OursOfRollout(stop_reason="bored")))


def test_a_turn_has_its_thinking_in_its_text_and_its_stages_under_our_names() -> None:
    timings = {"stage_timings": {"model_inference": 1.5, "action_exec": 0.25, "screenshot_after": "slow"}}
    columns = turn_columns(SentTurn(rollout_id=1, turn=1, text="I tap.", thinking="Red.", metrics_json=timings))
    assert columns["text"] == "<think>\nRed.\n</think>\n\nI tap."
    assert (columns["durations_s"], columns["duration_s"]) == ({"respond": 1.5, "execute": 0.25}, 1.5)


@pytest.mark.parametrize(
    "exact",
    [
        {"prompt_token_ids": [1, True]},
        {"sampling_logprobs": ["-0.5"]},
        {"prompt_token_ids": [1, 2], "prompt_chunks": [{"text": 1}]},
    ],
)
def test_tokens_that_are_none_are_refused(exact: dict[str, object]) -> None:
    with pytest.raises((ItemRefused, ValidationError), match=r"cua_rl\.(prompt|sampling)"):
        turn_columns(SentTurn.model_validate({"rollout_id": 1, "turn": 1, "cua_rl": exact}))


def test_tokens_of_an_action_count_only_with_a_log_probability_each() -> None:
    action = SentAction(turn_id=1, action_type="click", action_args={"x": 3}, tokens=[1, 2], logprobs=[-0.5, -1])
    assert action_columns(action) == {
        "action": {"x": 3, "type": "click"},
        "sampled_tokens": [1, 2],
        "sampling_logprobs": [-0.5, -1.0],
    }
    assert "sampled_tokens" not in action_columns(action.model_copy(update={"logprobs": [-0.5]}))


def test_a_device_that_its_sender_terminated_is_released() -> None:
    columns = device_columns(SentEnvironment(env_type="gbox", box_type="android", status="terminated"))
    assert (columns["device_id"], columns["status"]) == ("android", "released")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
SHAPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("action", "request", "reward_parts", "durations_s", "metrics"), dict),
    **dict.fromkeys(("prompt_chunks", "prompt_token_ids", "sampled_tokens", "sampling_logprobs"), list),
    **dict.fromkeys(("duration_s", "started_unix_s", "reward", "advantage"), (int, float)),
    **dict.fromkeys(("text", "stop", "failure_kind", "status", "answer", "error", "device_id", "response_id"), str),
}


def columns_of(item: Sent) -> dict[str, object]:
    match item:
        case SentSource():
            return source_report(item, "step").columns
        case SentRollout():
            return rollout_columns(item)
        case SentTurn():
            return turn_columns(item)
        case SentAction():
            return action_columns(item)
        case SentEnvironment():
            return device_columns(item)
        case _:
            return {}


@given(st.data(), st.sampled_from([*ITEM_CLASSES.values(), SentTraining]), JSON)
def test_whatever_is_sent_is_refused_or_has_the_types_of_its_columns(
    data: st.DataObject, item_class: type[Sent], value: object
) -> None:
    ours = item_class.model_fields.get("cua_rl")
    assert ours is None or ours.annotation is not None
    inner = [] if ours is None or ours.annotation is None else [*ours.annotation.model_fields]
    field = data.draw(st.sampled_from([*item_class.model_fields, *inner]))
    valid: dict[str, object] = {
        **dict.fromkeys(("training_id", "step", "turn", "turn_id"), 1),
        **{"rollout_id": "r" if item_class is SentRollout else 1, "success": True},
    }
    try:
        item = item_class.model_validate(valid | ({"cua_rl": {field: value}} if field in inner else {field: value}))
        columns = columns_of(item)
    except (ValidationError, ItemRefused, OverflowError):  # what the door answers with 422
        return
    for name, shape in SHAPES.items():
        assert columns.get(name) is None or isinstance(columns[name], shape), (name, columns[name])
    json.dumps(escape_json(columns), default=str, allow_nan=False)


def test_every_column_of_a_turn_that_our_sender_names_is_stored() -> None:
    made = rollout(model_turn(prompt(text(1, 2))))
    item = list(
        ItemMaker(image_token_id=IMAGE_TOKEN).make(TurnTaken(rollout_id="r", turn=made.turns[0]), datetime.now(UTC))
    )[-1]

    assert set(item.payload["cua_rl"]) - {"images"} <= set(OursOfTurn.model_fields)

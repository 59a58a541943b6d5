import json
from collections.abc import Sequence
from typing import Any

import pytest

from cua_rl.agent.agent import AgentOutcome, AgentTask
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.environments.device import ActionRejected, DeviceKind
from cua_rl.renderers.request_error import ContextOverflow
from cua_rl.types.actions import Action, Button, Click, PressButton, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError, DeviceError, SamplingError
from cua_rl.types.rollout import AgentTurn, StopReason
from tests.fakes import FakeGateway


class FakeDevice:
    """Numbers its screenshots, remembers its actions."""

    device_id = "fake"

    def __init__(self, kind: DeviceKind = "android", reject: str | None = None) -> None:
        self.kind: DeviceKind = kind
        self.actions: list[Action] = []
        self._reject = reject
        self._num_observed = 0

    async def observe(self) -> EncodedImage:
        self._num_observed += 1
        return EncodedImage(data=f"screen {self._num_observed}".encode(), format="png", width_px=200, height_px=400)

    async def execute(self, action: Action) -> None:
        if isinstance(action, PressButton) and self._reject:
            raise ActionRejected(self._reject)
        self.actions.append(action)

    async def query(self, name: str) -> str:
        raise NotImplementedError

    async def close(self) -> None: ...


class BrokenDevice(FakeDevice):
    async def execute(self, action: Action) -> None:
        raise DeviceError("gone")


def call(**arguments: object) -> dict[str, object]:
    return {
        "type": "function_call",
        "id": "fc",
        "call_id": f"call-{arguments['action']}",
        "name": "mobile_use",
        "arguments": json.dumps(arguments),
        "status": "completed",
    }


def text(content: str) -> dict[str, object]:
    part = {"type": "output_text", "text": content, "annotations": []}
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}


THOUGHT = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Mail"}]}
CLICK = call(action="click", coordinate=[500, 500])
DONE = call(action="terminate", status="success")


class ScriptedModel:
    """Gives prepared answers, or raises them, and keeps the requests."""

    def __init__(self, *answers: Sequence[dict[str, object]] | Exception, status: str = "completed"):
        self.requests: list[dict[str, Any]] = []
        self._answers = iter(answers)
        self._status = status

    def respond(self, request: Any) -> dict[str, object]:
        self.requests.append(json.loads(json.dumps(request)))
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return {
            "id": f"resp-{len(self.requests)}",
            "object": "response",
            "created_at": 0,
            "status": self._status,
            "model": "policy",
            "output": answer,
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": 90,
                "output_tokens": 10,
                "total_tokens": 100,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }


class ScriptedAccess(FakeGateway):
    """Reaches the scripted model in every rollout."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__()
        self._model = model

    async def respond(self, rollout_id: str, request: Any) -> dict[str, object]:
        return self._model.respond(request)


async def work(
    model: ScriptedModel,
    device: Any,
    *,
    max_turns: int = 5,
    agent: GBoxAgent | None = None,
    clock: RolloutClock | None = None,
) -> tuple[AgentOutcome, list[AgentTurn]]:
    turns: list[AgentTurn] = []

    async def on_turn(turn: AgentTurn) -> None:
        turns.append(turn)

    access: Any = ScriptedAccess(model)
    task = AgentTask(rollout_id="r", instruction="Open Mail", max_turns=max_turns)
    outcome = await (agent or GBoxAgent()).run(task, device, access, clock=clock or RolloutClock(), on_turn=on_turn)
    return outcome, turns


async def test_the_agent_acts_until_the_model_says_it_is_done() -> None:
    model, device = ScriptedModel([THOUGHT, CLICK], [DONE]), FakeDevice()
    outcome, turns = await work(model, device)
    assert outcome == AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=2, success_claimed=True)
    assert device.actions == [Click(x=100, y=200)]
    assert [turn.response_id for turn in turns] == ["resp-1", "resp-2"]
    assert (turns[0].before.data, turns[0].after and turns[0].after.data) == (b"screen 1", b"screen 2")
    assert (turns[1].before.data, turns[1].action, turns[1].after) == (b"screen 2", None, None)
    assert set(turns[0].durations_s) == {"respond", "execute", "observe"}


async def test_each_request_extends_the_one_before_with_the_answer_as_it_came() -> None:
    model = ScriptedModel([THOUGHT, CLICK], [DONE])
    await work(model, FakeDevice())
    first, second = (request["input"] for request in model.requests)
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + 2] == [THOUGHT, CLICK]
    result = second[-1]
    assert (result["type"], result["call_id"]) == ("function_call_output", "call-click")
    assert [part["type"] for part in result["output"]] == ["input_image"]
    assert [part["type"] for part in first[1]["content"]] == ["input_text", "input_image"]
    assert model.requests[0]["tools"][0]["name"] == "mobile_use"


async def test_the_turns_run_out() -> None:
    outcome, turns = await work(ScriptedModel([CLICK], [CLICK]), FakeDevice(), max_turns=2)
    assert (outcome.stop_reason, outcome.num_turns, len(turns)) == (StopReason.MAX_TURNS, 2, 2)


async def test_an_answer_without_a_call_costs_a_turn_and_is_explained() -> None:
    model = ScriptedModel([text("I see Mail.")], [DONE])
    outcome, turns = await work(model, FakeDevice())
    assert outcome.num_turns == 2
    assert turns[0].action is None
    assert turns[0].after is None
    reply = model.requests[1]["input"][-1]
    assert reply["role"] == "user"
    assert reply["content"][0]["text"] == turns[0].action_error
    assert "mobile_use" in reply["content"][0]["text"]
    assert turns[1].before == turns[0].before


async def test_a_cut_off_answer_is_called_so() -> None:
    _, turns = await work(ScriptedModel([text("I see")], status="incomplete"), FakeDevice(), max_turns=1)
    assert "cut off" in (turns[0].action_error or "")


async def test_a_wrong_call_is_answered_in_its_result() -> None:
    model = ScriptedModel([call(action="click", coordinate=[1])], [DONE])
    _, turns = await work(model, FakeDevice())
    result = model.requests[1]["input"][-1]
    assert result["type"] == "function_call_output"
    assert result["output"] == [{"type": "input_text", "text": turns[0].action_error}]


async def test_a_rejected_action_is_told_and_no_fault() -> None:
    model, device = (
        ScriptedModel([call(action="system_button", button="Home")], [DONE]),
        FakeDevice(reject="No Home key."),
    )
    outcome, turns = await work(model, device)
    assert outcome.stop_reason == StopReason.FINISHED
    assert turns[0].action == PressButton(button=Button.HOME)
    assert turns[0].action_error == "No Home key."
    assert turns[0].after is None


async def test_only_the_first_call_is_done_and_the_others_are_reported_as_ignored() -> None:
    model, device = ScriptedModel([CLICK, call(action="wait")], [DONE]), FakeDevice()
    await work(model, device)
    assert device.actions == [Click(x=100, y=200)]
    assert "Ignored" in str(model.requests[1]["input"][-1])


async def test_the_answer_of_a_question_is_kept() -> None:
    outcome, _ = await work(ScriptedModel([call(action="answer", text="42")]), FakeDevice())
    assert outcome.answer == "42"


async def test_a_wait_that_uses_up_the_policys_time_is_cut_short_and_ends_the_work() -> None:
    model, device = ScriptedModel([call(action="wait", time=60)], [DONE]), FakeDevice()
    outcome, turns = await work(model, device, clock=RolloutClock(task_timeout_s=0.0))
    assert (outcome.stop_reason, outcome.num_turns, len(turns)) == (StopReason.MAX_TIME, 1, 1)
    assert turns[0].action == Wait(duration_s=60.0)  # as the model asked for it
    assert device.actions == [Wait(duration_s=0.0)]


async def test_an_action_that_is_refused_when_time_runs_out_is_no_failure_of_the_agent() -> None:
    model, device = ScriptedModel([call(action="system_button", button="Home")]), FakeDevice(reject="No Home key.")
    outcome, turns = await work(model, device, clock=RolloutClock(task_timeout_s=0.0))
    assert (outcome.stop_reason, outcome.error, turns[0].action_error) == (StopReason.MAX_TIME, None, "No Home key.")


async def test_a_full_context_ends_the_work_and_is_no_fault() -> None:
    outcome, turns = await work(ScriptedModel([CLICK], ContextOverflow("too long")), FakeDevice())
    assert (outcome.stop_reason, outcome.num_turns, len(turns)) == (StopReason.CONTEXT_OVERFLOW, 1, 1)
    assert not outcome.stop_reason.is_fault


async def test_a_failing_server_is_a_sampling_error() -> None:
    with pytest.raises(SamplingError, match="asking the model"):
        await work(ScriptedModel(ValueError("no")), FakeDevice())


async def test_a_failing_device_is_a_device_error() -> None:
    with pytest.raises(DeviceError):
        await work(ScriptedModel([CLICK]), BrokenDevice())


async def test_a_prompt_that_the_server_takes_from_nobody_is_the_configurations_fault_and_not_the_rollouts() -> None:
    refusal = ConfigError("expected ...; start the server with a larger --limit-mm-per-prompt")
    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        await work(ScriptedModel(refusal), FakeDevice())

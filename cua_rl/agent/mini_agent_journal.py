"""What gbox-mini-agent reports of a run, in whatever order and however often it arrives, by step."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

Json = Mapping[str, object]

_STEP_STARTS = ("step_start", "turn_start")
_STEP_ENDS = ("step_end", "turn_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedAction:
    """One action as the agent tells of it."""

    name: str
    args: Json
    duration_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class Step:
    """One step of a run: usually one answer of the model and one action."""

    response_ids: list[str] = field(default_factory=list[str])
    actions: list[ReportedAction] = field(default_factory=list[ReportedAction])
    is_ended: bool = False


class Journal:
    """Events of a run, each taken once; steps may be numbered from 0 or from 1."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._steps: dict[int, Step] = {}
        self.last_ts: str | None = None
        """Time of the last event, from which to ask on."""
        self.end: Json | None = None
        """The event that ended the run."""
        self.errors: list[str] = []

    def add(self, events: Sequence[object]) -> bool:
        """Take events in; True if one of them is new."""
        fresh = False
        for event in events:
            key = json.dumps(event, sort_keys=True, default=str)
            if key not in self._seen and isinstance(event, Mapping):
                self._seen.add(key)
                self._take(cast("Json", event))
                fresh = True
        return fresh

    def step_of(self, response_id: str, position: int) -> Step | None:
        """The step with an answer of the model: known by the answer's id, else by its place among the steps."""
        steps = [self._steps[number] for number in sorted(self._steps)]
        found = next((step for step in steps if response_id in step.response_ids), None)
        if found is not None or any(step.response_ids for step in steps):
            return found
        return steps[position] if position < len(steps) else None

    def _take(self, event: Json) -> None:
        ts = event.get("ts")
        if isinstance(ts, str | int):
            self.last_ts = str(ts)
        kind, number = event.get("type"), event.get("step", event.get("turn"))
        if kind == "run_end":
            self.end = event
        elif kind == "error":
            self.errors.append(str(event.get("message") or event))
        elif isinstance(number, int):
            self._take_step_event(self._steps.setdefault(number, Step()), str(kind), event)

    def _take_step_event(self, step: Step, kind: str, event: Json) -> None:
        if kind == "model_output":
            output = event.get("modelOutput")
            response_id = cast("Json", output).get("id") if isinstance(output, Mapping) else None
            if isinstance(response_id, str):
                step.response_ids.append(response_id)
        elif kind == "action_executed":
            action = _action(event)
            if action is not None:
                step.actions.append(action)
        elif kind in _STEP_ENDS:
            step.is_ended = True
        elif kind in _STEP_STARTS:
            step.is_ended = False


def _action(event: Json) -> ReportedAction | None:
    given = event.get("action")
    if not isinstance(given, Mapping):
        return None
    action = cast("Json", given)
    name, args = action.get("name"), action.get("args")
    if not isinstance(name, str):
        return None
    duration = event.get("durationMs")
    error = action.get("error")
    return ReportedAction(
        name=name,
        args=cast("Json", args) if isinstance(args, Mapping) else {},
        duration_s=duration / 1000 if isinstance(duration, int | float) else 0.0,
        error=error if isinstance(error, str) else None,
    )

"""Goals: what a query must return when the agent has finished."""

import json
import time
from dataclasses import dataclass
from typing import Literal

from cua_rl.environments.device import Device
from cua_rl.judgement import Validation
from cua_rl.tasks.answers import is_answer

How = Literal["equals", "includes", "told"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The result that a query must have for success.

    `how`: "equals"; "includes" (the answer is a JSON list with an item equal to `expected`, itself JSON); or "told"
    (the agent's final message must answer with what the query reads, and that must be `expected`, where it is given).
    """

    query: str
    expected: str = ""
    how: How = "equals"

    def is_met(self, actual: str, answer: str | None) -> bool:
        """Whether the query's answer meets the goal and, for questions, the agent's message is that answer."""
        match self.how:
            case "equals":
                return actual == self.expected
            case "includes":
                return json.loads(self.expected) in json.loads(actual)
            case "told":
                return self.expected in ("", actual) and is_answer(answer, actual)


async def check_goal(goal: Goal, device: Device, answer: str | None) -> Validation:
    started = time.monotonic()
    actual = await device.query(goal.query)
    success = goal.is_met(actual, answer)
    return Validation(
        query=goal.query,
        expected=actual if goal.how == "told" else goal.expected,
        actual=(answer or "") if goal.how == "told" else actual,
        success=success,
        duration_s=time.monotonic() - started,
    )

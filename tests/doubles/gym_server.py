"""A gym server as its clients know it, over simulated phones, with the faults that real ones have.

Beside the contract, agents that stand in for the real ones reach a phone at `/phones/<execution_id>`.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.agent.tools import parse_action
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import ParseFailure, ToolCall


@dataclass
class GymExecution:
    """One attempt, with its phone."""

    task: Task
    phone: SimulatedPhone
    evaluations: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_terminations: int = 0


@dataclass
class GymDouble:
    """Serves each task under its number and id; faults are switched on by tests."""

    tasks: Sequence[Task]
    gym_id: str = "phones"
    create_failures: deque[int] = field(default_factory=deque[int])
    """Statuses of the next creations."""
    evaluate_failures: deque[int] = field(default_factory=deque[int])
    evaluation: dict[str, Any] | None = None
    """What every evaluation says; None asks the task."""
    create_delay_s: float = 0.0
    answers_one_creation: bool = False
    """Of creations that run side by side, only the last one is ever answered."""
    executions: dict[str, GymExecution] = field(default_factory=dict[str, GymExecution])
    device_ids: deque[str] = field(default_factory=deque[str])
    """Devices of the next executions; beyond them they are named after their execution."""
    num_creating: int = 0
    most_creating: int = 0

    def __post_init__(self) -> None:
        self._ids = count(1)
        self._arrivals = 0
        self._done = asyncio.Event()

    def app(self) -> Starlette:
        base = f"/api/v1/{self.gym_id}"
        execution = f"{base}/executions/{{execution_id}}"
        return Starlette(
            routes=[
                Route(f"{base}/tasks", self._list),
                Route(f"{base}/tasks/{{identifier}}", self._task),
                Route(f"{base}/tasks/{{identifier}}", self._create, methods=["POST"]),
                Route(f"{execution}/evaluate", self._evaluate, methods=["POST"]),
                Route(f"{execution}/terminate", self._terminate, methods=["POST"]),
                Route("/phones/{execution_id}", self._screenshot),
                Route("/phones/{execution_id}", self._act, methods=["POST"]),
            ]
        )

    @property
    def num_open(self) -> int:
        """Executions that were never ended."""
        return sum(execution.num_terminations == 0 for execution in self.executions.values())

    def identifier(self, number: int) -> str:
        return f"{number:03d}_{self.tasks[number - 1].task_id}"

    async def _list(self, request: Request) -> Response:
        rows = [{"task_id": self.identifier(number), "tags": ["easy"]} for number in range(1, len(self.tasks) + 1)]
        return JSONResponse({"tasks": rows})

    async def _task(self, request: Request) -> Response:
        task = self._find(request.path_params["identifier"])
        if task is None:
            return JSONResponse({"detail": "no such task"}, 404)
        full: dict[str, object] = {
            "instruction": task.instruction,
            "description": f"Test: {task.instruction}",
            "evaluation": {},
        }
        return JSONResponse(
            {"task_id": request.path_params["identifier"], "name": task.task_id, "tags": ["easy"], **full}
        )

    async def _create(self, request: Request) -> Response:
        task = self._find(request.path_params["identifier"])
        if task is None:
            return JSONResponse({"detail": "no such task"}, 404)
        self._arrivals += 1
        arrival = self._arrivals
        self.num_creating += 1
        self.most_creating = max(self.most_creating, self.num_creating)
        try:
            await asyncio.sleep(self.create_delay_s)
        finally:
            self.num_creating -= 1
        if self.create_failures:
            return JSONResponse({"detail": "no device"}, self.create_failures.popleft())
        execution_id = f"exec-{next(self._ids)}"
        self.executions[execution_id] = GymExecution(task=task, phone=make_simulated_phone(task))
        if self.answers_one_creation and (arrival < self._arrivals or self.num_creating):
            await self._done.wait()
        device_id = self.device_ids.popleft() if self.device_ids else f"phone-{execution_id}"
        return JSONResponse({"execution_id": execution_id, "device": {"device_serial": device_id}})

    def stop(self) -> None:
        """Let go of the requests that are never answered."""
        self._done.set()

    async def _evaluate(self, request: Request) -> Response:
        execution = self.executions[request.path_params["execution_id"]]
        body = await request.json()
        execution.evaluations.append(body)
        if self.evaluate_failures:
            return JSONResponse({"detail": "evaluator crashed"}, self.evaluate_failures.popleft())
        if self.evaluation is not None:
            return JSONResponse(self.evaluation)
        assert execution.task.validate is not None
        found = await execution.task.validate(execution.phone, body.get("answer_text") or None)
        validator = {"id": found.query, "pass": found.success, "score": float(found.success), "weight": 1}
        result = {"score": float(found.success), "success": found.success, "validators": [validator]}
        return JSONResponse({"success": found.success, "result": result})

    async def _terminate(self, request: Request) -> Response:
        execution = self.executions[request.path_params["execution_id"]]
        execution.num_terminations += 1
        await execution.phone.close()
        return JSONResponse({})

    async def _screenshot(self, request: Request) -> Response:
        screen = await self.executions[request.path_params["execution_id"]].phone.observe()
        return Response(screen.data, media_type="image/png")

    async def _act(self, request: Request) -> Response:
        """Do one call of our own tool."""
        phone = self.executions[request.path_params["execution_id"]].phone
        call = await request.json()
        screen = await phone.observe()
        action = parse_action(
            ToolCall(call_id="", name=call["name"], arguments=call["arguments"]),
            width_px=screen.width_px,
            height_px=screen.height_px,
        )
        if isinstance(action, Finish | ParseFailure):
            return JSONResponse({"error": getattr(action, "message", None), "finished": isinstance(action, Finish)})
        try:
            await phone.execute(action)
        except ActionRejected as error:
            return JSONResponse({"error": str(error), "finished": False})
        return JSONResponse({"error": None, "finished": False})

    def _find(self, identifier: str) -> Task | None:
        known = {self.identifier(number): task for number, task in enumerate(self.tasks, start=1)}
        return known.get(identifier)

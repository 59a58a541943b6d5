"""gbox-mini-agent as its clients know it: runs that really ask `model.baseUrl` and act on a gym double's phones."""

import asyncio
import json
from base64 import b64encode
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.agent.tools import MOBILE_USE, load_system_prompt
from tests.patience import patience

TOOL = {
    "type": "function",
    "function": {
        "name": MOBILE_USE.name,
        "description": MOBILE_USE.description,
        "parameters": dict(MOBILE_USE.parameters),
    },
}


@dataclass
class Run:
    """One run and what it has told so far."""

    body: dict[str, Any]
    status: str = "running"
    reason: str = ""
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    work: asyncio.Task[None] | None = None

    def tell(self, kind: str, **fields: Any) -> None:
        self.events.append({"type": kind, "ts": datetime.now(UTC).isoformat(), **fields})


@dataclass
class MiniAgentDouble:
    """Faults are switched on by tests."""

    reports_one_output: bool = False
    """Only the first answer of the model, and what was done after it, ever appears among the events."""
    hangs_after_steps: int | None = None
    """The run stops there without a word; its status stays "running"."""
    start_failures: deque[int] = field(default_factory=deque[int])
    poll_failures: deque[int] = field(default_factory=deque[int])
    has_events: bool = True
    """If not, asking for them is a 404."""
    breaks_down: bool = False
    """The run fails after its first step with an error of its own."""
    runs: dict[str, Run] = field(default_factory=dict[str, Run])

    def __post_init__(self) -> None:
        self._ids = count(1)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/runs", self._start, methods=["POST"]),
                Route("/runs/{run_id}", self._status),
                Route("/runs/{run_id}/events", self._events),
            ]
        )

    async def stop(self) -> None:
        """End the work of all runs."""
        works = [run.work for run in self.runs.values() if run.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    async def _start(self, request: Request) -> Response:
        if self.start_failures:
            return JSONResponse({"error": "busy"}, self.start_failures.popleft())
        run_id = f"run-{next(self._ids)}"
        run = self.runs[run_id] = Run(body=await request.json())
        run.work = asyncio.create_task(self._work(run))
        return JSONResponse({"runId": run_id})

    async def _status(self, request: Request) -> Response:
        if self.poll_failures:
            return JSONResponse({"error": "restarting"}, self.poll_failures.popleft())
        run = self.runs[request.path_params["run_id"]]
        return JSONResponse({"status": run.status, "reason": run.reason})

    async def _events(self, request: Request) -> Response:
        if not self.has_events:
            return JSONResponse({"error": "not found"}, 404)
        since = request.query_params.get("from", "")
        run = self.runs[request.path_params["run_id"]]
        return JSONResponse({"events": [event for event in run.events if event["ts"] >= since]})

    async def _work(self, run: Run) -> None:
        async with httpx.AsyncClient(timeout=patience(60), trust_env=False) as http:
            try:
                await self._steps(run, http)
            except httpx.HTTPError as error:
                run.tell("error", message=str(error))
                run.status, run.reason = "failed", f"model call failed: {error}"

    async def _steps(self, run: Run, http: httpx.AsyncClient) -> None:
        env = run.body["env"]
        phone = f"{env['gymBaseUrl']}/phones/{env['executionId']}"
        messages: list[dict[str, Any]] = [{"role": "system", "content": load_system_prompt("android")}]
        messages.append({"role": "user", "content": [_text(run.body["task"]), await _screen(http, phone)]})
        for step in range(1, run.body["maxSteps"] + 1):
            if self.hangs_after_steps is not None and step > self.hangs_after_steps:
                await asyncio.Event().wait()
            if await self._step(run, http, phone, messages, step):
                run.tell("run_end", ok=True, reason="finished")
                run.status, run.reason = "completed", "finished"
                return
            if self.breaks_down:
                run.tell("error", message="the device went away")
                run.status, run.reason = "failed", "device error"
                return
        run.tell("run_end", ok=False, reason="max_steps")
        run.status, run.reason = "failed", "max_steps"

    async def _step(
        self, run: Run, http: httpx.AsyncClient, phone: str, messages: list[dict[str, Any]], step: int
    ) -> bool:
        """One answer and its action; True if it ends the run."""
        tell = run.tell if step == 1 or not self.reports_one_output else _say_nothing
        tell("step_start", step=step)
        model = run.body["model"]
        request = {"model": model["name"], "messages": messages, "tools": [TOOL]}
        answer = await http.post(f"{model['baseUrl']}/chat/completions", json=request)
        answer.raise_for_status()
        completion = answer.json()
        tell("model_output", step=step, modelOutput=completion)
        message = completion["choices"][0]["message"]
        messages.append(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not calls:
            messages.append({"role": "user", "content": "Answer with one call."})
            tell("step_end", step=step)
            return False
        done = (await http.post(phone, json=calls[0]["function"])).json()
        tell("action_executed", step=step, action=_account(calls[0]["function"], done), durationMs=12)
        content = [*([_text(done["error"])] if done["error"] else []), await _screen(http, phone)]
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": content})
        tell("step_end", step=step)
        return bool(done["finished"])


def _say_nothing(kind: str, **fields: Any) -> None:
    return


def _account(function: dict[str, Any], done: dict[str, Any]) -> dict[str, Any]:
    """Our tool's call in the words of the mini-agent."""
    arguments = json.loads(function["arguments"])
    action = arguments.get("action")
    if done["finished"]:
        return {"name": "finished", "args": {"content": arguments.get("text")}}
    args: dict[str, Any] = {}
    if isinstance(arguments.get("coordinate"), list):
        args["point"] = [number / 1000 for number in arguments["coordinate"]]
    return {"name": str(action), "args": args, "error": done["error"]}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def _screen(http: httpx.AsyncClient, phone: str) -> dict[str, Any]:
    png = (await http.get(phone)).content
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(png).decode()}"}}

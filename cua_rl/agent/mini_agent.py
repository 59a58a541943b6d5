"""gbox-mini-agent, which acts in executions of a gym server; the gateway at its model address records its requests.

Answers, tokens and screenshots come from the gateway. The agent's own reports only add the actions, so a lost report
costs no training data.
"""

import asyncio
import io
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Self

import httpx
from PIL import Image

from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess, OnTurn
from cua_rl.agent.mini_agent_reports import FINISH_NAMES, Journal, parse_mini_agent_action
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.environments.device import Device, RemoteDevice
from cua_rl.types.actions import Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import AgentError
from cua_rl.types.json_values import Json, is_object, mapping, parse_json, sequence
from cua_rl.types.rollout import AgentTurn, ModelTurn

logger = logging.getLogger(__name__)

DEFAULT_BASE_URL = "http://localhost:3000"

_MAX_ATTEMPTS, _REQUEST_TIMEOUT_S = 5, 30.0
_PATIENCE_TURNS = 2
"""Number of further answers after which a turn without a report is passed on."""
_NOT_TAKEN = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
"""Statuses that mean that the server has not started the run, so a retry is safe."""
_LIMIT_REASONS = ("max_step", "maxstep", "max steps", "step limit", "max_turn", "max turns")
_TIME_REASONS = ("timeout", "timed out", "time limit", "maxruntime", "maxsteptime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run."""

    status: str
    """running, completed or failed"""
    reason: str

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")


class MiniAgentClient:
    """One gbox-mini-agent server; an async context manager."""

    def __init__(self, base_url: str, *, retry_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._retry_s = retry_s
        self._http = httpx.AsyncClient(base_url=self._base_url, timeout=_REQUEST_TIMEOUT_S, trust_env=False)

    async def start(self, body: Json) -> str:
        """Start a run and return its id; retries only if no run can have been started."""
        failure = ""
        for attempt in range(_MAX_ATTEMPTS):
            await asyncio.sleep(self._retry_s * attempt)
            try:
                response = await self._http.post("/runs", json=body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = f"{type(error).__name__} {error}"
                continue
            except httpx.HTTPError as error:
                raise AgentError(f"start a run at {self._base_url}: {type(error).__name__} {error}") from error
            run_id = mapping(parse_json(response.content)).get("runId") if response.is_success else None
            if isinstance(run_id, str | int) and not isinstance(run_id, bool):
                return str(run_id)
            failure = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code not in _NOT_TAKEN:
                break
        raise AgentError(f"expected a run at {self._base_url}, got none: {failure}")

    async def status(self, run_id: str) -> RunStatus:
        """The run's status; raises `AgentError` after all attempts."""
        fields = mapping(parse_json((await self._get(f"/runs/{run_id}")).content))
        return RunStatus(status=str(fields.get("status")), reason=str(fields.get("reason") or ""))

    async def events(self, run_id: str, since: str | None) -> Sequence[object]:
        """Events from a time on, inclusive; none if the server has none yet."""
        response = await self._get(f"/runs/{run_id}/events", {} if since is None else {"from": since})
        if response.status_code == HTTPStatus.NOT_FOUND:
            return ()
        body = parse_json(response.content)
        return sequence(body.get("events") if is_object(body) else body)

    async def _get(self, path: str, query: Mapping[str, str] | None = None) -> httpx.Response:
        failure = ""
        for attempt in range(_MAX_ATTEMPTS):
            await asyncio.sleep(self._retry_s * attempt)
            try:
                response = await self._http.get(path, params=query)
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__} {error}"
                continue
            if response.is_success or response.status_code == HTTPStatus.NOT_FOUND:
                return response
            failure = f"status {response.status_code}: {response.text[:300]}"
        raise AgentError(f"expected an answer from {self._base_url}{path}, got none: {failure}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniAgent:
    """Starts a run on a gbox-mini-agent server for each rollout."""

    base_url: str = DEFAULT_BASE_URL
    agent: str = "mai-ui"
    """"mai-ui" or "qwen3-vl"."""
    action_space: str = "mobile"
    """"mobile" or "pc"."""
    max_run_time_s: float = 600.0
    max_step_time_s: float = 120.0
    poll_s: float = 3.0
    retry_s: float = 0.5
    slack_s: float = 60.0
    """Time beyond the server's own limits after which its run counts as hung."""

    async def run(
        self, task: AgentTask, device: Device, access: ModelAccess, *, clock: RolloutClock, on_turn: OnTurn
    ) -> AgentOutcome:
        """Start a run and follow it to its end.

        The server has no call that ends a run: it fails by itself once the rollout's address is closed.

        Raises `AgentError` if no run could be started or followed, or it failed through no fault of the policy,
        `SamplingError` if the model did not answer, `TimeoutError` if the run hangs.
        """
        if not isinstance(device, RemoteDevice):
            raise AgentError(
                f"expected an execution of a gym server for gbox-mini-agent, got device {device.device_id!r}; take "
                "tasks of a gym server, or another agent"
            )
        clock.charge_between_calls()
        turns = _Turns(on_turn, clock)
        watch = RolloutWatch(max_turns=task.max_turns, on_answer=turns.answered, clock=clock)
        client = MiniAgentClient(self.base_url, retry_s=self.retry_s)
        with access.expose(task.rollout_id, watch) as address:
            body = {
                "task": task.instruction,
                "agent": self.agent,
                "maxSteps": task.max_turns,
                "maxRunTimeSec": round(self.max_run_time_s),
                "maxStepTimeSec": round(self.max_step_time_s),
                # the server's API has no field for a key
                "model": {"baseUrl": f"{address.keyed_url}/v1", "name": "policy", "provider": "openai"},
                "env": device.address,
                "standardActionSpace": self.action_space,
            }
            async with client:
                run_id = await client.start(body)
                logger.info("rollout_id=%s mini_agent_run=%s", task.rollout_id, run_id)
                status = await self._follow(client, run_id, watch, turns)
        await turns.hand_on(is_over=True)
        if watch.fault is not None:
            raise watch.fault
        return _outcome(status, watch, turns)

    async def _follow(
        self, client: MiniAgentClient, run_id: str, watch: RolloutWatch, turns: "_Turns"
    ) -> RunStatus | None:
        """Poll until the run or the rollout is over; None if the run continues without the rollout."""
        started = last_sign = time.monotonic()
        seen_turns = 0
        while True:
            is_new = turns.journal.add(await client.events(run_id, turns.journal.last_ts))
            status = await client.status(run_id)
            await turns.hand_on(is_over=False)
            if turns.journal.end is not None or status.is_over:
                turns.journal.add(await client.events(run_id, turns.journal.last_ts))
                return status
            watch.check_time()
            if watch.over.is_set():
                return None
            now = time.monotonic()
            if is_new or watch.num_turns > seen_turns or watch.clock.is_uncharged:  # while the model samples
                last_sign, seen_turns = now, watch.num_turns
            if now - started > self.max_run_time_s + self.slack_s:
                raise TimeoutError(f"gbox-mini-agent run {run_id} is still running after {now - started:.0f} s")
            if now - last_sign > self.max_step_time_s + self.slack_s:
                raise TimeoutError(f"gbox-mini-agent run {run_id} showed no progress for {now - last_sign:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(self.poll_s):
                    await watch.over.wait()


class _Turns:
    """Joins the recorded answers with the agent's reports to turns, and passes these on in order."""

    def __init__(self, on_turn: OnTurn, clock: RolloutClock) -> None:
        self._clock = clock
        self.journal = Journal()
        self.answer: str | None = None
        self.is_finished = False
        self._on_turn = on_turn
        self._answers: list[ModelTurn] = []
        self._screens: list[EncodedImage] = []
        self._num_handed_on = 0

    async def answered(self, turn: ModelTurn) -> None:
        """Keep an answer and what the model saw: the last image of its prompt, else the screen before."""
        images = turn.prompt.images or self._screens
        if not images:  # a prompt without images: one transparent pixel
            png = io.BytesIO()
            Image.new("RGBA", (1, 1)).save(png, format="PNG")
            images = (EncodedImage(data=png.getvalue(), format="png", width_px=1, height_px=1),)
        self._screens.append(images[-1])
        self._answers.append(turn)

    async def hand_on(self, *, is_over: bool) -> None:
        """Pass on turns whose next screen and report have arrived or are long overdue; all turns at the end."""
        while (index := self._num_handed_on) < len(self._answers):
            num_later = len(self._answers) - index - 1
            step = self.journal.step_of(self._answers[index].response_id, index)
            is_reported = num_later > 0 and step is not None and step.is_ended
            if not (is_over or is_reported or num_later > _PATIENCE_TURNS):
                return
            self._num_handed_on += 1
            await self._on_turn(self._joined(index))

    def _joined(self, index: int) -> AgentTurn:
        model, before = self._answers[index], self._screens[index]
        step = self.journal.step_of(model.response_id, index)
        reported = step.actions if step is not None else []
        for done in reported:
            if done.name.lower() in FINISH_NAMES:
                self.is_finished = True
                content = done.args.get("content", done.args.get("text"))
                self.answer = content if isinstance(content, str) else self.answer
        done_on_device = [done for done in reported if done.name.lower() not in FINISH_NAMES]
        main = done_on_device[0] if done_on_device else None
        action, *more = [parse_mini_agent_action(done, before) for done in done_on_device] or [None]
        waits_s = sum(done.duration_s for done in (action, *more) if isinstance(done, Wait))
        execute_s = sum(done.duration_s for done in reported)
        self._clock.credit(max(0.0, execute_s - waits_s))  # the device's time, not the policy's
        unread = model.failure.message if model.failure and not reported else None
        later = self._screens[index + 1] if index + 1 < len(self._screens) else None
        return AgentTurn(
            response_id=model.response_id,
            before=before,
            action=action,
            action_error=main.error if main else unread,
            after=later if action is not None else None,
            durations_s={"respond": model.duration_s, "execute": execute_s},
            more_actions=tuple(later for later in more if later is not None),
        )


def _outcome(status: RunStatus | None, watch: RolloutWatch, turns: _Turns) -> AgentOutcome:
    """How the rollout ended. A run that failed with an internal error is a fault; one that gave up is not."""
    reason = (status.reason if status else "") or str((turns.journal.end or {}).get("reason") or "")
    if watch.num_turns == 0:
        raise AgentError(f"gbox-mini-agent ended without calling the model: {reason or turns.journal.errors}")
    is_limit = any(words in reason.lower() for words in _LIMIT_REASONS)
    if status is not None and status.status == "failed" and not is_limit and not turns.is_finished:
        if any(words in reason.lower() for words in _TIME_REASONS):
            watch.wear_out()  # its limits hold for its answers too, whose length is the policy's doing
        elif turns.journal.errors and not watch.is_out_of_turns and not watch.is_out_of_context:
            raise AgentError(f"gbox-mini-agent failed: {reason} {turns.journal.errors[-1]}")
    claim = (turns.journal.end or {}).get("ok")
    return AgentOutcome(
        stop_reason=watch.stop_reason(is_finished=turns.is_finished, is_out_of_turns=is_limit),
        num_turns=watch.num_turns,
        answer=turns.answer,
        success_claimed=claim if isinstance(claim, bool) else None,
    )

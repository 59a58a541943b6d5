"""Tracks a rollout of an agent outside this process at the gateway: its answers, limits and faults."""

import asyncio
from collections.abc import Awaitable, Callable

from cua_rl.agent.policy_time import RolloutClock
from cua_rl.types.errors import CuaError
from cua_rl.types.rollout import ModelTurn, StopReason


class RolloutOver(Exception):
    """The rollout accepts no more requests or actions; `code` is a machine-readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RolloutWatch:
    """Admits requests up to the turn limit, passes every answer on in order, and records what ended the rollout."""

    def __init__(
        self, *, max_turns: int, on_answer: Callable[[ModelTurn], Awaitable[None]], clock: RolloutClock
    ) -> None:
        self.clock = clock
        """Charged for the time between requests, not for the time of a request itself."""
        self._max_turns = max_turns
        self._on_answer = on_answer
        self._in_order = asyncio.Lock()
        self.num_turns = 0
        self.fault: CuaError | None = None
        """The infrastructure fault that ended the rollout."""
        self.is_out_of_turns = False
        """Whether a request was refused because the turns were used up."""
        self.is_out_of_time = False
        """Whether the policy's time was used up."""
        self.is_out_of_context = False
        """Whether the last request exceeded the model's context."""
        self.is_closed = False
        self.over = asyncio.Event()
        """Set once the agent cannot continue: it finished, is out of turns or time, or there was a fault."""

    def admit(self, num_turns: int) -> None:
        """Admit a request, given `num_turns` others answered or in flight; raises `RolloutOver`."""
        if self.over.is_set() or self.is_closed:
            raise RolloutOver("rollout_over", "expected an open rollout, got one that has ended; stop")
        if num_turns >= self._max_turns:
            self.is_out_of_turns = True
            self.over.set()
            raise RolloutOver(
                "max_turns_reached", f"expected at most {self._max_turns} answers in this rollout, got one more; stop"
            )

    async def answered(self, turn: ModelTurn) -> None:
        """Count a recorded answer and pass it on."""
        async with self._in_order:
            if self.is_closed:
                return
            self.num_turns += 1
            self.clock.next_turn()
            self.is_out_of_context = False
            try:
                await self._on_answer(turn)
            except CuaError as error:
                self.fail(error)

    async def end_in_time(self) -> None:
        """End the rollout once the policy's time is used up."""
        await self.clock.used_up()
        self.check_time()

    def check_time(self) -> None:
        """End the rollout if the policy's time is used up."""
        if self.clock.is_used_up and not self.over.is_set():
            self.wear_out()

    def wear_out(self) -> None:
        """End the rollout as when its time is used up: the policy left a device that takes nothing more."""
        self.is_out_of_time = True
        self.over.set()

    def fail(self, error: CuaError) -> None:
        """End the rollout with an infrastructure fault; the first one counts."""
        self.fault = self.fault or error
        self.over.set()

    def close(self) -> None:
        """Refuse all further requests and ignore answers."""
        self.is_closed = True

    def stop_reason(self, *, is_finished: bool, is_out_of_turns: bool = False) -> StopReason:
        """Why the rollout ended, given the agent's account: whether it finished the task or reached its own limit."""
        if is_finished:
            return StopReason.FINISHED
        if self.is_out_of_time:
            return StopReason.MAX_TIME
        if is_out_of_turns or self.is_out_of_turns or self.num_turns >= self._max_turns:
            return StopReason.MAX_TURNS
        return StopReason.CONTEXT_OVERFLOW if self.is_out_of_context else StopReason.FINISHED

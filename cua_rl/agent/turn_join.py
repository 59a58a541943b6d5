"""Joins a rollout's answers with what its agent did on the device, in order of time, into turns."""

import asyncio
from dataclasses import dataclass, field

from cua_rl.actions import Action
from cua_rl.agent.gbox_agent import AgentTurn, OnTurn
from cua_rl.conversation import EncodedImage
from cua_rl.types import ModelTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One thing an agent asked of the device."""

    action: Action | None
    """None if it could not be understood or ended the rollout."""
    error: str | None = None
    """What the agent was told if it was not done."""
    after: EncodedImage | None = None
    execute_s: float = 0.0
    observe_s: float = 0.0


@dataclass(slots=True)
class _OpenTurn:
    index: int
    model: ModelTurn
    before: EncodedImage
    deeds: list[Deed] = field(default_factory=list[Deed])


class TurnJoin:
    """Everything done after an answer and before the next belongs to it; a turn is handed on when the next begins.

    `seen` is what the device last showed.
    """

    def __init__(self, *, seen: EncodedImage, on_turn: OnTurn) -> None:
        self.seen = seen
        self._on_turn = on_turn
        self._open: _OpenTurn | None = None
        self._num_turns = 0
        self._in_order = asyncio.Lock()

    async def answered(self, model: ModelTurn) -> None:
        """A new turn begins with this answer."""
        async with self._in_order:
            await self._hand_on()
            self._open = _OpenTurn(self._num_turns, model, self.seen)
            self._num_turns += 1

    def did(self, deed: Deed) -> None:
        """Note what was done; before the first answer it belongs to no turn."""
        if self._open is not None:
            self._open.deeds.append(deed)
        self.seen = deed.after or self.seen

    async def close(self) -> None:
        """Hand on the last turn."""
        async with self._in_order:
            await self._hand_on()

    async def _hand_on(self) -> None:
        done, self._open = self._open, None
        if done is not None:
            await self._on_turn(_joined(done))


def _joined(turn: _OpenTurn) -> AgentTurn:
    """The turn with its actions in order: the first that was understood, and more; and the screen after the last."""
    main = next((deed for deed in turn.deeds if deed.action is not None), turn.deeds[0] if turn.deeds else None)
    unread = turn.model.failure.message if turn.model.failure and not turn.deeds else None
    return AgentTurn(
        index=turn.index,
        response_id=turn.model.response_id,
        before=turn.before,
        action=main.action if main else None,
        action_error=main.error if main else unread,
        after=next((deed.after for deed in reversed(turn.deeds) if deed.after is not None), None),
        durations_s={
            "respond": turn.model.duration_s,
            "execute": sum(deed.execute_s for deed in turn.deeds),
            "observe": sum(deed.observe_s for deed in turn.deeds),
        },
        more_actions=tuple(deed.action for deed in turn.deeds if deed.action is not None and deed is not main),
    )

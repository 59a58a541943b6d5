"""Copies of a device's state and of a rollout's position, from which other rollouts can go on."""

from dataclasses import dataclass

from cua_rl.types.conversation import EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of a device's state, of which its environment makes another device, and what that one must show."""

    state: object
    screen: EncodedImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The end of a turn, from where other rollouts can go on."""

    snapshot: Snapshot
    instruction: str
    policy_left_s: float
    """The rest of the policy's time."""
    first_success_turn: int | None = None
    milestone_turns: tuple[int | None, ...] = ()

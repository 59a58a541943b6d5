"""What a finished rollout is worth. Faults of the infrastructure never get here."""

from collections.abc import Callable

from cua_rl.types import Reward, StopReason, Validation

RewardFunction = Callable[[Validation, StopReason, int], Reward]
"""(what the validator read, why the rollout ended, number of turns) -> reward."""


def binary_reward(validation: Validation, stop_reason: StopReason, num_turns: int) -> Reward:
    """1 if the device's state shows the goal, else 0; what the agent claims does not count."""
    success = 1.0 if validation.success else 0.0
    return Reward(total=success, parts={"success": success})

"""Time limits of the stages of a rollout, as settings."""

import chz

from cua_rl.command_line.fields import AT_MOST_A_DAY, setting


@chz.chz
class TimeLimits:
    """Time limits of the stages of a rollout, seconds; the pool has its own for the lease."""

    setup_timeout_s: float = setting(300.0, "limit for preparing a task on its device", within=AT_MOST_A_DAY)
    turn_timeout_s: float = setting(
        300.0,
        "limit for the device's time in one turn, and for a model server without a new token; exceeding it is a fault",
        within=AT_MOST_A_DAY,
    )
    task_timeout_s: float = setting(
        1800.0,
        "limit for the policy's own time in one rollout: its waits and, for an agent outside this "
        "process, the time between requests; exceeding it ends the rollout as if out of turns",
        within=AT_MOST_A_DAY,
    )
    validate_timeout_s: float = setting(60.0, "limit for validating a task on its device", within=AT_MOST_A_DAY)

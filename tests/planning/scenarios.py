"""A scenario whose bounds can be worked out by hand."""

from typing import Any

from cua_rl.planning.fleet import DeviceTime, Fleet, Placement, Scenario, Schedule, Speed, Spread, Workload

PLACEMENT: dict[str, Any] = {
    "num_servers": 1,
    "gpus_per_server": 1,
    "num_trainers": 1,
    "is_shared": False,
    "max_requests": 128,
}


def make_scenario(
    *,
    workload: dict[str, Any] | None = None,
    placement: dict[str, Any] | None = None,
    schedule: Any = None,
    **fleet: Any,
) -> Scenario:
    """10 devices; rollouts of 4 turns, 2 s on the device and 1 s in the model each; 100 tokens to train per rollout.

    A rollout that never waits takes 2 + 4 * 1 + 3 * 2 + 1 = 13 s.
    """
    work: dict[str, Any] = {
        "turns": (4,),
        "start": DeviceTime(own=Spread(mean=2.0)),
        "turn": DeviceTime(own=Spread(mean=2.0)),
        "end": DeviceTime(own=Spread(mean=1.0)),
        "request_work": Spread(mean=1.0),
        "controller_s": 0.0,
        "prompt_tokens": 20.0,
        "turn_tokens": 20.0,
        "constant_group_frac": 0.0,
    }
    values: dict[str, Any] = {
        "num_devices": 10,
        "placement": Placement(**PLACEMENT | (placement or {})),
        "server": Speed(alone_s=1.0, each_s=0.0),
        "trained_token_s": 0.01,
        "save_s": 0.0,
        "publish_s": 0.0,
    }
    return Scenario(
        workload=Workload(**work | (workload or {})),
        fleet=Fleet(**values | fleet),
        schedule=schedule or Schedule(groups_per_batch=5, group_size=2, max_lag=0),
    )

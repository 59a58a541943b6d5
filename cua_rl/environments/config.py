"""Configuration of the devices of a run, and of the time that the stages of a rollout may take."""

from typing import Literal

import chz

from cua_rl.command_line.fields import AT_MOST_A_DAY, setting


@chz.chz
class DeviceConfig:
    """Devices: screens, time limits, GBox boxes, phones, gym servers."""

    screen_scale: int = setting(1, "simulator: scale factor of the 192x320 pixel screen, 1 to 16", within=(0, 16))
    browser_scale: float | None = setting(
        None, "web pages: scale factor of screenshots; None uses the task set's default", within=(0.0, 4.0)
    )
    coordinate_mode: Literal["direct", "gbox"] = setting(
        "direct",
        "direct: the model outputs coordinates, in the form of agent.action_format; gbox: it describes elements, "
        "which GBox's coordinate model locates",
    )
    gbox_screenshots: Literal["inline", "stored"] = setting(
        "inline", "gbox: screenshots inside responses (inline), or through GBox's storage (stored)"
    )
    record_devices: bool = setting(
        False, "gbox: record a video of every rollout as recordings/<rollout>.mp4 in the run's folder"
    )
    adb_serials: list[str] = setting(
        doc="adb: serial numbers of the phones to use; empty uses all attached ones", factory=list[str]
    )
    adb_snapshot: str | None = setting(
        None,
        "adb, on emulators: name of a snapshot that each loads before a rollout, so that nothing of earlier ones is "
        "left; branching needs it",
    )
    device_creations_per_s: float | None = setting(
        None, "maximum device creations per second; None is unlimited", within=(0.0, 1000.0)
    )
    lease_timeout_s: float = setting(300.0, "limit for obtaining a device, including retries", within=AT_MOST_A_DAY)
    setup_timeout_s: float = setting(300.0, "limit for preparing a task on its device", within=AT_MOST_A_DAY)
    turn_timeout_s: float = setting(
        300.0,
        "limit for the device's time in a turn, and for a model server that samples no token; exceeding it is a fault",
        within=AT_MOST_A_DAY,
    )
    task_timeout_s: float = setting(
        1800.0,
        "limit for the policy's own time in one rollout: its waits and, for an agent outside this "
        "process, the time between requests; exceeding it ends the rollout as if out of turns",
        within=AT_MOST_A_DAY,
    )
    validate_timeout_s: float = setting(60.0, "limit for validating a task on its device", within=AT_MOST_A_DAY)
    gym_base_url: str | None = setting(
        None, "gym server for task sources that name none; None is http://localhost:5010"
    )
    gym_id: str | None = setting(None, "gym for task sources that name none; None is umetrip")
    gym_parallel_creates: int = setting(
        1, "executions created concurrently on a gym server; some servers handle only one at a time", at_least=1
    )

"""Which task of which gym: all that a device needs to know of a gym task."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GymTaskRef:
    """A task on a gym server."""

    base_url: str
    gym_id: str
    identifier: str
    """What the server calls the task."""

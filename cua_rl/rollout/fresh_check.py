"""Why a task's check fails to run: it is broken, the policy caused the error, or something it needs is unavailable.

A check that raises, or never ends, is tried on a fresh device on which nothing has been done. If it works there,
what the policy did made it fail: the task is not done. If such rollouts were dropped as faults, mostly successes would
remain, and a policy could choose which of its rollouts count.
"""

import asyncio
import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.device import Device
from cua_rl.environments.pool import DeviceSource
from cua_rl.host.masking import mask_known
from cua_rl.rollout.time_limits import time_limit
from cua_rl.tasks.readiness import not_done, prepare, validate
from cua_rl.tasks.task import Task, Validate
from cua_rl.types.errors import CheckError, ConfigError, TaskError
from cua_rl.types.judgement import Validation

logger = logging.getLogger(__name__)

_TRUST_S = 60.0
"""How long a check that worked on a fresh device is trusted: a group's rollouts share a trial, an outage is noticed."""

Instance = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshCheck:
    """Validates rollouts, and tries a check that fails on fresh devices."""

    devices: DeviceSource
    limits: DeviceConfig
    _worked: set[str] = field(default_factory=set[str])
    """Tasks whose check has worked in this process."""
    _trusted_at: dict[Instance, float] = field(default_factory=dict[Instance, float])
    _trying: defaultdict[Instance, asyncio.Lock] = field(
        default_factory=lambda: defaultdict[Instance, asyncio.Lock](asyncio.Lock)
    )

    async def validate(self, task: Task, device: Device, answer: str | None) -> Validation:
        """Validate in time; raises `CheckError` if the check fails or is too slow, and the device's `DeviceError`."""
        try:
            async with time_limit("validation", self.limits.validate_timeout_s):
                validation = await validate(task, device, answer)
        except TimeoutError as error:
            raise CheckError(str(error)) from error
        self._worked.add(task.task_id)
        return validation

    async def holds(self, task: Task, check: Validate, device: Device) -> bool:
        """Whether a check of the task, or a milestone, holds while the agent works; False if it cannot be read."""
        try:
            async with time_limit("validation", self.limits.validate_timeout_s):
                return (await validate(replace(task, validate=check), device, None)).success
        except (CheckError, TimeoutError):
            return False

    async def verdict(self, task: Task, failure: CheckError) -> Validation:
        """The verdict on a rollout whose check failed: not done, if the check works on a fresh device.

        Raises:
            ConfigError: it fails there too, and has never worked: it is broken.
            TaskError: it fails there too, but has worked before: what it needs cannot be reached.
            DeviceError, TimeoutError: there is no fresh device.
        """
        instance = task.task_id, task.seed
        async with self._trying[instance]:
            trusted_at = self._trusted_at.get(instance)
            if trusted_at is None or time.monotonic() - trusted_at > _TRUST_S:
                async with self.devices.lease(task.device_request()) as device:
                    async with time_limit("set-up", self.limits.setup_timeout_s):
                        await self.prepare(task, device)
                    try:
                        await self.validate(task, device, None)
                    except CheckError as error:
                        raise self._broken(task, error) from failure
                self._trusted_at[instance] = time.monotonic()
        said = mask_known(str(failure))
        logger.warning(
            "task=%s not done: its check fails on what the policy did, not on a fresh device: %s", *(task.task_id, said)
        )
        return not_done(said)

    async def prepare(self, task: Task, device: Device) -> None:
        """Prepare the device; raises as `verdict` if the task's check, which may be asked there, fails."""
        try:
            await prepare(task, device)
        except CheckError as error:
            raise self._broken(task, error) from error

    def _broken(self, task: Task, error: CheckError) -> TaskError | ConfigError:
        if task.task_id in self._worked:
            return TaskError(f"the check of {task.task_id!r} worked before and now fails on a fresh device: {error}")
        return ConfigError(
            f"expected the check of {task.task_id!r} to work on an untouched device, but it failed: "
            f"{mask_known(str(error))}; correct the check, or what it needs"
        )

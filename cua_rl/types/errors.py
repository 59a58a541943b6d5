"""The error tree, and `boundary`, the one place that classifies foreign failures.

    CuaError
      ConfigError       the user asked for something impossible; exit status 2, before any model loads
      DeviceError       a device did not do its part (broken): an infrastructure fault, never a reward
        DeviceLostError     it is gone: terminated, unplugged, expired
        DeviceTimeoutError  the device or its provider exceeded a time limit
        DeviceServiceError  the service behind it failed or cannot be reached (5xx)
        DeviceQuotaError    no device is available (429)
        UnusableError       it works, but the policy left it with nothing to see or act on: a result, if the policy acts
      SamplingError     the model server did not answer: an infrastructure fault, never a reward
      TaskError         a task's set-up or validator failed: an infrastructure fault, never a reward
        AbsentError     what a check reads is not there, as before the task is done: not done
        CheckError      a check failed itself; a fresh device tells whether the policy made it (`rollout.fresh_check`)
        AgentError      an agent failed before it called the model, or a harness at any time: a fault
        JudgeError      the judge of a task without a validator gave no verdict: the same
      TrainingError     an optimizer step cannot be trusted; stops the run
        ParityError     sampler and trainer disagree about log-probabilities
        TrainerDeathError   a trainer process died or cannot be reached; the client starts the trainer again
        AdapterError    a published adapter did not prove itself
      DatabaseError     the database cannot be reached or does not hold what was asked for
      DiskFullError     a disk is full, or a quota is used up; stops the run

Messages say what was expected, what came (`!r`), and what to do.
"""

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, cast

_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class CuaError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(CuaError, ValueError):
    """A setting that cannot work: says what was expected, what came, and what to do."""


class DeviceError(CuaError):
    """A device failed at its own job; the rollout is dropped or retried, never rewarded."""

    kind: ClassVar[str] = "broken"
    """How the fault is counted: device/faults/<kind>."""


class DeviceLostError(DeviceError):
    """The device is gone: terminated, unplugged, expired."""

    kind = "lost"


class DeviceTimeoutError(DeviceError):
    """The device or its provider exceeded a time limit."""

    kind = "time_limit"


class DeviceServiceError(DeviceError):
    """The service behind the device failed or cannot be reached."""

    kind = "service"


class DeviceQuotaError(DeviceError):
    """No device is available, or the service is limiting requests."""

    kind = "quota"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BlockedError(DeviceError):
    """A web site turns browsers away: it refuses, shows a captcha, or forbids the page to programs."""

    kind = "blocked"


class UnusableError(DeviceError):
    """The device works, but what the policy did left it with nothing to see or to act on: a page that hangs or closed.

    While the policy acts or its work is checked this is a result, anywhere else a fault as any `DeviceError`.
    """

    kind = "unusable"


class SamplingError(CuaError):
    """The model server failed; the rollout is dropped or retried, never rewarded."""


class TaskError(CuaError):
    """A task's set-up or validator failed; the rollout is dropped or retried, never rewarded."""


class AbsentError(TaskError):
    """What a check reads is not there, such as an element of a page: the task is not done."""


class CheckError(TaskError):
    """The check of a task itself failed, or took too long: caused by the policy if it works on a fresh device."""


class AgentError(TaskError):
    """An agent failed before it called the model, or a harness at any time; dropped or retried, never rewarded."""


class JudgeError(TaskError):
    """The judge could not be reached, or gave no verdict; the rollout is dropped or retried, never rewarded."""


class TrainingError(CuaError):
    """A training step whose result cannot be trusted; the run stops with a non-zero status."""


class ParityError(TrainingError):
    """Sampler and trainer log-probabilities differ by more than the run allows."""


class TrainerDeathError(TrainingError):
    """A trainer process has died or cannot be reached; its client starts the trainer again, if it may."""


class AdapterError(TrainingError):
    """An adapter was loaded by the server but has no effect, or another one than in the trainer."""


class DatabaseError(CuaError):
    """The database cannot be reached, or a row that must exist does not."""


class DiskFullError(CuaError):
    """What was to be written does not fit: the disk is full, or the user's quota is used up."""


def is_disk_full(said: BaseException | str) -> bool:
    """Whether a log or an exception, or what it followed, says so; of errors in other languages only text is left."""
    if (isinstance(said, OSError) and said.errno in (errno.ENOSPC, errno.EDQUOT)) or _FULL.search(str(said)):
        return True
    earlier = None if isinstance(said, str) else said.__cause__ or said.__context__
    return earlier is not None and is_disk_full(earlier)


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Name the folder in a `DiskFullError` if there is no room for what the block writes."""
    try:
        yield
    except Exception as error:
        cause = first_error(error)
        if isinstance(cause, CuaError) or not is_disk_full(cause):
            raise
        raise DiskFullError(
            f"disk full: expected room in {str(folder.absolute())!r}, got {cause}; free space there or raise the quota "
            "and start the same command again"
        ) from error


@contextmanager
def boundary(kind: type[CuaError], doing: str) -> Generator[None]:
    """Turn a foreign exception into `kind`, saying what was being done; our own errors and cancellation pass."""
    try:
        yield
    except CuaError:
        raise
    except Exception as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error


def first_error(error: BaseException) -> BaseException:
    """The error to report: of a group, as concurrent tasks raise it, the first one; else `error`."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error

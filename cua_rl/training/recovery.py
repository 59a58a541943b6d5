"""What a trainer that is started again needs to be where the dead one was. Does not import torch.

A cut is a checkpoint of the trainer for this purpose; that of the run after the same step shares its files. The journal
holds the requests since the last cut that have changed the trainer. After a death, a new trainer loads the cut and
repeats them. The request that was interrupted is sent again after them: its effect died with the processes, whether or
not they had carried it out. So each optimizer step is in the weights exactly once, and no rollout is lost.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from cua_rl.training import wire
from cua_rl.types.errors import TrainingError

_WORK_PER_CUT = 20.0  # a cut may take a twentieth of the time; short steps share one


@dataclass
class Journal:
    """Requests that have changed the trainer, in order, with the kinds of their replies."""

    entries: list[tuple[wire.Request, type[wire.Reply]]] = field(
        default_factory=list[tuple[wire.Request, type[wire.Reply]]]
    )
    _due_at: float = 0.0
    """When the next cut is due, by the monotonic clock."""

    def add(self, request: wire.Request, reply: wire.Reply) -> None:
        """Note a request that was answered. One that failed may have dropped gradients: it must fail again."""
        if isinstance(
            request, wire.Start | wire.LoadState | wire.LoadReference | wire.ForwardBackward | wire.OptimStep
        ):
            self.entries.append((request, type(reply)))

    @property
    def ends_in_step(self) -> bool:
        """Whether there is something to cut, and no gradient, which checkpoints do not hold."""
        return bool(self.entries) and isinstance(self.entries[-1][0], wire.OptimStep)

    @property
    def saved(self) -> Path | None:
        """The folder from which a new trainer begins, if it holds all that the trainer is: nothing has come since."""
        match [request for request, _ in self.entries if not isinstance(request, wire.Start | wire.LoadReference)]:
            case [*_, wire.LoadState(path=path, with_optimizer=True)]:
                return path
            case _:
                return None

    @property
    def is_cut_due(self) -> bool:
        """Whether to cut after an optimizer step."""
        return self.ends_in_step and time.monotonic() >= self._due_at

    def begin_from(self, cut: Path, took_s: float | None = None) -> None:
        """Forget what the cut holds; writing it took `took_s`, None if it only has another name."""
        kept = [entry for entry in self.entries if isinstance(entry[0], wire.Start | wire.LoadReference)]
        self.entries = [*kept, (wire.LoadState(path=cut, with_optimizer=True), wire.Done)]
        if took_s is not None:
            self._due_at = time.monotonic() + _WORK_PER_CUT * took_s


def require_same(request: wire.Request, expected: type[wire.Reply], reply: wire.Reply) -> None:
    """Raises `TrainingError` if a repeated request had another outcome."""
    if type(reply) is not expected:
        raise TrainingError(
            f"expected {expected.__name__} again when {type(request).__name__} was repeated in a new trainer process, "
            f"got {reply!r}; resume the run from its last checkpoint"
        )

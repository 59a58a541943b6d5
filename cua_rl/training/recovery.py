"""When a trainer counts as dead, and how a restarted trainer gets its state back. Does not import torch.

A cut is a checkpoint of a model for this purpose; that of the run after the same step shares its files. The journal
holds the requests since the last cut that have changed the model. After a death, a new trainer loads the cut and
repeats them, for one model after the other, because none depends on another. The request that was interrupted is sent
again after them: its effect died with the processes, whether or not they had carried it out. So each optimizer step is
in the weights exactly once, and no rollout is lost.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

from cua_rl.training import wire
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import TrainingError

_BEGINNINGS = wire.Start | wire.CreateModel | wire.LoadReference  # what a cut does not hold
_WORK_PER_CUT = 20.0  # a cut may take a twentieth of the time; short steps share one
_SLOW_DISK_BYTES_PER_S = 50e6
_FLOP_PER_BYTE = 4  # forward, backward and recomputation, for each token and each weight in 16 bits
_SLOWEST_FLOP_PER_S = {True: 1e12, False: 1e10}  # of a GPU, a hundredth of what slow ones reach; of two CPU cores
_SLOWER = 20.0  # other sequences, more screenshots, a GPU that others use


@dataclass
class TimeLimits:
    """How long the trainer may take for an answer before it counts as hung and is started again.

    Everything may take `least_s`, and as long as its state needs on a slow disk. A token may take 20 times as long as
    in the fastest request of its kind, or before there is one, as long as on the slowest processor: 500,000 tokens of
    4B parameters on a GPU have 4.7 hours at first, and 26 minutes once a request of this size has taken 40 s.
    """

    weight_bytes: int
    state_bytes: int  # of the largest checkpoint
    least_s: float = 600.0  # whatever the size: kernels are compiled, a busy machine pauses
    has_gpu: bool = False
    _tokens_per_s: dict[type[wire.Request], float] = field(default_factory=dict[type[wire.Request], float])

    @classmethod
    def of_model(cls, config: TrainerConfig) -> "TimeLimits":
        """The limits for the model of a configuration."""
        # without an adapter: weights and two moments in float32, for each weight in 16 bits
        weight_bytes = sum(file.stat().st_size for file in config.model_path.glob("*.safetensors"))
        return cls(weight_bytes=weight_bytes, state_bytes=weight_bytes * (1 if config.lora_rank else 6))

    def limit_s(self, request: wire.Request) -> float:
        """Seconds after which a request without an answer counts as lost."""
        measured = self._tokens_per_s.get(_kind(request))
        slowest_s = self.weight_bytes * _FLOP_PER_BYTE / _SLOWEST_FLOP_PER_S[self.has_gpu]
        token_s = slowest_s if measured is None else _SLOWER / measured
        return self.least_s + self.state_bytes / _SLOW_DISK_BYTES_PER_S + num_tokens(request) * token_s

    def note(self, request: wire.Request, took_s: float) -> None:
        """Learn from a request that was answered."""
        if tokens_per_s := num_tokens(request) / max(took_s, 1e-3):
            kind = _kind(request)
            self._tokens_per_s[kind] = max(tokens_per_s, self._tokens_per_s.get(kind, 0.0))


def _kind(request: wire.Request) -> type[wire.Request]:
    return type(request.request if isinstance(request, wire.ForModel) else request)


def num_tokens(request: wire.Request) -> int:
    """Tokens that the trainer reads for a request, screenshots included."""
    if isinstance(request, wire.ForModel):
        return num_tokens(request.request)
    is_pass = isinstance(request, wire.Forward | wire.ForwardBackward)
    return sum(datum.model_input.length for datum in request.datums) if is_pass else 0


@dataclass
class Journal:
    """Requests that have changed a model, in order, with the kinds of their replies."""

    entries: list[tuple[wire.Request, type[wire.Reply]]] = field(
        default_factory=list[tuple[wire.Request, type[wire.Reply]]]
    )
    _due_at: float = 0.0
    """When the next cut is due, by the monotonic clock."""

    def add(self, request: wire.Request, reply: wire.Reply) -> None:
        """Note a request that was answered. One that failed may have dropped gradients: it must fail again.

        A checkpoint that could not be loaded has changed nothing.
        """
        has_gradient = isinstance(request, wire.ForwardBackward) and request.with_gradient
        is_loaded = isinstance(request, wire.LoadState) and not isinstance(reply, wire.Failed)
        if has_gradient or is_loaded or isinstance(request, _BEGINNINGS | wire.BeginStep | wire.OptimStep):
            self.entries.append((request, type(reply)))

    @property
    def ends_in_step(self) -> bool:
        """Whether there is something to cut, and no gradient, which checkpoints do not hold."""
        return bool(self.entries) and isinstance(self.entries[-1][0], wire.OptimStep)

    @property
    def saved(self) -> Path | None:
        """The folder from which a new trainer begins, if it holds all that the trainer is: nothing has come since."""
        match [request for request, _ in self.entries if not isinstance(request, _BEGINNINGS)]:
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
        kept = [entry for entry in self.entries if isinstance(entry[0], _BEGINNINGS)]
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

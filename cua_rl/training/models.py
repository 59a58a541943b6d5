# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The models that a trainer trains: adapters on one base model, each with its own optimizer, gradients and counters."""

from dataclasses import dataclass

import torch

from cua_rl.training import checkpoint
from cua_rl.training.config import LoraSpec
from cua_rl.training.device_memory import free_memory_bytes, release_memory
from cua_rl.training.metrics import Account, ModelShape, held_bytes, measure_shape
from cua_rl.training.model import PolicyModel
from cua_rl.training.ranks import Ranks
from cua_rl.types.errors import ConfigError, TrainingError


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a model has been trained, and what its next optimizer step depends on."""

    optimizer: torch.optim.AdamW
    shape: ModelShape
    num_trained_tokens: int = 0
    """Those of the gradients that wait for the optimizer step."""
    is_weighted: bool = False
    """Whether these gradients were summed with weights."""
    policy_version: int = 0

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.num_trained_tokens = 0

    @property
    def missing_bytes(self) -> int:
        """Memory of gradients and moments that are not allocated yet."""
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        return sum(one.nbytes * ((one.grad is None) + 2 * (one not in self.optimizer.state)) for one in parameters)


class Models:
    """The models by name, of which one is in use; a trainer begins with the model "". Switching copies nothing."""

    def __init__(self, model: PolicyModel, account: Account, ranks: Ranks) -> None:
        self._model = model
        self._account = account
        self._ranks = ranks
        self.now = self._begin()
        """The progress of the model in use."""
        self._by_name = {"": self.now}

    def create(self, name: str, spec: LoraSpec) -> None:
        """Add a model with fresh weights and use it.

        Raises:
            ConfigError: there is one of this name, the settings allow one model only, or memory does not suffice for
                its weights, their gradient and the optimizer's two moments.
        """
        if name in self._by_name:
            raise ConfigError(f"expected a new name for a model, got {name!r} again; drop that model first")
        self._model.check_added(spec)
        # what the models that exist have not allocated yet is spoken for, too
        unmade = sum(one.missing_bytes for one in self._by_name.values())
        free = min(self._ranks.gather(free_memory_bytes(self._model.device) - unmade, int))
        needed = 4 * 4 * self._model.adapters.count_parameters(spec)  # weights, gradient and two moments in float32
        if needed > free:
            raise ConfigError(
                f"expected {needed / 2**30:.2f} GiB of memory for weights, gradient and moments of model {name!r} of "
                f"rank {spec.rank}, got {max(0, free) / 2**30:.2f} GiB beside {len(self._by_name)} models; drop one, "
                "or lower the rank"
            )
        self._model.adapters.add(name, spec)
        self._by_name[name] = self._begin()
        self.use(name)
        self._account.held_bytes = held_bytes(self._model.base)

    def drop(self, name: str) -> None:
        """Free a model that `create` added; raises `TrainingError` if there is none."""
        if not name:
            raise TrainingError("expected a model that was created, got the one that the trainer begins with")
        self.use(name)
        self.use("")
        del self._by_name[name]
        self._model.adapters.drop(name)
        release_memory()
        self._account.held_bytes = held_bytes(self._model.base)

    def use(self, name: str) -> None:
        """Make a model the one that all calls of the trainer are about; raises `TrainingError` if there is none."""
        if name not in self._by_name:
            raise TrainingError(f"expected a model among {sorted(self._by_name)}, got {name!r}; create it first")
        if (chosen := self._by_name[name]) is not self.now:
            self._model.adapters.use(name)
            self.now, self._account.shape = chosen, chosen.shape

    def make_optimizer(self) -> torch.optim.AdamW:
        """An optimizer of the model in use that has not taken a step."""
        groups = checkpoint.by_kind(self._model.trainable_parameters)
        return torch.optim.AdamW([{"params": group} for group in groups], fused=True)

    def _begin(self) -> Progress:
        return Progress(optimizer=self.make_optimizer(), shape=measure_shape(self._model.base))

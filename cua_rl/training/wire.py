"""Messages between controller and trainer worker; `link.py` carries them. Does not import torch.

The first request is `Start`; closing the connection ends the worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cua_rl.training.config import LoraSpec, LossConfig, OptimConfig, TrainerConfig
from cua_rl.types.rollout import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load the model; answered by `Started`."""

    config: TrainerConfig


AdapterPart = Literal["language", "vision"]
"""Modules of the language model, or of vision tower and merger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """An adapter that is random in one part of the model and zero in the other."""

    strength: float
    """Norm of its updates as a share of the weights' norm."""
    part: AdapterPart = "language"


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginStep:
    """Forget the features of earlier steps' screenshots; answered by `Done`.

    Their last bits depend on which others were encoded with them, so a step that used them could not be made again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Log-probabilities of the trained tokens; answered by `ForwardOutput`."""

    datums: tuple[Datum, ...]
    temperature: float
    weights: Literal["policy", "reference", "base", "probe"]
    """reference: the policy at the start of training (`LoadReference`); base: with the adapter disabled; probe: with
    the adapter of `probe`."""
    probe: Probe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    """Add the gradient of the loss, summed over trained tokens; answered by `ForwardBackwardOutput`.

    The loss of a token is multiplied by its datum's token weight; that of cross entropy by its advantage, too. Further
    inputs of the loss are sent beside the datums, one entry per datum, because only datums are stored.
    """

    datums: tuple[Datum, ...]
    loss: LossConfig
    token_weights: tuple[float, ...] | None = None
    """Weight of each trained token of the datum in the sum; None: `OptimStep` takes the mean over trained tokens."""
    proximal_logprobs: tuple[tuple[float, ...], ...] | None = None
    """Log-probabilities of the policy at the start of the step, per token of the datum; None: the current policy's."""
    reference_logprobs: tuple[tuple[float, ...], ...] | None = None
    """Log-probabilities of the policy that training started from, per token of the datum; for `kl_loss_coef`."""
    ratio_masks: tuple[tuple[bool, ...], ...] | None = None
    """gspo: all tokens of a datum have one ratio, whose mean is over these tokens; None: each turn has its own."""
    with_gradient: bool = True
    """False: only compute what the loss is; gradients stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep:
    """Step along the gradient since the last step; answered by `OptimStepOutput`.

    Gradients that were summed without `token_weights` are divided by the number of their trained tokens.
    """

    optim: OptimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState:
    """Write a checkpoint; answered by `Done`."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """Restore a checkpoint; answered by `Done`."""

    path: Path
    with_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReference:
    """Use the adapter in a folder as the reference model, instead of the base model; answered by `Done`."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsForSampler:
    """Write what the sampler loads: the adapter, or the whole model in full training; answered by `Done`."""

    path: Path
    probe: Probe | None = None
    """Write this instead of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMetrics:
    """Report work, speed and memory since the last such request; answered by `TrainerMetricsOutput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithFiles:
    """A request about a folder of the controller that the ranks cannot reach; answered by `FilesOutput`.

    The ranks carry it out in their own folder.
    """

    request: SaveState | LoadState | LoadReference | SaveWeightsForSampler
    files: Mapping[str, bytes]
    """What is in the folder: contents by relative path; empty for a folder that the request writes."""


ModelRequest = (
    Forward | ForwardBackward | OptimStep | SaveState | LoadState | LoadReference | SaveWeightsForSampler | WithFiles
)
"""What is asked of one model; by itself, of the one that the trainer begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel:
    """Train another adapter on the same base model, with its own optimizer and gradients; answered by `Done`."""

    model: str
    spec: LoraSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DropModel:
    """Free what `CreateModel` made; answered by `Done`."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForModel:
    """A request to a model that `CreateModel` made; answered as the request."""

    model: str
    request: ModelRequest


Request = (
    Start
    | BeginStep
    | Forward
    | ForwardBackward
    | OptimStep
    | SaveState
    | LoadState
    | LoadReference
    | SaveWeightsForSampler
    | TrainerMetrics
    | WithFiles
    | CreateModel
    | DropModel
    | ForModel
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The model is loaded."""

    device: str
    num_trainable_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """Per datum, aligned with its tokens, 0.0 off-mask."""

    training_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """The result of a forward and backward pass."""

    training_logprobs: tuple[tuple[float, ...], ...]
    """Per datum, aligned with its tokens, 0.0 off-mask."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStepOutput:
    """The result of an optimizer step."""

    policy_version: int
    """Completed optimizer steps including this one."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    num_trained_tokens: int
    """Trained tokens since the last step."""
    machine: str = ""
    """What computed it: on another kind of machine, sums are rounded differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMetricsOutput:
    """Work, speed and memory of all ranks, under metric names."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The request was carried out; `policy_version` counts completed optimizer steps."""

    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOutput:
    """The answer to the request of a `WithFiles`, and the folder that it wrote."""

    reply: Done
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request was refused or failed; the weights are unchanged."""

    kind: Literal["config", "disk", "training"]
    message: str


Reply = (
    Started
    | ForwardOutput
    | ForwardBackwardOutput
    | OptimStepOutput
    | TrainerMetricsOutput
    | Done
    | FilesOutput
    | Failed
)

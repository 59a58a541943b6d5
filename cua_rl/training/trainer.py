# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Training inside the worker: log-probabilities, gradients, optimizer steps, checkpoints."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cua_rl.metrics import merge_metrics
from cua_rl.training import checkpoint, wire
from cua_rl.training.batching import (
    MicroBatch,
    align_with_tokens,
    check_datums,
    check_rows,
    empty_micro_batch,
    make_loss_tokens,
    make_micro_batches,
    token_weights,
)
from cua_rl.training.config import ROW_TOKENS, VISION_CACHE_GIB, TrainerConfig
from cua_rl.training.device_memory import limit_memory, release_memory, shortage
from cua_rl.training.folders import write_folder
from cua_rl.training.grammars import Grammars
from cua_rl.training.head import TokenScores
from cua_rl.training.loss_checks import check_loss_config
from cua_rl.training.loss_terms import TokenLoss
from cua_rl.training.losses import token_losses
from cua_rl.training.metrics import Account, held_bytes, loss_metrics, measure_shape
from cua_rl.training.model import PolicyModel, describe_machine
from cua_rl.training.models import Models
from cua_rl.training.prefixes import split_groups
from cua_rl.training.ranks import Agreement, Ranks, share_out
from cua_rl.training.vision import FeatureCache, ImagePreprocessor, PreparedAhead, encode_images
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum, ImageChunk

_T = TypeVar("_T")
_RESULTS = tuple[tuple[MicroBatch, ...], tuple[TokenScores, ...], tuple[TokenLoss, ...], str | None]
"""What a rank tells the others about its passes; a text means that memory ran out."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The datums of one request, ready for the model."""

    datums: Sequence[Datum]
    micro_batches: list[MicroBatch]
    images: Mapping[str, ImageChunk]
    """Every distinct screenshot by sha256."""
    ahead: PreparedAhead
    num_idle_passes: int = 0
    """Passes through a sharded model in which only other ranks have work."""

    def images_of(self, place: int) -> dict[str, ImageChunk]:
        """The distinct screenshots of a micro-batch; none of one behind the last."""
        parts = self.micro_batches[place : place + 1]
        return {name: self.images[name] for part in parts for name in part.image_hashes}


class _OutOfMemory(TrainingError):
    """A device's memory did not suffice, on this rank or another; raised on all."""


class Trainer:
    """Holds model and optimizer; gradients of `forward_backward` calls accumulate until `optim_step`.

    It may train several `models`; all calls are about the one in use.
    """

    def __init__(self, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        torch.manual_seed(config.seed)
        limit_memory(config.memory_fraction)
        self._ranks = ranks or Ranks()
        self._config = config
        self._context = self._ranks.share_rows(config.context_parallel)
        self.model = PolicyModel(config, self._ranks.place, self._context)
        self._preprocessor = ImagePreprocessor(config.model_path, config.max_pixels)
        self._grammars = Grammars(config.model_path, self.model.vocabulary_size)
        self._cache = FeatureCache(
            int(2**30 * (VISION_CACHE_GIB if config.vision_cache_gib is None else config.vision_cache_gib))
        )
        self.account = Account(
            shape=measure_shape(self.model.base),
            device=self.model.device,
            dtype=self.model.dtype,
            trains_base=self.model.trains_base,
            held_bytes=held_bytes(self.model.base),
        )
        self.models = Models(self.model, self.account, self._ranks)
        self._row_tokens = config.micro_batch_tokens or ROW_TOKENS

    @property
    def policy_version(self) -> int:
        """Completed optimizer steps of the model in use."""
        return self.models.now.policy_version

    def begin_step(self) -> None:
        """Forget the features of earlier steps' screenshots."""
        self._cache.clear()

    def forward(self, request: wire.Forward) -> wire.ForwardOutput:
        """Log-probabilities under the policy, the reference model, or the base model."""
        batch, scores = self._within_memory(lambda: self._score(request))
        logprobs = [part.logprobs for part in scores]
        return wire.ForwardOutput(training_logprobs=align_with_tokens(batch.datums, batch.micro_batches, logprobs))

    def _score(self, request: wire.Forward) -> tuple[_Batch, list[TokenScores]]:
        """Forward passes of this rank's datums; returns the micro-batches and results of all ranks."""
        with self._ranks.agreement(_RESULTS) as agreement, torch.no_grad():
            batch = self._prepare(request.datums)
            match request.weights:
                case "policy":
                    weights, has_adapter = nullcontext(), True
                case "reference":
                    adapters = self.model.adapters
                    weights, has_adapter = adapters.reference_weights(), adapters.has_reference
                case "probe":
                    assert request.probe is not None, "expected a probe with weights='probe', got none"
                    weights, has_adapter = self.model.adapters.probe_weights(request.probe), True
                case "base":
                    weights, has_adapter = self.model.adapters.switched_off(), False
            scores, missing = list[TokenScores](), None
            try:
                with weights, self._in_step(), batch.ahead:
                    for place in range(len(batch.micro_batches)):
                        scores.append(self._scores(batch, place, request.temperature, adapter=has_adapter))
                    self._make_idle_passes(batch)
            except RuntimeError as error:
                missing = shortage(error)
            batch, scores, _ = self._share(agreement, batch, scores, [], missing)
        return batch, scores

    def forward_backward(self, request: wire.ForwardBackward) -> wire.ForwardBackwardOutput:
        """Add the gradient of the summed loss; a loss that is not finite drops all gradients and raises."""
        check_loss_config(request.loss)
        check_rows(request)
        encoded_before = self.account.num_encoded_images
        if not request.with_gradient:
            with torch.no_grad():
                return self._report(request, encoded_before, *self._within_memory(lambda: self._accumulate(request)))
        now, is_weighted = self.models.now, request.token_weights is not None
        if now.num_trained_tokens and now.is_weighted != is_weighted:
            raise TrainingError(
                "expected token_weights with all forward_backward requests of an optimizer step or with none, got both "
                "kinds: their gradients cannot be added up"
            )
        # for a second attempt, which sharded ranks do not have
        gradients = [] if self.model.is_sharded else [one.grad for one in self.model.trainable_parameters]
        earlier = [None if gradient is None else gradient.to("cpu", copy=True) for gradient in gradients]

        def attempt() -> tuple[_Batch, list[TokenScores], list[TokenLoss]]:
            # without what a first attempt may have added
            for parameter, gradient in zip(self.model.trainable_parameters, earlier, strict=not self.model.is_sharded):
                parameter.grad = None if gradient is None else gradient.to(self.model.device, copy=True)
            return self._accumulate(request)

        try:
            results = self._within_memory(attempt)
        except BaseException:
            self.models.now.drop_gradients()
            raise
        now.num_trained_tokens += sum(len(part.logprobs) for part in results[1])
        now.is_weighted = is_weighted
        return self._report(request, encoded_before, *results)

    def _report(
        self,
        request: wire.ForwardBackward,
        encoded_before: int,
        batch: _Batch,
        scores: Sequence[TokenScores],
        losses: Sequence[TokenLoss],
    ) -> wire.ForwardBackwardOutput:
        logprobs = [part.logprobs for part in scores]
        all_logprobs = torch.cat(logprobs)
        sampling_logprobs = torch.cat([part.sampling_logprobs for part in batch.micro_batches])
        num_encoded_images = sum(self._ranks.gather(self.account.num_encoded_images - encoded_before, int))
        weights = token_weights(request, _join([part.datum_indices for part in batch.micro_batches]), all_logprobs)
        if request.token_weights is None:  # the optimizer step takes the mean
            weights /= len(weights)
        of_loss = loss_metrics(request.loss, losses, all_logprobs, sampling_logprobs.to(all_logprobs.device), weights)
        counts = {
            "policy/entropy": float(torch.cat([part.entropies for part in scores]).double().mean()),
            "optim/num_datums": float(len(batch.datums)),
            "optim/num_micro_batches": float(len(batch.micro_batches)),
            "optim/trained_tokens": float(len(all_logprobs)),
            "optim/total_tokens": float(sum(datum.model_input.length for datum in batch.datums)),
            "optim/micro_batch_tokens": float(self._row_tokens),
            "optim/encoded_images": float(num_encoded_images),
        }
        return wire.ForwardBackwardOutput(
            training_logprobs=align_with_tokens(batch.datums, batch.micro_batches, logprobs),
            metrics=merge_metrics(of_loss, counts),
        )

    def _within_memory(self, attempt: Callable[[], _T]) -> _T:
        """The attempt's result; where memory ran out, that of a second one with shorter rows and recomputation.

        Both stay for the rest of the run: what did not fit once will not fit the next time. Sharded ranks have no
        second attempt, because they wait for each other inside the model.
        """
        try:
            return attempt()
        except _OutOfMemory as error:
            missing = str(error)
        # the error is gone, and with its traceback the tensors of the first attempt
        before, self._row_tokens = self._row_tokens, max(1, self._row_tokens // 2)
        self.model.recompute_activations()
        self.account.count("memory_retries", 1)
        release_memory()
        logger.warning(
            "out of memory with micro_batch_tokens=%d: trying again with %d and gradient_checkpointing=true, and so "
            "for the rest of the run (%s)",
            before,
            self._row_tokens,
            missing,
        )
        try:
            return attempt()
        except _OutOfMemory as error:
            raise TrainingError(
                f"expected a step that fits into memory, got {error} with micro_batch_tokens={before}, and again with "
                f"{self._row_tokens} and gradient_checkpointing=true; lower server.max_model_len or "
                "server.gpu_memory_utilization, or set trainer.sharding"
            ) from None

    def _accumulate(self, request: wire.ForwardBackward) -> tuple[_Batch, list[TokenScores], list[TokenLoss]]:
        """Forward and backward passes of this rank's datums; returns the micro-batches and results of all ranks."""
        scores, losses, totals, missing = list[TokenScores](), list[TokenLoss](), list[float](), None
        with self._ranks.agreement(_RESULTS) as agreement:
            batch = self._prepare(request.datums)
            try:
                with self._in_step(), batch.ahead:
                    for place, part in enumerate(batch.micro_batches):
                        logprobs, entropies = self._scores(batch, place, request.loss.temperature)
                        loss = token_losses(request.loss, make_loss_tokens(request, part, logprobs))
                        total = (loss.losses * token_weights(request, part.datum_indices, logprobs)).sum()
                        # unless none is asked for, or only the vision tower is adapted, and the row is text
                        if total.requires_grad:
                            total.backward()
                        scores.append(TokenScores(logprobs.detach(), entropies))
                        losses.append(loss.detach())
                        totals.append(total.item())
                    self._make_idle_passes(batch)
            except RuntimeError as error:
                missing = shortage(error)
            for part, total in zip(batch.micro_batches, totals, strict=missing is None):
                if not math.isfinite(total):
                    rollouts = sorted({batch.datums[index].rollout_id for index in part.datum_indices})
                    raise TrainingError(
                        f"expected a finite loss, got {total!r} in the micro-batch of rollouts {rollouts!r}; "
                        "the weights are unchanged"
                    )
            return self._share(agreement, batch, scores, losses, missing)

    def _in_step(self) -> AbstractContextManager[None]:
        is_waited_for = self.model.is_sharded or self._context.size > 1
        return self._ranks.together() if is_waited_for else nullcontext()

    def _make_idle_passes(self, batch: _Batch) -> None:
        """Provide this rank's shards to ranks that have more to compute."""
        for _ in range(batch.num_idle_passes):
            features = self._features_of(batch, {})
            logprobs, _ = self.model.scores(empty_micro_batch(self._context.size), features, temperature=1.0)
            if torch.is_grad_enabled():
                logprobs.sum().backward()

    def optim_step(self, request: wire.OptimStep) -> wire.OptimStepOutput:
        """Take an AdamW step along the summed gradient, divided by its trained tokens if it was summed without weights.

        Raises `TrainingError` and drops the gradients if their norm is not finite.
        """
        now, num_trained_tokens = self.models.now, self.models.now.num_trained_tokens
        if not num_trained_tokens:
            raise TrainingError("expected forward_backward before optim_step, got no gradient to step along")
        optim = request.optim
        self._ranks.sum_gradients(self.model.trainable_parameters)
        gradients = [p.grad for p in self.model.trainable_parameters if p.grad is not None]
        if not now.is_weighted:
            for gradient in gradients:
                gradient.mul_(1 / num_trained_tokens)
        norms = [torch.nn.utils.get_total_norm(kind) for kind in checkpoint.by_kind(gradients)]
        norm = torch.nn.utils.get_total_norm([checkpoint.gather_whole(one, keep=True) for one in norms])
        if not math.isfinite(norm.item()):
            self.models.now.drop_gradients()
            raise TrainingError(f"expected a finite gradient norm, got {norm.item()!r}; no step was taken")
        if optim.grad_clip_norm > 0.0:
            for kind in checkpoint.by_kind(self.model.trainable_parameters):
                torch.nn.utils.clip_grads_with_norm_(kind, optim.grad_clip_norm, norm)
        for group in now.optimizer.param_groups:
            group["lr"], group["betas"] = optim.learning_rate, (optim.beta1, optim.beta2)
            group["eps"], group["weight_decay"] = optim.eps, optim.weight_decay
        now.optimizer.step()
        self.models.now.drop_gradients()
        now.policy_version += 1
        return wire.OptimStepOutput(
            policy_version=now.policy_version,
            grad_norm=norm.item(),
            learning_rate=optim.learning_rate,
            num_trained_tokens=num_trained_tokens,
            machine=describe_machine(self.model.device, self._ranks.size),
        )

    def save_state(self, path: Path) -> None:
        """Write a checkpoint; continuing from it equals never having stopped."""
        if self.models.now.num_trained_tokens:
            raise TrainingError("expected optim_step before save_state: gradients are not part of a checkpoint")
        rng = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]
        is_first = self._ranks.rank == 0
        with self._in_step():
            optimizer = checkpoint.gather_optimizer(
                self.models.now.optimizer, self.model.trainable_parameters, keep=is_first
            )
            write = self.model.gather_weights(keep=is_first)
        state = checkpoint.TrainerState(policy_version=self.policy_version, optimizer=optimizer, rng=rng)
        if is_first:
            checkpoint.save_checkpoint(path, state, write)

    def load_state(self, path: Path, *, with_optimizer: bool) -> None:
        """Restore a checkpoint; without the optimizer only the weights, and the policy version stays as it is."""
        state = checkpoint.load_checkpoint(path, self.model.load_weights)
        self.models.now.drop_gradients()
        self.models.now.optimizer = self.models.make_optimizer()
        if not with_optimizer:
            return
        checkpoint.load_optimizer(self.models.now.optimizer, self.model.trainable_parameters, state.optimizer)
        torch.set_rng_state(state.rng[0])
        if torch.cuda.is_available() and len(state.rng) == 1 + torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state.rng[1:])
        self.models.now.policy_version = state.policy_version

    def save_weights_for_sampler(self, path: Path, probe: wire.Probe | None = None) -> None:
        """Write the adapter folder, or the model folder if everything is trained; or a probe."""
        with nullcontext() if probe is None else self.model.adapters.probe_weights(probe):
            with self._in_step():
                write = self.model.gather_weights(keep=self._ranks.rank == 0)
            if self._ranks.rank == 0:
                write_folder(path, write)
        release_memory()  # rollouts are next

    def _prepare(self, datums: Sequence[Datum]) -> _Batch:
        if not self.model.is_sharded:
            return self._pack(datums)
        with self._ranks.agreement(int) as agreement:
            batch = self._pack(datums)
            most = max(agreement.share(len(batch.micro_batches)))
        return replace(batch, num_idle_passes=most - len(batch.micro_batches))

    def _pack(self, datums: Sequence[Datum]) -> _Batch:
        check_datums(datums, vocabulary_size=self.model.vocabulary_size)
        num_shares, ours = (number // self._context.size for number in (self._ranks.size, self._ranks.rank))
        lengths = [datum.model_input.length for datum in datums]
        # of at most half a rank's share, so that all ranks get about as much
        parts = split_groups(datums, sum(lengths) // (2 * num_shares) if self.model.shares_prefixes else 0)
        chosen = share_out([sum(lengths[index] for index in part) for part in parts], num_shares)[ours]
        mine = sorted(index for place in chosen for index in parts[place])
        images = {chunk.image.sha256: chunk for index in mine for chunk in datums[index].model_input.image_chunks}
        micro_batches = make_micro_batches(
            datums,
            mine,
            grids={name: self._preprocessor.grid(image) for name, image in images.items()},
            rope_index=self.model.rope_index,
            image_token_id=self.model.image_token_id,
            max_tokens=self._row_tokens,
            shares_prefixes=self.model.shares_prefixes,
        )
        ahead = PreparedAhead(self._preprocessor.prepare)
        return _Batch(datums=datums, micro_batches=list(micro_batches), images=images, ahead=ahead)

    def _share(
        self,
        agreement: Agreement,
        batch: _Batch,
        scores: list[TokenScores],
        losses: list[TokenLoss],
        missing: str | None,
    ) -> tuple[_Batch, list[TokenScores], list[TokenLoss]]:
        """The micro-batches and results of all ranks, on every rank; a shortage of memory on one is one on all."""
        if self._ranks.size == 1:
            if missing is not None:
                raise _OutOfMemory(missing)
            return batch, scores, losses
        # without positions, the largest part of a micro-batch, which is not needed any more
        bare = [replace(part, position_ids=part.position_ids[:, :, :0]) for part in batch.micro_batches]
        ours = (bare, scores, losses)
        if self._context.rank:  # the first of those that share rows speaks for all of them
            ours = ([], [], [])
        told = agreement.share((*ours, missing))
        micro_batches, all_scores, all_losses, shortages = zip(*told, strict=True)
        for rank, message in enumerate(shortages):
            if message is not None:
                raise _OutOfMemory(f"rank {rank}: {message}")
        return replace(batch, micro_batches=_join(micro_batches)), _join(all_scores), _join(all_losses)

    def _scores(self, batch: _Batch, place: int, temperature: float, *, adapter: bool = True) -> TokenScores:
        micro_batch, backward = batch.micro_batches[place], torch.is_grad_enabled()
        features, following = self._features_of(batch, batch.images_of(place)), batch.images_of(place + 1)
        batch.ahead.start(following if self.model.trains_vision else self._cache.missing(following))
        if self._context.rank == 0:
            self.account.add_sequences(
                micro_batch.lengths,
                micro_batch.num_shared,
                micro_batch.predictors(),
                backward=backward,
                adapter=adapter and not self.model.trains_base,
            )
        allowed = self._grammars.allowed_tokens([batch.datums[index] for index in micro_batch.datum_indices])
        return self.model.scores(micro_batch, features, temperature, allowed)

    def _features_of(self, batch: _Batch, images: Mapping[str, ImageChunk]) -> Mapping[str, Tensor]:
        """Features from the vision tower; a frozen one encodes a screenshot again only if the cache has dropped it."""
        if self.model.trains_vision:
            return self._encode(batch, images)
        encoded_before = self.account.num_encoded_images
        with torch.no_grad():
            features = self._cache.features(images.values(), partial(self._encode, batch))
        self.account.count("reused_images", len(images) - (self.account.num_encoded_images - encoded_before))
        return features

    def _encode(self, batch: _Batch, images: Mapping[str, ImageChunk]) -> Mapping[str, Tensor]:
        prepared = batch.ahead.take(images)
        self.account.add_encoded_images((image.grid for image in prepared.values()), backward=torch.is_grad_enabled())
        with self.model.precision():
            agree = self._ranks.largest if self.model.is_sharded else int
            return encode_images(self.model.base.model.visual, prepared, agree)


def _join(lists: Sequence[Sequence[_T]]) -> list[_T]:
    return [entry for one in lists for entry in one]

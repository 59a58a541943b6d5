"""vLLM's CPU worker with LoRA as one matrix product per adapter. Runs inside the model server only (`--worker-cls`).

vLLM's own CPU path copies the adapter's weights once per token, which costs more than the whole model when the model is
small; and a request without adapter in a batch with adapters gets the last slot's weights instead of none. This module
fixes both.

It also fixes requests with a seed whose prompt is computed in chunks: vLLM rewinds their random generator by an offset,
which generators on CPU do not have, and the engine dies. And mixtures of experts: as soon as there are adapters, vLLM
chooses a Triton kernel for the experts, which a CPU does not have; the experts themselves get no adapters
(`Family.served_modules`), so those kernels do that serve a model without any.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

_Tensors = tuple[torch.Tensor, ...]


class GroupedLoraCPU(PunicaWrapperCPU):
    """Applies adapters group by group: all tokens of one adapter at once, tokens without adapter not at all."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Take over a batch's token-to-slot mapping and sort it into groups once, for all layers."""
        super().update_metadata(*args, **kwargs)
        self._token_groups = _groups(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: _Tensors,
        lora_b_stacked: _Tensors,
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: _Tensors | None = None,
        **kwargs: Any,
    ) -> None:
        """Add `x A^T B^T * scale` to `y` [tokens, out] in place, one slice of `y` per pair of A and B."""
        for slot, rows in self._token_groups:
            inputs = x if rows is None else x[rows]
            start = 0
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                _add(y[:, start : start + width], (inputs @ a[slot, 0].t()) @ b[slot, 0].t(), rows, scale)
                start += width

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Leave the logits as they are: the trainer's adapters have nothing for the language-model head.

        Which adapter a row needs would be unknown, too: rows are requests while tokens are sampled, but tokens of a
        single request where the log-probabilities of a prompt are requested.
        """


def _groups(slots: torch.Tensor) -> list[tuple[int, torch.Tensor | None]]:
    """The slots in use (-1 is no adapter, left out) with the rows of each; None stands for all rows."""
    present: list[int] = torch.unique(slots).tolist()
    if len(present) == 1:
        return [(present[0], None)] if present[0] >= 0 else []
    return [(slot, torch.nonzero(slots == slot).squeeze(1)) for slot in present if slot >= 0]


def _add(target: torch.Tensor, delta: torch.Tensor, rows: torch.Tensor | None, scale: float) -> None:
    """Add in place; the adapter and the model may pad their outputs differently."""
    width = min(target.shape[1], delta.shape[1])
    target, delta = target[:, :width], delta[:, :width].to(target.dtype)
    if rows is None:
        target.add_(delta, alpha=scale)
    else:
        target.index_add_(0, rows, delta, alpha=scale)


class RewindingModelRunner(CPUModelRunner):
    """What is drawn for unfinished prompts, and thrown away, leaves the requests' random generators as they were."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = {index: generator.get_state() for index, generator in self._generators_of_discarded().items()}
        output = super()._sample(*args, **kwargs)
        for index, state in before.items():
            self.input_batch.generators[index].set_state(state)
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._generators_of_discarded()
        for index in hidden:
            del self.input_batch.generators[index]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    def _generators_of_discarded(self) -> dict[int, torch.Generator]:
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        generators = self.input_batch.generators
        return {index: generators[index] for index in discarded if index in generators}


class GroupedLoraCPUWorker(CPUWorker):
    """The CPU worker, told to use `GroupedLoraCPU`, `RewindingModelRunner` and a CPU's kernels for experts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        wrapper = f"{__name__}.{GroupedLoraCPU.__name__}"
        type(current_platform).get_punica_wrapper = classmethod(lambda _: wrapper)  # pyright: ignore[reportAttributeAccessIssue]
        FusedMoEConfig.is_lora_enabled = property(lambda _: False, lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownLambdaType]
        cpu_worker.CPUModelRunner = RewindingModelRunner  # pyright: ignore[reportPrivateImportUsage]
        super().__init__(*args, **kwargs)

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A LoRA linear layer that adds its update inside the matrix products instead of in passes of its own."""

from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor
from torch.autograd.function import FunctionCtx


class FusedLoraLinear(PeftLinear):
    """peft's layer with a float32 short cut: the same sums, about half of the passes over the activations.

    peft picks it for `nn.Linear` (see `_attach_lora`). Under autocast, or with the adapter off, peft's own code runs.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] -> x W^T + scaling * x A^T B^T [..., out]."""
        base = self.get_base_layer()
        if self.disable_adapters or self.merged or x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type):
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        return _LoraLinear.apply(x, base.weight, base.bias, a, b, self.scaling["default"])  # type: ignore[no-any-return]


class _LoraLinear(torch.autograd.Function):
    """Rows x [n, in], frozen weight [out, in] and bias [out], a [rank, in], b [out, rank]."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override] - torch's own takes anything
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ a.T
        output = torch.nn.functional.linear(rows, weight, bias).addmm_(inner, b.T, alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, a, b)
        ctx.scaling = scaling  # type: ignore[attr-defined]
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        rows, inner, weight, a, b = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        inner_gradient = (gradient @ b).mul_(ctx.scaling)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = (gradient @ weight).addmm_(inner_gradient, a).view(*gradients[0].shape[:-1], -1)
        return to_x, None, None, inner_gradient.T @ rows, (gradient.T @ inner).mul_(ctx.scaling), None

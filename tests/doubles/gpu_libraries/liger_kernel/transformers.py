"""The two layers in PyTorch, reading the attributes that the real ones read."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class LigerRMSNorm(nn.Module):
    num_calls = 0

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        assert (self.offset, self.casting_mode, self.in_place, self.row_mode) == (0.0, "llama", False, None)
        LigerRMSNorm.num_calls += 1
        states = hidden_states.float()
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * states.to(hidden_states.dtype)


class LigerSwiGLUMLP(nn.Module):
    num_calls = 0

    def forward(self: Any, x: Tensor) -> Tensor:
        LigerSwiGLUMLP.num_calls += 1
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))

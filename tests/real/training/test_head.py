"""The language-model head in chunks against the plain computation."""

import pytest
import torch

from cua_rl.training import head
from tests.rounding import assert_equal_but_for_rounding

NUM_ROUNDINGS = 8 + 50 + 50 + 11
"""Products of 8 terms, a softmax over 50, gradients that add up 50 rows or 11 tokens."""


@pytest.mark.parametrize("trained", [False, True])
def test_chunked_logprobs_and_gradients_equal_the_plain_ones(monkeypatch: pytest.MonkeyPatch, trained: bool) -> None:
    monkeypatch.setattr(head, "_MAX_LOGITS", 3 * 50)  # 3 rows at a time, the last chunk shorter
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 8, requires_grad=True), torch.randn(50, 8, requires_grad=trained)
    targets, factors = torch.randint(50, (11,)), torch.randn(11)
    inputs = (hidden, weight) if trained else (hidden,)

    logprobs, entropies = head.token_scores(hidden, weight, targets, 0.7)
    found = torch.autograd.grad((logprobs * factors).sum(), inputs)

    distributions = (hidden @ weight.T / 0.7).log_softmax(1)
    plain = distributions[torch.arange(11), targets]
    assert_equal_but_for_rounding(logprobs.detach(), plain.detach(), NUM_ROUNDINGS)
    assert_equal_but_for_rounding(entropies, -(distributions.exp() * distributions).sum(1).detach(), NUM_ROUNDINGS)
    assert not entropies.requires_grad
    for one, other in zip(found, torch.autograd.grad((plain * factors).sum(), inputs), strict=True):
        assert_equal_but_for_rounding(one, other, NUM_ROUNDINGS)

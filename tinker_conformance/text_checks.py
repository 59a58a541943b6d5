"""T1, LoRA on text through the SDK: log-probabilities, losses and their gradients, steps, sampling, checkpoints."""

from functools import partial
from inspect import signature
from typing import Any, get_args

import numpy as np
import tinker
from tinker import types

from tinker_conformance import data
from tinker_conformance.data import find_eta, logprobs, move, step, supervised, weighted
from tinker_conformance.expect import NotApplicable, Numbers, expect, expect_close, expect_ratio
from tinker_conformance.server import Server, client_of, refusal_of, wait

SAME = 1e-4
"""How far two forward passes of one model may differ, which other sequences of a batch can change."""


def every_target_has_the_log_probability_of_its_own_sequence(server: Server) -> None:
    """In a batch of different lengths as in a batch of its own."""
    model = server.new_model()
    batch = [data.text(seed, count) for seed, count in ((1, 10), (2, 3), (3, 40), (4, 1))]
    rows = logprobs(model, *batch)
    expect(
        [len(row) for row in rows] == [10, 3, 40, 1], "10, 3, 40 and 1 log-probabilities", [len(row) for row in rows]
    )
    for each, together in zip(batch, rows, strict=True):
        expect(bool((together <= 0).all()), "log-probabilities, which are at most 0", together)
        expect_close(together, logprobs(model, each)[0], 10 * SAME, "log-probabilities as in a batch of its own")


def a_log_probability_depends_on_the_tokens_before_it_alone(server: Server) -> None:
    model = server.new_model()
    ids = data.tokens(1, 11)
    changed = [*ids[:6], ids[6] + 1, *ids[7:]]
    one, other = logprobs(
        model, *(data.datum(each[:-1], targets=each[1:], weights=np.ones(10)) for each in (ids, changed))
    )
    expect_close(other[:5], one[:5], SAME, "log-probabilities before the changed token")
    expect(
        float(np.abs(other[6:] - one[6:]).max()) > SAME, "other log-probabilities after the changed token", other[6:]
    )


def cross_entropy_is_the_weighted_sum(server: Server) -> None:
    model = server.new_model()
    weights = np.linspace(-0.5, 1.5, 10)
    output = wait(model.forward_backward([data.text(1, weights=weights)], "cross_entropy"))
    expected = -(weights * np.asarray(output.loss_fn_outputs[0]["logprobs"].data)).sum()
    expect_close(loss_of(output), expected, 1e-3, "loss:sum")


def the_loss_of_a_batch_is_a_sum(server: Server) -> None:
    model = server.new_model()
    one, other = data.text(1), data.text(2, 4)
    losses = [loss_of(wait(model.forward(batch, "cross_entropy"))) for batch in ([one], [other], [one, other])]
    expect_close(losses[2], losses[0] + losses[1], 1e-2, "the loss of two data")


def the_gradient_is_that_of_the_loss(server: Server) -> None:
    """A step of eta falls by eta |g|^2, which gives |g|; clipped to half of that norm, it falls by half as much.

    A gradient that is k times too long would seem sqrt(k) |g| long, and clipping would leave 1 / (2 sqrt(k)).
    """
    expect_gradient_of_its_loss(server, data.text(1))


def expect_gradient_of_its_loss(server: Server, of: types.Datum) -> None:
    model = server.new_model()
    eta = find_eta(model, of)
    fall = move(model, supervised(of), eta=eta, on=of)
    expect(fall > 0, "a step along the gradient to lower the loss", f"a change of the log-probabilities by {fall:.4g}")
    half = 0.5 * np.sqrt(fall / eta)
    clipped = move(model, supervised(of), eta=eta, on=of, grad_clip_norm=float(half))
    expect_ratio(clipped / fall, 0.5, "the part of the fall that clipping the gradient to half its norm leaves")


def gradients_of_a_batch_are_summed(server: Server) -> None:
    """What two data change together is what they change one after the other."""
    model = server.new_model()
    one, other, probe = data.text(1), data.text(2, 5), data.text(1)
    eta = find_eta(model, one)
    apart = [move(model, supervised(each), eta=eta, on=probe) for each in (one, other)]
    expect_ratio(move(model, supervised(one, other), eta=eta, on=probe), sum(apart), "a change by two data")


def gradients_add_up_until_the_optimizer_step(server: Server) -> None:
    model = server.new_model()
    of = data.text(1)
    eta = find_eta(model, of)
    once = move(model, supervised(of), eta=eta, on=of)
    thrice = move(model, supervised(of), supervised(of), supervised(of), eta=eta, on=of)
    expect_ratio(thrice / once, 3.0, "the change by three gradients over that by one")
    logprobs(model, of, of)
    again = move(model, supervised(of), eta=eta, on=of)
    expect_ratio(again / once, 1.0, "the change by one gradient after that, which neither a step nor forward() leaves")


def weights_of_zero_are_legal_and_change_nothing(server: Server) -> None:
    model = server.new_model()
    before = logprobs(model, data.text(1))[0]
    output = wait(model.forward_backward([data.text(1, weights=np.zeros(10))], "cross_entropy"))
    expect_close(loss_of(output), 0.0, 1e-6, "loss:sum")
    expect_close(output.loss_fn_outputs[0]["logprobs"].data, before, SAME, "log-probabilities of targets of weight 0")
    wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    expect_close(logprobs(model, data.text(1))[0], before, SAME, "log-probabilities after a step without gradient")


def negative_weights_turn_the_gradient_round(server: Server) -> None:
    """Custom losses send them."""
    model = server.new_model()
    of = data.text(1)
    eta = find_eta(model, of, 0.02)
    _expect_cancelled(model, of, supervised(of), supervised(weighted(of, -np.ones(10))), eta)


def each_target_has_its_own_weight(server: Server) -> None:
    """The gradients of parts add up to the whole, and one target's is that of the sequence cut off behind it."""
    model = server.new_model()
    of, ids = data.text(1), data.tokens(1, 11)
    parts = [weighted(of, np.arange(10) == number) for number in (0, 4, 9)]
    kept = weighted(of, -np.isin(np.arange(10), (0, 4, 9)).astype(float))
    eta = find_eta(model, of, 0.02)
    _expect_cancelled(model, of, supervised(*parts), supervised(kept), eta)
    cut = data.datum(ids[:5], targets=ids[1:6], weights=-(np.arange(5) == 4).astype(float))
    _expect_cancelled(model, of, supervised(parts[1]), supervised(cut), eta)


def importance_sampling_follows_its_formula(server: Server) -> None:
    _expect_loss(server, "importance_sampling", None, data.importance_sampling)


def ppo_follows_its_formula(server: Server) -> None:
    _expect_loss(server, "ppo", None, data.ppo(0.8, 1.2))


def ppo_takes_thresholds_of_the_ratio(server: Server) -> None:
    _expect_loss(server, "ppo", {"clip_low_threshold": 0.65, "clip_high_threshold": 1.5}, data.ppo(0.65, 1.5))


def cispo_follows_its_formula(server: Server) -> None:
    _expect_loss(server, "cispo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, data.cispo(0.7, 1.3))


def dro_follows_its_formula(server: Server) -> None:
    _expect_loss(server, "dro", {"beta": 0.5}, data.dro(0.5))


def gspo_follows_its_formula(server: Server) -> None:
    if "gspo" not in get_args(types.LossFnType):
        raise NotApplicable("this SDK has no gspo")
    thresholds = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    _expect_loss(server, "gspo", thresholds, data.gspo(0.99, 1.01), sequence_ratio_mask=np.ones(10))


def _expect_loss(
    server: Server, loss: str, config: data.LossConfig | None, formula: data.Formula, **inputs: Numbers
) -> None:
    """Its value, and that its gradient is taken back by the cross entropy with the formula's derivative as weights."""
    model = server.new_model()
    of = data.text(1)
    eta = find_eta(model, of, 0.02)
    p = logprobs(model, of)[0]
    q = p - np.asarray([-0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5, 0.02, -0.02, 0.25])
    a = np.asarray([-1.0, -1.0, 0.5, 2.0, -0.5, 1.0, 2.0, 1.5, -1.5, 0.0])
    values, weights = formula(p, q, a)
    batch = ([data.with_inputs(of, logprobs=q, advantages=a, **inputs)], loss, config)
    output = wait(data.submit(model, batch))
    expect_close(output.loss_fn_outputs[0]["logprobs"].data, p, SAME, "log-probabilities")
    step(model, supervised(weighted(of, -weights)), eta=0.0)
    _expect_cancelled(model, of, batch, supervised(weighted(of, -weights)), eta)
    expect_close(loss_of(output), values.sum(), 1e-2, f"loss:sum of {loss}")


def _expect_cancelled(
    model: tinker.TrainingClient, on: types.Datum, one: data.Batch, other: data.Batch, eta: float
) -> None:
    """The gradients of two batches must be each other's negative."""
    before = logprobs(model, on)[0]
    step(model, one, other, eta=eta)
    left = float(np.abs(logprobs(model, on)[0] - before).max())
    step(model, one, eta=eta)
    alone = float(np.abs(logprobs(model, on)[0] - before).max())
    expect(
        left <= 0.05 * alone,
        f"two gradients to cancel out, each of which changes a log-probability by {alone:.4g}",
        f"{left:.4g}",
    )


def a_custom_loss_has_the_gradient_of_its_closed_form(server: Server) -> None:
    """Of sum c p^2 / 2, with the gradient c p, as the cross entropy has with the weights -c p."""
    try:
        import torch
    except ImportError as missing:
        raise NotApplicable("forward_backward_custom needs torch") from missing
    model = server.new_model()
    of = data.text(1)
    c = np.linspace(-1, 1, 10)
    eta = find_eta(model, of, 0.02)
    p = logprobs(model, of)[0]

    def loss(_: list[types.Datum], outputs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return (0.5 * torch.as_tensor(c) * outputs[0] ** 2).sum(), {"custom": 1.0}

    output = wait(data.submit(model, ([of], loss, None)))
    if "surrogate_loss:sum" in output.metrics:  # older SDKs leave the surrogate's value in its place
        expect_close(loss_of(output), 0.5 * (c * p**2).sum(), 1e-2, "loss:sum")
    wait(model.optim_step(data.adam(0.0)))
    _expect_cancelled(model, of, ([of], loss, None), supervised(weighted(of, c * p)), eta)


def adam_remembers_its_moments(server: Server) -> None:
    """With beta1 = 0.9, a step without gradient still moves, by the momentum of the one before."""
    model = server.new_model()
    of = data.text(1)
    params = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8)
    wait(model.forward_backward([of], "cross_entropy"))
    wait(model.optim_step(params))
    first = logprobs(model, of)[0]
    wait(model.forward_backward([weighted(of, np.zeros(10))], "cross_entropy"))
    wait(model.optim_step(params))
    expect(
        float(np.abs(logprobs(model, of)[0] - first).max()) > 1e-6, "momentum to move the model", "an unchanged model"
    )


def loss_of(output: types.ForwardBackwardOutput) -> float:
    """The sum over all targets of a batch."""
    expect("loss:sum" in output.metrics, "the metric loss:sum", sorted(output.metrics))
    return output.metrics["loss:sum"]


def training_lowers_the_loss(server: Server) -> None:
    model = server.new_model()
    losses: list[float] = []
    for _ in range(6):
        losses.append(loss_of(wait(model.forward_backward([data.text(1)], "cross_entropy"))))
        wait(model.optim_step(types.AdamParams(learning_rate=2e-3)))
    expect(losses[-1] < losses[0] - 1e-3, "a lower loss after five steps", [round(loss, 4) for loss in losses])


def other_targets_are_computed_or_refused(server: Server) -> None:
    """A target need not be the next token of the sequence; a server that cannot do it says so."""
    model = server.new_model()
    ids, target = data.tokens(1, 11), data.tokens(9, 1)[0]
    other = data.datum(ids[:-1], targets=[*ids[1:5], target, *ids[6:]], weights=np.ones(10))
    if refusal_of(lambda: logprobs(model, other)) is None:
        got = logprobs(model, other)[0]
        alone = data.datum(ids[:5], targets=[*ids[1:5], target], weights=np.ones(5))
        expect_close(got[:5], logprobs(model, alone)[0], 10 * SAME, "log-probabilities of the targets given")


def several_targets_a_position_are_computed_or_refused(server: Server) -> None:
    model = server.new_model()
    ids, others = data.tokens(1, 11), data.tokens(9, 10)
    pairs = np.stack([ids[1:], others], axis=1)
    several = data.datum(ids[:-1], targets=pairs, weights=np.ones((10, 2)))
    if refusal_of(lambda: logprobs(model, several)) is None:
        got = logprobs(model, several)[0]
        expected = logprobs(model, data.datum(ids[:-1], targets=ids[1:], weights=np.ones(10)))[0]
        expect(got.size == 20, "20 log-probabilities", got.size)
        expect_close(got.reshape(10, 2)[:, 0], expected, 10 * SAME, "log-probabilities of the first targets")


def sampler_and_trainer_agree(server: Server) -> None:
    """On what is sampled and on the prompt, after an update."""
    model = server.new_model()
    before = logprobs(model, data.text(1))[0]
    wait(model.forward_backward([data.text(1)], "cross_entropy"))
    wait(model.optim_step(types.AdamParams(learning_rate=2e-2)))
    change = float(np.abs(logprobs(model, data.text(1))[0] - before).max())
    expect(change > 4 * server.tolerance, f"an update by more than {4 * server.tolerance}", change)
    sampler = client_of(model.save_weights_and_get_sampling_client())
    start = data.tokens(1, 6)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[])
    response = wait(sampler.sample(data.prompt(start), 2, params, include_prompt_logprobs=True))
    for sequence in response.sequences:
        ids = [*start, *sequence.tokens]
        expected = logprobs(model, data.datum(ids[:-1], targets=ids[1:], weights=np.ones(len(ids) - 1)))[0]
        expect_close(sequence.logprobs or [], expected[5:], server.tolerance, "log-probabilities of what was sampled")
        got = _numbers(response.prompt_logprobs or [])
        expect_close(got, expected[:5], server.tolerance, "log-probabilities of the prompt")


def a_sampler_keeps_the_weights_it_was_made_of(server: Server) -> None:
    model = server.new_model()
    sampler = client_of(model.save_weights_and_get_sampling_client())
    before = _numbers(wait(sampler.compute_logprobs(data.prompt(data.tokens(1, 11)))))
    wait(model.forward_backward([data.text(1)], "cross_entropy"))
    wait(model.optim_step(types.AdamParams(learning_rate=5e-2)))
    client_of(model.save_weights_and_get_sampling_client())
    after = _numbers(wait(sampler.compute_logprobs(data.prompt(data.tokens(1, 11)))))
    expect_close(after, before, server.tolerance / 4, "log-probabilities of the earlier sampler")


def a_new_adapter_changes_nothing(server: Server) -> None:
    """LoRA starts with B = 0: trainer, sampler of the model and sampler of its base model agree."""
    service = server.client()
    model = server.model_of(service)
    base = client_of(service.create_sampling_client(base_model=server.model))
    got = _numbers(wait(base.compute_logprobs(data.prompt(data.tokens(1, 11)))))
    expect_close(got, logprobs(model, data.text(1))[0], server.tolerance, "log-probabilities of the base model")


def as_many_samples_as_asked_for(server: Server) -> None:
    response = wait(
        _base_sampler(server).sample(data.prompt(data.tokens(1, 5)), 4, types.SamplingParams(max_tokens=12, stop=[]))
    )
    lengths = [len(sequence.tokens) for sequence in response.sequences]
    expect(lengths == [12] * 4, "four sequences of twelve tokens", lengths)
    reasons = {sequence.stop_reason for sequence in response.sequences}
    expect(reasons == {"length"}, "the stop reason 'length', since stop=[] turns the end of text off too", reasons)
    expect(len({tuple(sequence.tokens) for sequence in response.sequences}) > 1, "different samples", "equal ones")


def temperature_zero_is_greedy_for_any_number_of_samples(server: Server) -> None:
    sampler = _base_sampler(server)
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])
    two = wait(sampler.sample(data.prompt(data.tokens(1, 5)), 2, greedy)).sequences
    narrow = types.SamplingParams(max_tokens=6, temperature=1.0, top_k=1, stop=[])
    three = [*two, *wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, narrow)).sequences]
    expect(
        len({tuple(each.tokens) for each in three}) == 1,
        "equal tokens, also with top_k=1",
        [each.tokens for each in three],
    )


def a_seed_repeats_what_is_sampled(server: Server) -> None:
    sampler = _base_sampler(server)
    params = types.SamplingParams(max_tokens=12, seed=7, stop=[])
    texts = [wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, params)).sequences[0].tokens for _ in range(2)]
    expect(texts[0] == texts[1], f"{texts[0]}", texts[1])


def a_stop_token_ends_a_sample_and_is_its_last(server: Server) -> None:
    """Renderers look for it there."""
    sampler = _base_sampler(server)
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    text = wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, greedy)).sequences[0].tokens
    stop = text[-1]
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[stop])
    sequence = wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, params)).sequences[0]
    expected = text[: text.index(stop) + 1]
    expect(sequence.tokens == expected, f"{expected}, up to the stop token", sequence.tokens)
    expect(sequence.stop_reason == "stop", "the stop reason 'stop'", sequence.stop_reason)
    expect(len(sequence.logprobs or []) == len(expected), "a log-probability for each token", sequence.logprobs)


def a_sample_without_a_limit_ends_at_its_stop_token(server: Server) -> None:
    """max_tokens may be missing."""
    sampler = _base_sampler(server)
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0, stop=[])
    first = wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, greedy)).sequences[0].tokens
    unlimited = types.SamplingParams(temperature=0.0, stop=first)
    sequence = wait(sampler.sample(data.prompt(data.tokens(1, 5)), 1, unlimited)).sequences[0]
    expect(sequence.tokens == first, f"{first}", sequence.tokens)


def a_stop_string_ends_a_sample(server: Server) -> None:
    model = server.new_model()
    try:
        tokenizer: Any = model.get_tokenizer()
    except Exception as missing:  # whatever a hub, a folder or a library says
        raise NotApplicable(f"the model's tokenizer cannot be loaded here: {missing}") from missing
    sampler = client_of(model.save_weights_and_get_sampling_client())
    start = data.prompt(data.tokens(1, 5))
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    text = str(tokenizer.decode(wait(sampler.sample(start, 1, greedy)).sequences[0].tokens))
    stop = next((text[at : at + 2] for at in range(3, len(text) - 2) if text[at : at + 2].isprintable()), None)
    if stop is None:
        raise NotApplicable(f"the model's text {text!r} has nothing to stop at")
    params = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[stop])
    sequence = wait(sampler.sample(start, 1, params)).sequences[0]
    got = str(tokenizer.decode(sequence.tokens))
    expect(
        sequence.stop_reason == "stop" and len(got) < len(text), f"{text!r} up to {stop!r}", (sequence.stop_reason, got)
    )


def log_probabilities_of_the_end_of_a_prompt(server: Server) -> None:
    if "prompt_logprobs_last_n" not in signature(tinker.SamplingClient.compute_logprobs).parameters:
        raise NotApplicable("this SDK has no prompt_logprobs_last_n")
    sampler = _base_sampler(server)
    whole = wait(sampler.compute_logprobs(data.prompt(data.tokens(1, 9))))
    end = wait(sampler.compute_logprobs(data.prompt(data.tokens(1, 9)), prompt_logprobs_last_n=3))
    expect(end[:-3] == [None] * 6, "None before the last three", end)
    expect_close(_numbers(end[-4:]), _numbers(whole[-4:]), server.tolerance, "the last three log-probabilities")


def the_likeliest_tokens_of_a_prompt(server: Server) -> None:
    sampler = _base_sampler(server)
    ids = data.tokens(1, 6)
    params = types.SamplingParams(max_tokens=1)
    response = wait(sampler.sample(data.prompt(ids), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3))
    rows = response.topk_prompt_logprobs
    expect(rows is not None and len(rows) == 6 and not rows[0], "six rows, the first of them empty", rows)
    for row, token, own in zip((rows or [])[1:], ids[1:], (response.prompt_logprobs or [])[1:], strict=True):
        values = [value for _, value in row or []]
        expect(len(values) == 3 and values == sorted(values, reverse=True), "three tokens, the likeliest first", row)
        if own is not None:
            expect(own <= values[0] + 1e-5, f"no token likelier than the first of {values}", own)
            listed = dict(row or [])
            expect_close(listed.get(token, own), own, 1e-4, "the log-probability of the prompt's own token")


def saved_weights_are_loaded_by_path(server: Server) -> None:
    service = server.client()
    model, expected = _trained(server, service)
    path = wait(model.save_weights_for_sampler("for-sampling")).path
    expect(path.startswith("tinker://"), "a path that begins with tinker://", path)
    sampler = client_of(service.create_sampling_client(model_path=path))
    got = _numbers(wait(sampler.compute_logprobs(data.prompt(data.tokens(1, 11)))))
    expect_close(got, expected, server.tolerance, "log-probabilities of the saved weights")


def a_model_made_of_saved_weights_has_them(server: Server) -> None:
    service = server.client()
    model, expected = _trained(server, service)
    path = wait(model.save_state("weights-alone")).path
    resumed = client_of(service.create_training_client_from_state(path))
    expect_close(logprobs(resumed, data.text(1))[0], expected, SAME, "log-probabilities of the saved weights")
    expect(resumed.model_id != model.model_id, "a model of its own", resumed.model_id)


def training_goes_on_from_a_saved_state(server: Server) -> None:
    """Weights and moments: the next step is the one that the uninterrupted model takes."""
    service = server.client()
    model, _ = _trained(server, service)
    path = wait(model.save_state("with-moments")).path
    resumed = client_of(service.create_training_client_from_state_with_optimizer(path))
    for client in (model, resumed):
        wait(client.forward_backward([data.text(2)], "cross_entropy"))
        wait(client.optim_step(types.AdamParams(learning_rate=1e-2)))
    one, other = (logprobs(client, data.text(1))[0] for client in (model, resumed))
    expect_close(other, one, 10 * SAME, "log-probabilities as without interruption")


def checkpoints_are_listed_published_and_deleted(server: Server) -> None:
    service = server.client()
    model, _ = _trained(server, service)
    rest = service.create_rest_client()
    kept, dropped = wait(model.save_state("kept")).path, wait(model.save_weights_for_sampler("dropped")).path

    def listed() -> dict[str, types.Checkpoint]:
        return {each.tinker_path: each for each in wait(rest.list_checkpoints(model.model_id)).checkpoints}

    kinds = {path: each.checkpoint_type for path, each in listed().items()}
    saved = {kept: "training", dropped: "sampler"}
    expect(kinds == saved, f"the types {saved}", kinds)
    wait(rest.delete_checkpoint_from_tinker_path(dropped))
    wait(rest.set_checkpoint_ttl_from_tinker_path(kept, 86_400))
    wait(rest.publish_checkpoint_from_tinker_path(kept))
    left = listed()
    expect(list(left) == [kept], f"only {kept}", list(left))
    expect(left[kept].expires_at is not None and left[kept].public, "one that is public, and expires", left[kept])
    wait(rest.unpublish_checkpoint_from_tinker_path(kept))
    expect(not listed()[kept].public, "one that is public no more", listed()[kept])


def a_name_is_overwritten_only_when_asked(server: Server) -> None:
    if "overwrite" not in signature(tinker.TrainingClient.save_state).parameters:
        raise NotApplicable("this SDK cannot ask for it")
    service = server.client()
    model, _ = _trained(server, service)
    path = wait(model.save_state("twice")).path
    wait(model.forward_backward([data.text(2)], "cross_entropy"))
    wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    expected = logprobs(model, data.text(1))[0]
    wait(model.save_state("twice", overwrite=True))
    resumed = client_of(service.create_training_client_from_state(path))
    expect_close(logprobs(resumed, data.text(1))[0], expected, SAME, "log-probabilities of what was saved last")


def a_run_and_its_weights_are_described(server: Server) -> None:
    service = server.client()
    model, _ = _trained(server, service)
    path = wait(model.save_state("described")).path
    rest = service.create_rest_client()
    run = wait(rest.get_training_run(model.model_id))
    expect(
        (run.base_model, run.lora_rank) == (server.model, 8),
        f"{server.model!r} of rank 8",
        (run.base_model, run.lora_rank),
    )
    runs: list[str] = []
    while model.model_id not in runs:
        page = [
            each.training_run_id for each in wait(rest.list_training_runs(limit=20, offset=len(runs))).training_runs
        ]
        expect(bool(set(page) - set(runs)), f"{model.model_id} in the list of runs", runs)
        runs += page
    info = wait(rest.get_weights_info_by_tinker_path(path))
    expect((info.base_model, info.lora_rank) == (server.model, 8), f"{server.model!r} of rank 8", info)
    session = wait(rest.get_session(service.holder.get_session_id()))
    expect(model.model_id in session.training_run_ids, f"{model.model_id} in its session", session.training_run_ids)


def a_part_of_the_layers_is_trained_or_refused(server: Server) -> None:
    service = server.client()
    for left_out in ("train_mlp", "train_attn", "train_unembed"):
        mlp, attn, unembed = (name != left_out for name in ("train_mlp", "train_attn", "train_unembed"))
        of_a_part = partial(service.create_lora_training_client, server.model, 4, 1, mlp, attn, unembed)
        if refusal_of(lambda create=of_a_part: client_of(create())) is None:
            model = client_of(of_a_part())
            before = logprobs(model, data.text(1))[0]
            wait(model.forward_backward([data.text(1)], "cross_entropy"))
            wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
            change = float(np.abs(logprobs(model, data.text(1))[0] - before).max())
            expect(change > 1e-6, f"a model without {left_out} to learn", "an unchanged one")


def _trained(server: Server, service: tinker.ServiceClient) -> tuple[tinker.TrainingClient, Numbers]:
    """A model after a step, and its log-probabilities of `data.text(1)`."""
    model = server.model_of(service)
    wait(model.forward_backward([data.text(1)], "cross_entropy"))
    wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    return model, logprobs(model, data.text(1))[0]


def _base_sampler(server: Server) -> tinker.SamplingClient:
    return client_of(server.client().create_sampling_client(base_model=server.model))


def _numbers(prompt_logprobs: list[float | None]) -> Numbers:
    """Without the first token, which nothing precedes."""
    return np.asarray(prompt_logprobs[1:], np.float64)

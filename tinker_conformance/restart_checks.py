"""T4, kill and resume: the server is killed by SIGKILL and started again, and its clients go on.

Each check trains a second model in the same way without a kill, for what must come out.
"""

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tinker import types
from tinker.proto.tinker_public_pb2 import ForwardBackwardOutput

from tinker_conformance import data
from tinker_conformance.expect import expect, expect_close
from tinker_conformance.learner import learn
from tinker_conformance.model_checks import probe, train
from tinker_conformance.server import Server, client_of, wait
from tinker_conformance.text_checks import SAME

ADAM = types.AdamParams(learning_rate=1e-2)


def a_client_goes_on_after_a_kill(server: Server) -> None:
    model = server.new_model()
    train(model, 1)
    before = probe(model)
    server.restart()
    expect_close(probe(model), before, SAME, "log-probabilities as before the kill")


def moments_of_the_optimizer_survive(server: Server) -> None:
    service = server.client()
    spared, killed = server.model_of(service), server.model_of(service)
    for model in (spared, killed):
        train(model, 1)
        train(model, 2)
    train(spared, 3)
    server.restart()
    train(killed, 3)
    expect_close(probe(killed), probe(spared), SAME, "log-probabilities as without a kill")


def gradients_from_before_a_kill_count_once(server: Server) -> None:
    service = server.client()
    spared, killed = server.model_of(service), server.model_of(service)
    for model in (spared, killed):
        wait(model.forward_backward([data.text(1), data.weighted(data.text(2), np.full(10, -0.7))], "cross_entropy"))
    server.restart()
    for model in (killed, spared):
        wait(model.forward_backward([data.text(3)], "cross_entropy"))
        wait(model.optim_step(ADAM))
    alone = server.model_of(service)
    batch = [data.text(1), data.weighted(data.text(2), np.full(10, -0.7)), data.text(3)]
    wait(alone.forward_backward(batch, "cross_entropy"))
    wait(alone.optim_step(ADAM))
    for model in (killed, spared):
        expect_close(probe(model), probe(alone), SAME, "log-probabilities as without a kill")


def a_request_in_flight_is_run_once(server: Server) -> None:
    service = server.client()
    spared, killed = server.model_of(service), server.model_of(service)
    train(spared, 1)
    train(spared, 2)
    train(killed, 1)
    future, optim = killed.forward_backward([data.text(2)], "cross_entropy"), killed.optim_step(ADAM)
    server.restart()
    wait(future)
    wait(optim)
    expect_close(probe(killed), probe(spared), SAME, "log-probabilities as without a kill")


def a_request_repeated_after_a_kill_counts_once(server: Server) -> None:
    """The client did not hear the answer and asks again, with the same number."""
    wire = server.wire()
    session_id = wire.new_session()
    ids = [wire.new_model(session_id, server.model, model_seq_id=number) for number in (0, 1)]
    adam = {"learning_rate": 1e-2, "beta1": 0.0, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    for model_id in ids:
        wire.train(data.request(model_id, 1, [data.text(1)]))
    server.restart()
    wire.train(data.request(ids[0], 1, [data.text(1)]))
    rows: list[bytes] = []
    for model_id in ids:
        wire.train(data.request(model_id, 2, [data.weighted(data.text(2), np.full(10, -1.0))]))
        wire.run("optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": adam, "type": "optim_step"})
        output: ForwardBackwardOutput = wire.train(data.request(model_id, 4, [data.text(1)], forward_only=True))
        rows.append(output.loss_fn_outputs[0].fields["logprobs"].data)
    one, other = (np.frombuffer(row, np.float32) for row in rows)
    expect_close(one, other, SAME, "log-probabilities as of the model whose request was not repeated")


def a_sampler_goes_on_after_a_kill(server: Server) -> None:
    model = server.new_model()
    train(model, 1)
    sampler = client_of(model.save_weights_and_get_sampling_client())
    prompt = data.prompt(data.tokens(9, 11))
    before = wait(sampler.compute_logprobs(prompt))
    waiting = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=16, stop=[]))
    server.restart()
    lengths = [len(sequence.tokens) for sequence in wait(waiting).sequences]
    expect(lengths == [16, 16], "the two samples that were under way", lengths)
    after = np.asarray(wait(sampler.compute_logprobs(prompt))[1:], np.float64)
    expect_close(after, np.asarray(before[1:], np.float64), server.tolerance, "log-probabilities as before the kill")


def saved_weights_survive(server: Server) -> None:
    service = server.client()
    model = server.model_of(service)
    train(model, 1)
    path = wait(model.save_state("survives")).path
    server.restart()
    listed = wait(service.create_rest_client().list_checkpoints(model.model_id)).checkpoints
    expect(path in [each.tinker_path for each in listed], f"{path} in the list", listed)
    resumed = client_of(service.create_training_client_from_state_with_optimizer(path))
    for each in (resumed, model):
        train(each, 2)
    expect_close(probe(resumed), probe(model), SAME, "log-probabilities of the model that was saved")


def a_run_goes_through_kills_at_any_point(server: Server) -> None:
    """A policy learns from samples, once through three kills and once undisturbed, while its client goes on."""
    stages: list[tuple[str, dict[str, object]]] = []
    rng = random.Random(1)
    kills = sorted(rng.sample(range(1, 12), 3))

    def tell(stage: str, facts: dict[str, object]) -> None:
        stages.append((stage, facts))
        if len(stages) in kills:
            restarts.append(pool.submit(_restart_after, server, rng.uniform(0.0, 0.5)))

    restarts: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:
        learn(server, 3, tell)
        for restart in restarts:
            restart.result()
    expect(len(restarts) == len(kills), f"{len(kills)} kills", len(restarts))
    undisturbed: list[tuple[str, dict[str, object]]] = []
    learn(server, 3, lambda stage, facts: undisturbed.append((stage, facts)))
    for got, wanted in zip(stages, undisturbed, strict=True):
        expect(got == wanted, f"{wanted}, as without a kill", got)


def _restart_after(server: Server, delay_s: float) -> None:
    time.sleep(delay_s)
    server.restart()

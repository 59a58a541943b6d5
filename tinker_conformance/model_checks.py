"""T3, several models and clients at a time: none feels the others."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

from tinker_conformance import data
from tinker_conformance.data import logprobs
from tinker_conformance.expect import Numbers, expect, expect_close
from tinker_conformance.server import Server, client_of, wait
from tinker_conformance.text_checks import SAME

PROBE = data.text(9)


def train(model: tinker.TrainingClient, seed: int, *, learning_rate: float = 1e-2) -> None:
    """One step on random text."""
    future = model.forward_backward([data.text(seed)], "cross_entropy")
    wait(model.optim_step(types.AdamParams(learning_rate=learning_rate)))
    wait(future)


def probe(model: tinker.TrainingClient) -> Numbers:
    """Log-probabilities of a text that tell models apart."""
    return logprobs(model, PROBE)[0]


def equal_seeds_make_equal_models(server: Server) -> None:
    service = server.client()
    one, same, other = (server.model_of(service, seed=seed) for seed in (1, 1, 2))
    for model in (one, same, other):
        train(model, 1)
    expect_close(probe(same), probe(one), SAME, "log-probabilities of a model of the same seed")
    expect(float(np.abs(probe(other) - probe(one)).max()) > SAME, "another model from another seed", "the same one")


def models_trained_in_turns_learn_as_each_alone(server: Server) -> None:
    service = server.client()
    alone = server.model_of(service)
    for seed in (1, 2, 3):
        train(alone, seed)
    mine, others = server.model_of(service), server.model_of(service, rank=4, seed=5)
    for seed in (1, 2, 3):
        train(mine, seed)
        train(others, seed + 10)
    expect_close(probe(mine), probe(alone), SAME, "log-probabilities of the model that was trained alone")


def training_leaves_other_models_unchanged(server: Server) -> None:
    service = server.client()
    trained, other = server.model_of(service), server.model_of(service)
    before = probe(other)
    train(trained, 1)
    expect_close(probe(other), before, SAME, "log-probabilities of the model that was not trained")
    expect(float(np.abs(probe(trained) - before).max()) > 10 * SAME, "the trained one to differ", "equal models")


def a_step_applies_the_gradients_of_its_own_model(server: Server) -> None:
    """Two models have gradients; the one steps, then the other: each as if it were alone."""
    service = server.client()
    alone, one, other = (server.model_of(service) for _ in range(3))
    train(alone, 1)
    for model, seed in ((one, 1), (other, 2)):
        wait(model.forward_backward([data.text(seed)], "cross_entropy"))
    for model in (other, one):
        wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    expect_close(probe(one), probe(alone), SAME, "log-probabilities of the model that was trained alone")
    expect(float(np.abs(probe(other) - probe(one)).max()) > SAME, "two models", "the same twice")


def clients_at_the_same_time_do_not_mix(server: Server) -> None:
    def run(seed: int) -> Numbers:
        model = server.new_model(seed=seed)
        for number in range(3):
            train(model, 10 * seed + number)
        return probe(model)

    expected = [run(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        for got, alone in zip(pool.map(run, (1, 2)), expected, strict=True):
            expect_close(got, alone, 10 * SAME, "log-probabilities as of a client that is alone")


def samplers_of_several_models_do_not_mix(server: Server) -> None:
    service = server.client()
    models = [server.model_of(service, seed=seed) for seed in (1, 2, 3)]
    for number, model in enumerate(models):
        train(model, number, learning_rate=3e-2)
    samplers = [client_of(model.save_weights_and_get_sampling_client()) for model in models]
    prompt = data.prompt(data.tokens(9, 11))
    futures = [[sampler.compute_logprobs(prompt) for sampler in samplers] for _ in range(4)]
    expected = [probe(model) for model in models]
    for row in futures:
        for future, of_model in zip(row, expected, strict=True):
            got = np.asarray(wait(future)[1:], np.float64)
            expect_close(got, of_model, server.tolerance, "log-probabilities of the sampler's own model")


def names_of_weights_belong_to_a_model(server: Server) -> None:
    service = server.client()
    models = [server.model_of(service, seed=seed) for seed in (1, 2)]
    paths: list[str] = []
    for number, model in enumerate(models):
        train(model, number)
        paths.append(wait(model.save_state("same-name")).path)
    expect(paths[0] != paths[1], "two paths", paths)
    for path, model in zip(paths, models, strict=True):
        resumed = client_of(service.create_training_client_from_state(path))
        expect_close(probe(resumed), probe(model), SAME, "log-probabilities of the model that was saved")


def a_failing_client_disturbs_nobody(server: Server) -> None:
    model = server.new_model()
    wait(model.forward_backward([data.text(1)], "cross_entropy"))
    wire = server.wire()
    session_id = wire.new_session()
    model_id = wire.new_model(session_id, server.model)
    wire.expect_refused("forward_backward", data.request(model_id, 1, [], loss_fn="no_such_loss"), "an unknown loss")
    wire.finish(session_id)
    wait(model.optim_step(types.AdamParams(learning_rate=1e-2)))
    alone = server.new_model()
    train(alone, 1)
    expect_close(probe(model), probe(alone), SAME, "log-probabilities as without the other client")


def finished_sessions_make_room(server: Server) -> None:
    """As many models one after another as no server holds at a time."""
    for seed in range(12):
        model = server.new_model(seed=seed)
        expect(len(probe(model)) == 10, "a model that works", "none")
        server.finish_sessions()


def models_of_different_ranks_live_side_by_side(server: Server) -> None:
    service = server.client()
    alone = server.model_of(service, rank=16)
    train(alone, 1)
    models = [server.model_of(service, rank=rank) for rank in (4, 16, 32)]
    for model in models:
        train(model, 1)
    expect_close(probe(models[1]), probe(alone), SAME, "log-probabilities of a model of rank 16")
    ranks = [model.get_info().lora_rank for model in models]
    expect(ranks == [4, 16, 32], "ranks 4, 16 and 32", ranks)

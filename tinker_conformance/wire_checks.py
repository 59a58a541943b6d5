"""T0, the wire: sessions, promises, protobuf, order, repetition and refusals, by plain requests."""

import numpy as np
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tinker_conformance import data
from tinker_conformance.expect import CheckFailed, NotApplicable, expect, expect_close
from tinker_conformance.server import Server
from tinker_conformance.wire import Json, Wire, text_in


def the_capabilities_name_the_model(server: Server) -> None:
    models: list[Json] = server.wire().get("get_server_capabilities").get("supported_models") or []
    names = [str(each.get("model_name")) for each in models]
    expect(server.model in names, f"supported_models with {server.model!r}", names)


def the_client_config_is_answered(server: Server) -> None:
    server.wire().call("client/config", {"sdk_version": "0.38.0"})
    status = server.wire().post("client/dynamic_config", {"sdk_version": "0.38.0"}).status_code
    expect(status in (200, 404), "the dynamic one, or 404 from a server without it", status)


def a_wrong_key_is_refused(server: Server) -> None:
    stranger = Wire(base_url=server.base_url, api_key="tml-wrong")
    body: Json = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    status = stranger.post("create_session", body).status_code
    expect(status in (401, 403), "401 or 403", status)


def a_session_beats_reports_and_finishes(server: Server) -> None:
    wire = server.wire()
    session_id = wire.new_session()
    telemetry: Json = {"events": [], "platform": "linux", "sdk_version": "0.38.0", "session_id": session_id}
    expect(
        wire.call("telemetry", telemetry).get("status") == "accepted", "telemetry to be 'accepted'", "another status"
    )
    wire.call("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
    response = wire.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    expect(response.is_success, "finish to succeed", f"{response.status_code} {response.text[:200]}")


def a_model_tells_its_id_rank_and_name(server: Server) -> None:
    wire = server.wire()
    session_id = wire.new_session()
    model_id = wire.new_model(session_id, server.model)
    expect(model_id == f"{session_id}:train:0", f"{session_id}:train:0, which the SDK computes too", model_id)
    info = wire.call("get_info", {"model_id": model_id, "type": "get_info"})
    expect(info.get("lora_rank") == 8, "lora_rank 8", dict(info))
    described: Json = info.get("model_data") or {}
    name: object = described.get("model_name")
    expect(name == server.model, f"model_name {server.model!r}", name)


def results_of_training_are_protobuf(server: Server) -> None:
    """With names of metrics that have one colon, at which the SDK splits them to join those of several chunks."""
    wire = server.wire()
    output = wire.train(
        data.request(wire.new_model(wire.new_session(), server.model), 1, [data.text(1), data.text(2, 4)])
    )
    wrong = [name for name in output.metrics if name.count(":") != 1]
    expect(not wrong and "loss:sum" in output.metrics, "loss:sum, and no name without exactly one colon", wrong)
    logprobs = _logprobs(output)
    expect([len(each) for each in logprobs] == [10, 4], "10 and 4 log-probabilities", [len(each) for each in logprobs])
    expect_close(output.metrics["loss:sum"], -sum(each.sum() for each in logprobs), 1e-3, "loss:sum")


def a_body_is_compressed_if_the_server_asks_for_it(server: Server) -> None:
    wire = server.wire()
    if not wire.call("client/config", {"sdk_version": "0.38.0"}).get("proto_compress_fwdbwd"):
        raise NotApplicable("the client config does not ask for compressed bodies")
    message = data.request(wire.new_model(wire.new_session(), server.model), 1, [data.text(1)])
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    body = zstandard.ZstdCompressor().compress(message.SerializeToString())
    response = wire.send("POST", "forward_backward", headers=headers, content=body)
    expect(response.is_success, "a body compressed by zstd to be read", f"{response.status_code} {response.text[:200]}")
    output = wire.message(str(response.json()["request_id"]), pb.ForwardBackwardOutput)
    message.seq_id = 2
    expect_close(
        _logprobs(output)[0], _logprobs(wire.train(message))[0], 1e-4, "log-probabilities as without compression"
    )


def samples_have_ids_from_the_start(server: Server) -> None:
    wire = server.wire()
    promise = wire.call("asample", _sample(_sampler(wire, server), num_samples=3))
    ids = promise.get("sample_sequence_ids")
    expect(len(set(ids or [])) == 3, "three different sample_sequence_ids", ids)
    response = wire.message(text_in(promise, "request_id"), pb.SampleResponse)
    lengths = [len(sequence.tokens) // 4 for sequence in response.sequences]
    expect(len(lengths) == 3 and max(lengths) <= 5, "three sequences of at most five tokens", lengths)
    with_logprobs = [len(sequence.logprobs) // 4 for sequence in response.sequences]
    expect(with_logprobs == lengths, "a log-probability for each token", with_logprobs)


def a_sampler_knows_its_base_model(server: Server) -> None:
    wire = server.wire()
    info = wire.get(f"samplers/{_sampler(wire, server)}")
    expect(info.get("base_model") == server.model, f"base_model {server.model!r}", dict(info))


def an_unknown_request_is_refused(server: Server) -> None:
    """Whoever is told to try again would do so for ever."""
    status = server.wire().poll("no-such-request").status_code
    expect(status in (400, 404, 410, 422), "404", status)


def a_request_waits_for_the_ones_before_it(server: Server) -> None:
    """The SDK sends the first chunk of a batch last."""
    wire = server.wire()
    model_id = wire.new_model(wire.new_session(), server.model)
    later = wire.submit("forward_backward", data.request(model_id, 2, [data.text(2, 4)]))
    expect(_is_pending(wire, later), "the second request to wait for the first", "a result of it")
    first = wire.submit("forward_backward", data.request(model_id, 1, [data.text(1)]))
    counts = [len(_logprobs(wire.message(each, pb.ForwardBackwardOutput))[0]) for each in (first, later)]
    expect(counts == [10, 4], "each request's own result, of 10 and of 4 targets", counts)


def an_optimizer_step_waits_for_its_gradient(server: Server) -> None:
    wire = server.wire()
    model_id = wire.new_model(wire.new_session(), server.model)
    step = wire.submit("optim_step", _optim_step(model_id, 2))
    train = wire.submit("forward_backward", data.request(model_id, 1, [data.text(1)]))
    before = _logprobs(wire.message(train, pb.ForwardBackwardOutput))[0]
    wire.wait(step)
    after = _logprobs(wire.train(data.request(model_id, 3, [data.text(1)], forward_only=True)))[0]
    expect(
        float(np.abs(after - before).max()) > 1e-6, "the step to apply the gradient sent after it", "an unchanged model"
    )


def a_repeated_forward_backward_counts_once(server: Server) -> None:
    """Two models take the same step, one of which was told its first batch three times."""
    wire = server.wire()
    session_id = wire.new_session()
    results: list[np.ndarray] = []
    for number, times in enumerate((1, 3)):
        model_id = wire.new_model(session_id, server.model, model_seq_id=number)
        for _ in range(times):
            wire.train(data.request(model_id, 1, [data.text(1)]))
        wire.train(data.request(model_id, 2, [data.weighted(data.text(2), np.full(10, -1.0))]))
        wire.run("optim_step", _optim_step(model_id, 3))
        results.append(_logprobs(wire.train(data.request(model_id, 4, [data.text(1)], forward_only=True)))[0])
    expect_close(results[1], results[0], 1e-4, "log-probabilities as without repeated requests")


def a_repeated_optimizer_step_counts_once(server: Server) -> None:
    wire = server.wire()
    model_id = wire.new_model(wire.new_session(), server.model)
    wire.train(data.request(model_id, 1, [data.text(1)]))
    first = wire.submit("optim_step", _optim_step(model_id, 2, beta1=0.9))
    wire.wait(first)
    once = _logprobs(wire.train(data.request(model_id, 3, [data.text(1)], forward_only=True)))[0]
    wire.wait(wire.submit("optim_step", _optim_step(model_id, 2, beta1=0.9)))
    again = _logprobs(wire.train(data.request(model_id, 4, [data.text(1)], forward_only=True)))[0]
    expect_close(again, once, 1e-6, "log-probabilities as after one step")


def a_repeated_sample_is_the_same_one(server: Server) -> None:
    wire = server.wire()
    sampler = _sampler(wire, server)
    texts: list[list[bytes]] = []
    for _ in range(2):
        request_id = text_in(wire.call("asample", _sample(sampler, num_samples=2)), "request_id")
        texts.append([each.tokens for each in wire.message(request_id, pb.SampleResponse).sequences])
    expect(texts[0] == texts[1], "the tokens of the first request", "other ones")


def a_refused_request_is_not_waited_for(server: Server) -> None:
    """The SDK counts a number up for a request that it will not send again."""
    wire = server.wire()
    model_id = wire.new_model(wire.new_session(), server.model)
    wire.expect_refused(
        "forward_backward", data.request(model_id, 1, [data.text(1)], loss_fn="no_such_loss"), "the loss"
    )
    output = wire.train(data.request(model_id, 2, [data.text(1)]))
    expect(len(_logprobs(output)[0]) == 10, "the next request to be run", "no result")


def malformed_training_data_are_refused(server: Server) -> None:
    wire = server.wire()
    model_id = wire.new_model(wire.new_session(), server.model)
    ids = data.tokens(1, 11)
    ones = np.ones(10)
    wrong: dict[str, tuple[list[types.Datum], str]] = {
        "an unknown loss": ([data.text(1)], "no_such_loss"),
        "no targets": (
            [types.Datum(model_input=data.prompt(ids), loss_fn_inputs={"weights": data.tensor(ones)})],
            "cross_entropy",
        ),
        "more weights than targets": ([data.datum(ids[:-1], targets=ids[1:], weights=np.ones(11))], "cross_entropy"),
        "fewer targets than tokens": ([data.datum(ids[:-1], targets=ids[1:-1], weights=np.ones(9))], "cross_entropy"),
        "a token beyond the vocabulary": (
            [data.datum([*ids[:-2], 10**8, ids[-2]], targets=ids, weights=np.ones(11))],
            "cross_entropy",
        ),
        "a negative target": ([data.datum(ids[:-1], targets=[-5, *ids[2:]], weights=ones)], "cross_entropy"),
        "a weight that is no number": ([data.text(1, weights=np.full(10, np.nan))], "cross_entropy"),
        "advantages that are missing": ([data.with_inputs(data.text(1), logprobs=ones)], "ppo"),
        "no data": ([], "cross_entropy"),
        "an empty sequence": ([data.datum([], targets=np.zeros(0), weights=np.zeros(0))], "cross_entropy"),
    }
    _expect_all_refused(
        wire,
        {
            what: ("forward_backward", data.request(model_id, number, batch, loss_fn=loss))
            for number, (what, (batch, loss)) in enumerate(wrong.items(), start=1)
        },
    )


def bodies_that_cannot_be_read_are_refused(server: Server) -> None:
    wire = server.wire()
    for what, headers, content in (
        ("bytes that are no protobuf", {"Content-Type": "application/x-protobuf"}, b"\xff\xff\xff\xff"),
        ("bytes that are not zstd", {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}, b"plain"),
        ("text that is no JSON", {"Content-Type": "application/json"}, b"{"),
    ):
        path = "optim_step" if "JSON" in what else "forward_backward"
        status = wire.send("POST", path, headers=headers, content=content).status_code
        expect(400 <= status < 500, f"{what} to be refused with a 4xx", status)


def malformed_sampling_requests_are_refused(server: Server) -> None:
    wire = server.wire()
    sampler = _sampler(wire, server)
    good = _sample(sampler)
    long = {"chunks": [{"type": "encoded_text", "tokens": data.tokens(1, 100) * 20_000}]}
    beyond = {"chunks": [{"type": "encoded_text", "tokens": [10**8]}]}
    unread = {"chunks": [{"type": "image", "data": "bm8gcGljdHVyZQ==", "format": "png"}]}
    wrong: dict[str, Json] = {
        "no samples": {"num_samples": 0},
        "a negative number of tokens": {"sampling_params": {"max_tokens": -1}},
        "a negative temperature": {"sampling_params": {"max_tokens": 1, "temperature": -1}},
        "top_p of 2": {"sampling_params": {"max_tokens": 1, "top_p": 2}},
        "an empty prompt": {"prompt": {"chunks": []}},
        "a prompt of 2,000,000 tokens": {"prompt": long},
        "a token beyond the vocabulary": {"prompt": beyond},
        "a picture that is none": {"prompt": unread},
        "an unknown sampler": {"sampling_session_id": "no-such-sampler"},
    }
    _expect_all_refused(
        wire, {what: ("asample", {**good, "seq_id": 1 + n, **change}) for n, (what, change) in enumerate(wrong.items())}
    )


def unknown_models_and_paths_are_refused(server: Server) -> None:
    wire = server.wire()
    session_id = wire.new_session()
    model_id = wire.new_model(session_id, server.model)
    model = {"session_id": session_id, "model_seq_id": 7, "lora_config": {"rank": 8}, "type": "create_model"}
    load = {"model_id": model_id, "optimizer": False, "type": "load_weights"}
    sampler = {"session_id": session_id, "sampling_session_seq_id": 7, "type": "create_sampling_session"}
    save = {"model_id": model_id, "type": "save_weights"}
    _expect_all_refused(
        wire,
        {
            "an unknown base model": ("create_model", {**model, "base_model": "no/such-model"}),
            "a model of rank 0": ("create_model", {**model, "base_model": server.model, "lora_config": {"rank": 0}}),
            "a model of an unknown session": (
                "create_model",
                {**model, "base_model": server.model, "session_id": "none"},
            ),
            "training of an unknown model": ("forward_backward", data.request("none:train:0", 1, [data.text(1)])),
            "a step of an unknown model": ("optim_step", _optim_step("none:train:0", 1)),
            "facts about an unknown model": ("get_info", {"model_id": "none:train:0", "type": "get_info"}),
            "weights that were never saved": (
                "load_weights",
                {**load, "seq_id": 1, "path": f"tinker://{model_id}/weights/none"},
            ),
            "a path that is none": ("load_weights", {**load, "seq_id": 2, "path": "/etc/passwd"}),
            "a path out of its folder": (
                "load_weights",
                {**load, "seq_id": 3, "path": "tinker://../weights/../../etc"},
            ),
            "a name out of its folder": ("save_weights", {**save, "seq_id": 4, "path": "../../outside"}),
            "an absolute name": ("save_weights", {**save, "seq_id": 5, "path": "/tmp/outside"}),
            "a sampler of unknown weights": (
                "create_sampling_session",
                {**sampler, "model_path": f"tinker://{model_id}/sampler_weights/none"},
            ),
            "a sampler of an unknown model": ("create_sampling_session", {**sampler, "base_model": "no/such-model"}),
        },
    )


def _expect_all_refused(wire: Wire, requests: dict[str, tuple[str, Json | pb.ForwardBackwardRequest]]) -> None:
    failures: list[str] = []
    for what, (path, body) in requests.items():
        try:
            wire.expect_refused(path, body, what)
        except CheckFailed as failure:
            failures.append(str(failure))
    if failures:
        raise CheckFailed("; ".join(failures))


def _logprobs(output: pb.ForwardBackwardOutput) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for record in output.loss_fn_outputs:
        field = record.fields["logprobs"]
        expect(field.dtype == pb.DTYPE_FLOAT32, "log-probabilities as float32", field.dtype)
        offsets = np.frombuffer(field.offsets, np.int64)
        rows += [
            np.frombuffer(field.data[start:end], np.float32).astype(np.float64)
            for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
    return rows


def _is_pending(wire: Wire, request_id: str) -> bool:
    response = wire.poll(request_id)
    return response.status_code == 408 or (
        "json" in response.headers.get("content-type", "") and response.json().get("type") == "try_again"
    )


def _optim_step(model_id: str, seq_id: int, *, beta1: float = 0.0) -> Json:
    adam = {
        "learning_rate": 1e-3,
        "beta1": beta1,
        "beta2": 0.9,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    return {"model_id": model_id, "seq_id": seq_id, "adam_params": adam, "type": "optim_step"}


def _sampler(wire: Wire, server: Server) -> str:
    body = {
        "session_id": wire.new_session(),
        "sampling_session_seq_id": 0,
        "base_model": server.model,
        "type": "create_sampling_session",
    }
    return text_in(wire.call("create_sampling_session", body), "sampling_session_id")


def _sample(sampling_session_id: str, *, num_samples: int = 1) -> Json:
    return {
        "sampling_session_id": sampling_session_id,
        "seq_id": 0,
        "num_samples": num_samples,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": data.tokens(1, 5)}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": False,
        "type": "sample",
    }

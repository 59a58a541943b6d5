"""Training on a Tinker service: what is refused beforehand, what is sent, and what is kept of the answers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import make_config
from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import free_port
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.run.tinker import TinkerSampler, TinkerService, TinkerTrainer, check_tinker, find_service
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ServedModel
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.types.errors import ConfigError, SamplingError, TrainingError
from cua_rl.types.rollout import AdapterRef, Datum, EncodedTextChunk, ModelInput, SamplingParams
from tests.builders import stored_image
from tests.renderers.generated import encode_image, make_image
from tests.sampling.test_generation import image

KEY = "tml-of-the-tests"
MODEL = ServedModel(name="tiny_qwen3_vl", max_model_len=2048)


def config(**settings: object) -> CLIConfig:
    return make_config(CLIConfig, {"training": "tinker", "base_url": "http://tinker", **settings})


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"loss": "gspo"}, "loss.name: expected 'importance_sampling' or 'ppo' or 'cispo' with training=tinker"),
        ({"loss.tis_cap": 2.0}, "loss.tis_cap: expected None"),
        ({"kl_penalty_coef": 0.1}, r"kl_penalty_coef: expected 0\.0"),
        ({"temperature": 0.7}, r"temperature: expected 1\.0"),
        ({"rollout_workers": 2}, "rollout_workers: expected 0"),
        ({"trainer.lora_alpha": 64}, "trainer.lora_alpha: expected 32"),
        ({"trainer.lora_modules": ("language", "vision")}, "trainer.lora_modules: expected"),
        ({"load_checkpoint_path": "a"}, "load_checkpoint_path: expected None"),
        ({"base_url": None}, "base_url: expected the address of a Tinker service"),
    ],
)
def test_what_a_service_cannot_do_is_refused_by_name(settings: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        check_tinker(config(**settings), {})


@asynccontextmanager
async def offering(*models: dict[str, object]) -> AsyncGenerator[str]:
    """A service that offers models to whoever has the key."""

    async def answer(request: Request) -> Response:
        is_known = request.headers.get("X-API-Key") == KEY
        return JSONResponse({"supported_models": models}) if is_known else Response(status_code=401)

    app = Starlette(routes=[Route("/api/v1/get_server_capabilities", answer)])
    async with serve_app(app, "127.0.0.1", 0, grace_s=0) as url:
        yield url


async def find(url: str, environ: dict[str, str], **settings: object) -> TinkerService:
    return await find_service(config(base_url=url, **settings), environ, 2048)


async def test_the_service_is_asked_for_its_model_before_anything_begins() -> None:
    models = [{"model_name": "other"}, {"model_name": "/there/tiny_qwen3_vl", "max_context_length": 4096}]
    async with offering(*models) as url:
        found = await find(f"{url}/", {"TINKER_API_KEY": KEY})
        assert (found.address, found.model.name, found.model.max_model_len) == (url, "/there/tiny_qwen3_vl", 2048)
        assert await find(url, {}, tinker_api_key=KEY) == found
        with pytest.raises(ConfigError, match=r"tinker_api_key: expected one that .* accepts, got status 401"):
            await find(url, {"TINKER_API_KEY": "tml-wrong"})
        with pytest.raises(ConfigError, match=r"tinker_api_key: expected the key of the Tinker service .* got none"):
            await find(url, {})
    async with offering({"model_name": "other"}) as url:
        with pytest.raises(ConfigError, match=r"one of \['other'\], which .* got 'tiny_qwen3_vl'"):
            await find(url, {"TINKER_API_KEY": KEY})
    async with offering({"model_name": "tiny_qwen3_vl", "max_context_length": 1024}) as url:
        with pytest.raises(ConfigError, match="max_model_len: expected at most 1024"):
            await find(url, {"TINKER_API_KEY": KEY})
    with pytest.raises(ConfigError, match="base_url: expected a Tinker service at"):
        await find(f"http://127.0.0.1:{free_port()}", {"TINKER_API_KEY": KEY})


def respond(*pieces: bytes, endless: bool = False, **headers: str) -> Any:
    """A service that answers so, whatever it is asked."""

    async def body() -> AsyncGenerator[bytes]:
        for piece in pieces:
            yield piece
        while endless:
            yield b" " * 2**16
            await asyncio.sleep(0)  # a server that has nobody to send to never waits

    async def answer(request: Request) -> Response:
        return StreamingResponse(body(), 307 if headers else 200, headers=headers)

    return Starlette(routes=[Route("/{rest:path}", answer)])


@pytest.mark.parametrize(
    ("answer", "endless"),
    [(b"", False), (b"[]", False), (b'{"supported_models": [{"max_context_length": 1}]}', False), (b"{", True)],
)
async def test_garbage_of_a_service_is_a_refusal_and_no_more_of_it_is_read_than_an_answer_has(
    answer: bytes, endless: bool
) -> None:
    async with serve_app(respond(answer, endless=endless), "127.0.0.1", 0, grace_s=0) as url:
        with pytest.raises(ConfigError, match=r"expected (a Tinker service at|one of)"):
            await find(url, {"TINKER_API_KEY": KEY})


async def test_a_key_is_not_sent_where_a_service_redirects_to() -> None:
    visitors: list[Request] = []

    async def visit(request: Request) -> Response:
        visitors.append(request)
        return JSONResponse({"supported_models": [{"model_name": "tiny_qwen3_vl"}]})

    elsewhere = Starlette(routes=[Route("/{rest:path}", visit)])
    async with serve_app(elsewhere, "127.0.0.1", 0, grace_s=0) as other:
        async with serve_app(respond(location=f"{other}/a"), "127.0.0.1", 0, grace_s=0) as url:
            with pytest.raises(ConfigError, match="status 307"):
                await find(url, {"TINKER_API_KEY": KEY})
    assert visitors == []


class FakeSdk:
    """The parts of the package `tinker` that a run uses; types only keep what they are made with."""

    SamplingParams = AdamParams = Datum = ModelInput = EncodedTextChunk = SimpleNamespace
    types = SimpleNamespace(ImageChunk=SimpleNamespace)


@dataclass
class FakeSession:
    """A service client that records what it is asked."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    logprob: float = -0.5
    answer: Any = None

    async def _answer(self, name: str, value: Any, result: Any) -> Any:
        self.asked.append((name, value))
        return result

    def create_lora_training_client(self, model: str, **settings: Any) -> Any:
        return self._answer("create", (model, settings), self)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        return self._answer("load", path, self)

    def create_sampling_client(self, **weights: str) -> Any:
        return self._answer("sampler", weights, self)

    def _outputs(self, data: Any) -> Any:
        rows = [[self.logprob - index for index in range(len(one.loss_fn_inputs["target_tokens"]))] for one in data]
        outputs = [{"logprobs": SimpleNamespace(data=row)} for row in rows]
        return SimpleNamespace(loss_fn_outputs=outputs, metrics={"loss:sum": 1.25})

    def forward(self, data: Any, loss: str) -> Any:
        return self._answer("forward", (data, loss), self._outputs(data))

    def forward_backward(self, data: Any, loss: str, settings: Any) -> Any:
        return self._answer("forward_backward", (data, loss, settings), self._outputs(data))

    def optim_step(self, params: Any) -> Any:
        return self._answer("optim_step", params, SimpleNamespace(metrics={"grad_norm:mean": 0.75}))

    def save_state(self, name: str) -> Any:
        return self._answer("save_state", name, SimpleNamespace(path=f"tinker://m/weights/{name}"))

    def save_weights_for_sampler(self, name: str, ttl_seconds: int) -> Any:
        return self._answer("save", name, SimpleNamespace(path=f"tinker://m/sampler_weights/{name}"))

    def sample(self, prompt: Any, num_samples: int, params: Any) -> Any:
        return self._answer("sample", (prompt, num_samples, params), self.answer)


SERVICE = TinkerService(address="http://tinker", api_key=KEY, model=MODEL)


@pytest.fixture(scope="module")
def renderer() -> Qwen3VLRenderer:
    return load_qwen3_vl(TINY_QWEN3_VL)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def trainer(session: FakeSession) -> TinkerTrainer:
    return TinkerTrainer(SERVICE, FakeSdk(), session, TrainerConfig(lora_rank=8, seed=3))


def two_turns(renderer: Qwen3VLRenderer) -> Datum:
    """Two tokens of text, a picture, a sampled token, a token of the device, and two sampled tokens."""
    picture = image(renderer, 1)
    chunks = (EncodedTextChunk(tokens=(11, 12)), picture, EncodedTextChunk(tokens=(21, 31, 22, 23)))
    mask = (False, False, *[False] * picture.length, True, False, True, True)
    values = [0.0] * (2 + picture.length)
    return Datum(
        rollout_id="r",
        model_input=ModelInput(chunks=chunks),
        loss_mask=mask,
        advantages=(*values, 2.0, 0.0, 2.0, 2.0),
        sampling_logprobs=(*values, -0.1, 0.0, -0.2, -0.3),
        policy_versions=(0,),
    )


async def test_a_datum_is_its_tokens_but_the_last_and_what_each_of_them_is_followed_by(
    trainer: TinkerTrainer, session: FakeSession, renderer: Qwen3VLRenderer
) -> None:
    datum = two_turns(renderer)
    loss = LossConfig(name="ppo", clip_low=0.1, clip_high=0.3)
    output = await trainer.forward_backward([datum], loss, token_weights=[0.5])

    (created, (_, (data, name, settings))) = session.asked
    assert created == ("create", ("tiny_qwen3_vl", {"rank": 8, "seed": 3, "train_unembed": False}))
    (text, picture, answers) = data[0].model_input.chunks
    assert (text.tokens, answers.tokens) == ([11, 12], [21, 31, 22])
    (sent,) = datum.model_input.image_chunks
    assert (picture.data, picture.format) == (sent.image.data, "png")
    assert picture.expected_tokens == sent.length
    inputs, images = data[0].loss_fn_inputs, [0] * sent.length
    assert inputs["target_tokens"] == [12, *images, 21, 31, 22, 23]
    assert inputs["advantages"] == [0.0, *map(float, images), 1.0, 0.0, 1.0, 1.0]  # 2 of each, weighted by a half
    assert inputs["logprobs"] == [0.0, *map(float, images), -0.1, 0.0, -0.2, -0.3]
    assert (name, settings) == ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3})

    # target number t of the service is token t + 1 here: the first sampled token follows 2 tokens and the picture
    at = 2 + sent.length
    row = output.training_logprobs[0]
    assert [row[at], row[at + 1], row[at + 2]] == [-0.5 - (at - 1), 0.0, -0.5 - (at + 1)]
    assert set(row[:at]) == {0.0}
    assert output.metrics["loss/total"] == 1.25
    assert output.metrics["optim/trained_tokens"] == 3.0


async def test_losses_without_clipping_have_no_thresholds(
    trainer: TinkerTrainer, session: FakeSession, renderer: Qwen3VLRenderer
) -> None:
    await trainer.forward_backward([two_turns(renderer)], LossConfig(), token_weights=[1.0])
    assert session.asked[-1][1][1:] == ("importance_sampling", None)


async def test_a_forward_pass_scores_what_is_on_the_mask(
    trainer: TinkerTrainer, session: FakeSession, renderer: Qwen3VLRenderer
) -> None:
    datum = two_turns(renderer)
    (row,) = await trainer.forward([datum])
    data, name = session.asked[-1][1]
    assert name == "cross_entropy"
    assert data[0].loss_fn_inputs["weights"] == list(map(float, datum.loss_mask[1:]))
    assert [value != 0.0 for value in row] == list(datum.loss_mask)


async def test_weights_stay_on_the_service_and_the_run_keeps_their_address(
    trainer: TinkerTrainer, session: FakeSession, tmp_path: Path
) -> None:
    taken = await trainer.optim_step(OptimConfig(learning_rate=1e-3))
    assert (taken.policy_version, taken.grad_norm, taken.learning_rate) == (1, 0.75, 1e-3)
    adapter = await trainer.save_weights_for_sampler(tmp_path / "sampler_weights" / "000001")
    await trainer.save_state(tmp_path / "weights" / "000001")
    assert adapter.policy_version == 1
    pointer = json.loads((adapter.path / "tinker.json").read_text())
    assert pointer == {
        "path": "tinker://m/sampler_weights/000001",
        "policy_version": 1,
        "base_url": "http://tinker",
    }

    again = TinkerTrainer(SERVICE, FakeSdk(), session, TrainerConfig())
    await again.load_state(tmp_path / "weights" / "000001")
    assert again.policy_version == 1
    await again.optim_step(OptimConfig())
    names = [name for name, _ in session.asked]
    assert names == ["create", "optim_step", "save", "save_state", "load", "optim_step"]
    assert session.asked[4][1] == "tinker://m/weights/000001"
    with pytest.raises(ConfigError, match="which a run with training=tinker writes"):
        await again.load_state(tmp_path)


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
async def test_numbers_that_nothing_can_be_trained_on_end_the_step(
    trainer: TinkerTrainer, session: FakeSession, renderer: Qwen3VLRenderer, logprob: float
) -> None:
    session.logprob = logprob
    with pytest.raises(TrainingError, match="expected finite log-probabilities"):
        await trainer.forward([two_turns(renderer)])


async def test_too_few_numbers_end_the_step(
    trainer: TinkerTrainer, session: FakeSession, renderer: Qwen3VLRenderer
) -> None:
    session.forward = lambda data, loss: session._answer("forward", data, session._outputs(data[:1]))  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="expected a log-probability for each token"):
        await trainer.forward([two_turns(renderer)] * 2)


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [([5], []), ([-5], [-0.1]), ([2**70], [-0.1]), ([5], [float("nan")]), (["a"], [-0.1])]
)
async def test_an_answer_that_is_none_is_a_fault_of_the_service(
    session: FakeSession, renderer: Qwen3VLRenderer, tokens: list[Any], logprobs: list[float]
) -> None:
    sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason="stop")
    session.answer = SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0)
    gateway = Gateway(
        TinkerSampler(SERVICE, FakeSdk(), session, renderer), renderer, SamplingParams(max_tokens=64, temperature=1.0)
    )
    gateway.open_rollout("r")
    with pytest.raises(SamplingError, match="the Tinker service at http://tinker"):
        await gateway.answer("r", {"input": "hi"}, "responses")


async def test_a_service_that_fails_ends_the_step(trainer: TinkerTrainer, session: FakeSession) -> None:
    def fail(params: Any) -> Any:
        raise RuntimeError("poisoned")

    session.optim_step = fail  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="the Tinker service at http://tinker: RuntimeError: poisoned"):
        await trainer.optim_step(OptimConfig())


async def test_turns_are_sampled_on_the_service_with_the_renderers_tokens(
    session: FakeSession, renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    tokens = [*renderer.encode("done"), renderer.stop_token_ids[0]]
    sequence = SimpleNamespace(tokens=tokens, logprobs=[-0.25] * len(tokens), stop_reason="stop")
    session.answer = SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=5)
    sampler = TinkerSampler(SERVICE, FakeSdk(), session, renderer)
    gateway = Gateway(sampler, renderer, SamplingParams(max_tokens=64, temperature=1.0, seed=7))
    gateway.open_rollout("r")
    agent = gateway.openai_client("r")
    picture = stored_image(encode_image(make_image(96, 64, 1)))
    content = [
        {"type": "input_text", "text": "Look."},
        {"type": "input_image", "image_url": picture.data_url(), "detail": "auto"},
    ]
    await agent.responses.create(model="policy", input=[{"role": "user", "content": content}])
    path = tmp_path / "sampler_weights" / "000001"
    path.mkdir(parents=True)
    (path / "tinker.json").write_text(json.dumps({"path": "tinker://m/sampler_weights/1", "policy_version": 1}))
    await sampler.publish(AdapterRef(path=path, policy_version=1))
    await agent.responses.create(model="policy", input="Next.")
    turns = gateway.close_rollout("r")

    names = [name for name, _ in session.asked]
    assert names == ["sampler", "sample", "sampler", "sample"]
    assert [session.asked[0][1], session.asked[2][1]] == [
        {"base_model": "tiny_qwen3_vl"},
        {"model_path": "tinker://m/sampler_weights/1"},
    ]
    assert [turn.policy_version for turn in turns] == [0, 1]
    assert [turn.prompt_matches_renderer for turn in turns] == [True, True]
    assert [turn.sampled_tokens for turn in turns] == [tuple(tokens)] * 2
    assert (turns[0].sampling_logprobs, turns[0].cached_tokens) == ((-0.25,) * len(tokens), 5)
    prompt, num_samples, params = session.asked[1][1]
    assert num_samples == 1
    assert (params.max_tokens, params.temperature, params.stop) == (64, 1.0, list(renderer.stop_token_ids))
    assert params.seed is not None
    assert [getattr(chunk, "expected_tokens", None) for chunk in prompt.chunks].count(None) == len(prompt.chunks) - 1
    (seen,) = [chunk for chunk in prompt.chunks if hasattr(chunk, "data")]
    assert seen.data == picture.data
    session.answer = None
    gateway.open_rollout("fails")
    with pytest.raises(SamplingError, match="the Tinker service at http://tinker"):
        await gateway.answer("fails", {"input": "hi"}, "responses")


async def test_an_answer_ends_with_the_token_that_completes_a_stop_of_the_request(
    session: FakeSession, renderer: Qwen3VLRenderer
) -> None:
    """As by a model server of one's own; the end of turn still ends one that comes to none."""
    tokens = [*renderer.encode("press OK"), *renderer.encode("\nObservation: none"), renderer.stop_token_ids[0]]
    logprobs = [-0.01 * place for place in range(len(tokens))]
    sequence = SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason="length")
    session.answer = SimpleNamespace(sequences=[sequence], prompt_cache_hit_tokens=0)
    sampler = TinkerSampler(SERVICE, FakeSdk(), session, renderer)
    gateway = Gateway(sampler, renderer, SamplingParams(max_tokens=64, temperature=1.0))
    gateway.open_rollout("r")
    agent, messages = gateway.openai_client("r"), [{"role": "user", "content": "hi"}]
    stopped = await agent.chat.completions.create(model="policy", messages=messages, stop=["\nObs", "none"])  # type: ignore[arg-type]
    await agent.chat.completions.create(model="policy", messages=messages, stop=["never"])  # type: ignore[arg-type]
    one, other = gateway.close_rollout("r")

    length = next(n for n in range(len(tokens)) if "\nObs" in renderer.decode(tokens[:n]))
    assert stopped.choices[0].message.content == "press OK"
    assert stopped.choices[0].finish_reason == "stop"
    assert (one.sampled_tokens, one.sampling_logprobs) == (tuple(tokens[:length]), tuple(logprobs[:length]))
    assert (other.sampled_tokens, other.stop) == (tuple(tokens), "length")


def test_a_run_without_gpus_plans_neither_trainer_nor_server() -> None:
    from cua_rl.machine.machine import Machine
    from cua_rl.run.resolve import resolve

    machine = Machine(gpus=("0",), gpu_gib=8.0, host_gib=4.0)
    changed = with_values(config(), model_name=str(TINY_QWEN3_VL))
    _, memory = resolve(changed, machine, TINY_QWEN3_VL)
    assert (memory.trainer, memory.server) == ({}, {})

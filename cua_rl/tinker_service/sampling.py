"""Sampling sessions and unfinished samples. A sample is lost with the process; the SDK then repeats its request."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert

from cua_rl.database.tinker_models import TinkerSampler, TinkerSession
from cua_rl.host.request_limits import BodyBudget, HeldBody, RequestRefused
from cua_rl.sampling.generation import Generated, GenerateParams, PromptError
from cua_rl.sampling.replica import RequestRejected
from cua_rl.tinker_service.data import Reader, json_chunk
from cua_rl.tinker_service.messages import Fields, encode_samples
from cua_rl.tinker_service.requests import CHECKPOINT_PATH, MAX_SEQ
from cua_rl.tinker_service.store import Store
from cua_rl.types.errors import SamplingError
from cua_rl.types.json_values import is_array
from cua_rl.types.rollout import AdapterRef, EncodedTextChunk, ModelInput

_MOST_SAMPLES = 1024  # of a prompt
_OPEN_BYTES, _SAMPLE_BYTES = 2**30, 2**17
"""Prompts of a key on their way, each of which counts for so many bytes at least; the SDK waits and asks again."""
_KEPT_S, _KEPT_FETCHED_S = 600.0, 60.0  # a result that nobody fetches, and one whose answer may have been lost
_TOUCH_S = 60.0
_TOP = 20  # most that vLLM reports


class Generator(Protocol):
    """The model servers; `sampling.client.SamplingClient` says what the method does."""

    async def generate(
        self,
        prompt: ModelInput,
        params: GenerateParams,
        *,
        image_token_id: int,
        adapter: AdapterRef | None = None,
        sticky_key: str = "",
    ) -> Generated: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    key_id: int
    digest: int
    sequence_ids: list[str]
    task: asyncio.Task[bytes]
    """The encoded answer."""


class Samplers:
    """Sampling sessions and samples of all keys; a context that cancels samples at its end."""

    def __init__(
        self, generator: Generator, store: Store, reader: Reader, base_model: str, *, open_bytes: int = _OPEN_BYTES
    ) -> None:
        self._generator = generator
        self._store = store
        self._reader = reader
        self._base_model = base_model
        self._samples: dict[str, _Sample] = {}
        self._open_bytes = open_bytes
        self._open: dict[int, BodyBudget] = {}
        self._touched: dict[str, float] = {}

    async def create(self, fields: Fields, session_id: str, key_id: int) -> str:
        """Make a sampling session for the base model or a checkpoint; raises `RequestRefused`."""
        sampler_id = f"{session_id}:sample:{fields.whole('sampling_session_seq_id', 0, MAX_SEQ)}"
        path = fields.optional_text("model_path", pattern=CHECKPOINT_PATH)
        weights = await self._weights_at(path, key_id) if path else {}
        if path is None:
            self.require_base_model(fields)
        row = insert(TinkerSampler).values(
            id=sampler_id, session_id=session_id, model_path=path, is_inflight=False, **weights
        )
        await self._store.write(row.on_conflict_do_nothing())
        return sampler_id

    def require_base_model(self, fields: Fields) -> None:
        """Raise `RequestRefused` for another model than the one that is served."""
        name = fields.text("base_model")
        if name != self._base_model:
            raise RequestRefused(400, f"expected base_model {self._base_model!r}, which is served, got {name[:200]!r}")

    async def _weights_at(self, path: str, key_id: int) -> dict[str, object]:
        if "/sampler_weights/" not in path:
            raise RequestRefused(400, f"expected a path of save_weights_for_sampler to sample from, got {path!r}")
        found = await self._store.find_checkpoint(path, key_id)
        return {"model_id": found.model_id, "version": found.version, "folder": found.folder}

    async def find(self, sampler_id: str, key_id: int) -> tuple[AdapterRef | None, str | None]:
        """The adapter of a sampling session, and its path if it is a checkpoint; raises `RequestRefused`."""
        query = select(TinkerSampler, TinkerSession.key_id).join(TinkerSession).where(TinkerSampler.id == sampler_id)
        rows = await self._store.read(query)
        if not rows or rows[0].key_id != key_id:
            raise RequestRefused(404, f"expected a sampling session of this key, got {sampler_id[:100]!r}")
        row = rows[0]
        if row.folder is None:
            return None, None
        if row.model_path is not None:  # it may have been deleted
            row = await self._store.find_checkpoint(row.model_path, key_id)
            return _adapter(row.folder, row.version, row.model_id), row.path
        return _adapter(row.folder, row.version, row.model_id), None

    async def submit(self, fields: Fields, key_id: int) -> tuple[str, list[str]]:
        """Begin to sample; returns the ids of the request and of its samples. One that is repeated keeps them."""
        sampler_id = fields.optional_text("sampling_session_id")
        adapter: AdapterRef | None = None
        if sampler_id is not None:
            request_id = f"{sampler_id}:{fields.whole('seq_id', 0, 2**63)}"
            adapter, _ = await self.find(sampler_id, key_id)
            await self._touch(sampler_id)
        else:
            request_id = f"{uuid4().hex}:sample:0"
            if path := fields.optional_text("model_path", pattern=CHECKPOINT_PATH):
                weights = await self._weights_at(path, key_id)
                adapter = _adapter(str(weights["folder"]), int(str(weights["version"])), str(weights["model_id"]))
            else:
                self.require_base_model(fields)
        prompt, params, last_n, digest = await self._reader.in_turn(key_id, self._read, fields)
        known = self._samples.get(request_id)
        if known is None:
            held = HeldBody(self._open.setdefault(key_id, BodyBudget(self._open_bytes)))
            held.add(_SAMPLE_BYTES + sum(len(image.data) for image in prompt.images))
            task = asyncio.create_task(self._draw(prompt, params, last_n, adapter), name=f"sample-{request_id}")
            ids = [f"{request_id}:{index}" for index in range(params.n)]
            known = _Sample(key_id=key_id, digest=digest, sequence_ids=ids, task=task)
            self._samples[request_id] = known
            task.add_done_callback(lambda _: self._ended(request_id, held))
        elif known.digest != digest or known.key_id != key_id:
            raise RequestRefused(400, f"expected a new seq_id, got that of another request: {request_id!r}")
        return request_id, known.sequence_ids

    async def _draw(
        self, prompt: ModelInput, params: GenerateParams, last_n: int | None, adapter: AdapterRef | None
    ) -> bytes:
        image_token_id = self._reader.image_token_id
        generated = await self._generator.generate(prompt, params, image_token_id=image_token_id, adapter=adapter)
        return await asyncio.to_thread(encode_samples, generated, last_n)

    def _ended(self, request_id: str, held: HeldBody) -> None:
        held.release()
        self._forget(request_id, _KEPT_S)

    def _forget(self, request_id: str, after_s: float) -> None:
        asyncio.get_running_loop().call_later(after_s, self._samples.pop, request_id, None)

    async def _touch(self, sampler_id: str) -> None:
        now = time.monotonic()
        if now - self._touched.get(sampler_id, -_TOUCH_S) >= _TOUCH_S:
            self._touched[sampler_id] = now
            used = update(TinkerSampler).where(TinkerSampler.id == sampler_id).values(used_at=func.now())
            await self._store.write(used)

    async def answer(self, request_id: str, key_id: int, wait_s: float) -> bytes | None:
        """The encoded samples, None if they take longer; raises `RequestRefused`, with 410 for one that is lost."""
        known = self._samples.get(request_id)
        if known is None or known.key_id != key_id:
            raise RequestRefused(
                410, f"expected a request that this process knows, got {request_id[:100]!r}; ask again"
            )
        await asyncio.wait([known.task], timeout=wait_s)
        if not known.task.done():
            return None
        self._forget(request_id, _KEPT_FETCHED_S)
        if known.task.cancelled():
            raise RequestRefused(410, f"{request_id} was cancelled")
        try:
            return known.task.result()
        except (PromptError, RequestRejected) as error:
            raise SampleFailed(str(error), "user") from error
        except SamplingError as error:
            raise SampleFailed(str(error), "server") from error

    def cancel(self, request_id: str, key_id: int) -> None:
        """Stop a sample that nobody waits for."""
        known = self._samples.get(request_id)
        if known is not None and known.key_id == key_id:
            known.task.cancel()

    async def close(self) -> None:
        """Stop all samples."""
        tasks = [sample.task for sample in self._samples.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _read(self, fields: Fields) -> tuple[ModelInput, GenerateParams, int | None, int]:
        """Prompt and parameters of a request, and a hash of them; raises `RequestRefused`."""
        given = fields.inner("sampling_params")
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
            fields.refuse_other(name, 0)
        max_tokens = given.optional_whole("max_tokens", 1, MAX_SEQ)
        chunks = [json_chunk(chunk) for chunk in fields.inner("prompt").items("chunks")]
        prompt = self._reader.prompt(chunks, "prompt", room=max_tokens or 1)
        image_id = self._reader.image_token_id
        if any(image_id in chunk.tokens for chunk in prompt.chunks if isinstance(chunk, EncodedTextChunk)):
            raise RequestRefused(400, f"expected images as chunks of the prompt, got their token {image_id} as text")
        scores = fields.yes("prompt_logprobs", False)
        last_n = fields.optional_whole("prompt_logprobs_last_n", 1, prompt.length)
        strings, tokens, ignores_end = _stops(given.values.get("stop"))
        seed = given.optional_whole("seed", -(2**63), 2**64)
        params = GenerateParams(
            max_tokens=max_tokens,
            temperature=given.number("temperature", 0.0, 100.0, 1.0),
            top_p=given.number("top_p", 1e-9, 1.0, 1.0),
            top_k=max(0, given.whole("top_k", -1, MAX_SEQ, -1)),
            seed=None if seed is None else seed % 2**62,
            stop_token_ids=tokens,
            stop_strings=strings,
            ignores_end_of_turn=ignores_end,
            n=fields.whole("num_samples", 1, _MOST_SAMPLES, 1),
            topk_logprobs=fields.whole("topk_sample_logprobs", 0, _TOP - 1, 0),
            prompt_logprobs=scores,
            topk_prompt_logprobs=fields.whole("topk_prompt_logprobs", 0, _TOP, 0),
        )
        return prompt, params, last_n, hash((prompt, params, last_n))


class SampleFailed(Exception):
    """The model server, or the request to it, failed; `category` says whose fault it is."""

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


def _adapter(folder: str, version: int, model_id: str) -> AdapterRef:
    """The adapter by a name that no other weights have: model, and number of the request that saved it."""
    return AdapterRef(path=Path(folder), policy_version=version, model=model_id.replace(":", "."))


def _stops(stop: object) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Stop strings, stop tokens, and whether they replace the end of turn, as they do even if there are none."""
    if stop is None:
        return (), (), False
    values = (stop,) if isinstance(stop, str) else stop
    if is_array(values) and len(values) <= 64:
        strings = tuple(value for value in values if isinstance(value, str) and 0 < len(value) <= 1000)
        tokens = tuple(value for value in values if isinstance(value, int) and 0 <= value <= MAX_SEQ)
        if len(values) in (len(strings), len(tokens)):
            return strings, tokens, True
    raise RequestRefused(400, f"expected stop as a text, texts or token ids, at most 64, got {repr(stop)[:100]}")

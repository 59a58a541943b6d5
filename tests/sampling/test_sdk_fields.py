"""Every field of a request that the vendors' own packages declare: is it refused, named, or does it change something?

The types of the installed `openai` and `anthropic` are walked, so that a field which a new version adds fails here
unless the gateway names it.
"""

import json
import re
import types
import typing
from collections import abc
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import pytest
import pytest_asyncio
import typing_extensions
from anthropic.types import message_create_params as anthropic_params
from anthropic.types.beta import message_create_params as anthropic_beta_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.types.rollout import SamplingParams
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import FakeVllm
from tests.sampling.test_computer_tool import PREVIEW, call, url
from tests.sampling.test_request_fields import DOCS

SCREENS = [url(encode_image(make_image(64, 64, seed))) for seed in range(2)]
QUESTION: Any = {"role": "user", "content": "hi"}
SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "integer"}}}
NAMES = ("click", "other")
CLAUDE: Any = {
    "max_tokens": 300,
    "messages": [QUESTION],
    "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
}
CALL: Any = {"name": "click", "arguments": "{}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """An endpoint, the type of its requests, a plain request, and a call whose id is that of all examples."""

    path: str
    requests: Any
    plain: Any
    call: Any
    takes: str
    """Kinds of objects among those that must not be refused, or else nothing in them would be tried."""


APIS = {
    "responses": Api(
        path="responses",
        requests=responses_params.ResponseCreateParamsNonStreaming,
        plain={
            "input": [QUESTION],
            "tools": [PREVIEW, *({"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES)],
        },
        call={"type": "function_call", "call_id": "some text", **CALL},
        takes="EasyInputMessageParam ResponseInputImageParam FunctionCallOutput ComputerCallOutput"
        " ResponseComputerToolCallParam ResponseReasoningItemParam FunctionToolParam ComputerToolParam"
        " ComputerUsePreviewToolParam ToolChoiceAllowedParam ResponseFormatTextJSONSchemaConfigParam",
    ),
    "chat": Api(
        path="chat/completions",
        requests=chat_params.CompletionCreateParamsNonStreaming,
        plain={"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": name}} for name in NAMES]},
        call={"role": "assistant", "tool_calls": [{"type": "function", "id": "some text", "function": CALL}]},
        takes="ChatCompletionAssistantMessageParam ChatCompletionMessageFunctionToolCallParam ImageURL"
        " ChatCompletionToolMessageParam FunctionDefinition ChatCompletionAllowedToolChoiceParam JSONSchema",
    ),
    "messages": Api(
        path="messages",
        requests=anthropic_params.MessageCreateParamsNonStreaming,
        plain=CLAUDE,
        call={"role": "assistant", "content": [{"type": "tool_use", "id": "some text", "name": "click", "input": {}}]},
        takes="TextBlockParam ImageBlockParam Base64ImageSourceParam ThinkingBlockParam ToolUseBlockParam ToolParam"
        " ToolResultBlockParam ToolChoiceToolParam ThinkingConfigEnabledParam JSONOutputFormatParam",
    ),
}
APIS["messages of the beta"] = replace(
    APIS["messages"],
    requests=anthropic_beta_params.MessageCreateParamsNonStreaming,
    takes="BetaTextBlockParam BetaImageBlockParam BetaToolResultBlockParam BetaToolComputerUse20251124Param",
)
TEXTS: dict[str, tuple[str, str]] = {
    "image_url": (SCREENS[0], SCREENS[1]),
    "url": (SCREENS[0], SCREENS[1]),
    "data": (SCREENS[0].partition(",")[2], SCREENS[1].partition(",")[2]),
    "arguments": ('{"x": 1}', '{"x": 2}'),
    "name": NAMES,
}
"""Two values of texts that have a form."""
ASK_FOR_NOTHING = (None, False, "", "auto", "disabled", "text", {}, [], {"type": "adaptive"}, ["text"])
"""Values of fields that ask for what happens anyway."""

OTHERWISE_READ = {
    "input.role",  # later messages of the system are messages of the user
    "input.name",  # a result has the name of its call
    "tool_choice.disable_parallel_tool_use",  # a tool that is named is called once
}
"""Fields whose values differ in some objects only."""


def inert_names() -> set[str]:
    """The fields that docs/agents.md lists as not affecting the answer."""
    start = DOCS.index("fields that do not affect the answer")
    return set(DOCS[start : DOCS.index("\n\n", start)].split("`")[1::2])


def alternatives(annotation: Any) -> Iterator[Any]:
    """The types of which a value may be."""
    if isinstance(annotation, typing_extensions.TypeAliasType):
        annotation = annotation.__value__
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            yield from alternatives(one)
    elif origin in (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired):
        yield from alternatives(arguments[0])
    elif annotation is not type(None):
        yield annotation


def is_list(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    name = getattr(origin or annotation, "__name__", "")
    return origin in (list, abc.Iterable, abc.Sequence) or name == "SequenceNotStr"


def plain_values(annotation: Any, name: str) -> list[Any]:
    """Values of a type without fields of its own."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if annotation is bool:
        return [True, False]
    if annotation in (int, float):
        return [annotation(20), annotation(30)]  # below the run's limit of tokens
    if typing.get_origin(annotation) is dict:
        return [{"type": "function", "name": name, "function": {"name": name}} for name in NAMES]
    return list(TEXTS.get(name, ("some text", "another text")))


def example(annotation: Any, name: str = "") -> Any:
    """A value with the fields that are required."""
    one = next(alternatives(annotation))
    if typing_extensions.is_typeddict(one):
        hints = typing_extensions.get_type_hints(one, include_extras=True)
        # of types in other modules, whose annotations are texts, `__required_keys__` is empty
        is_required = typing_extensions.Required
        wanted = [
            key
            for key, hint in hints.items()
            if key in ("image_url", "schema", "action") or typing.get_origin(hint) is is_required
        ]
        return {key: example(hints[key], key) for key in wanted}
    if is_list(one):
        return [example(typing.get_args(one)[0], name)]
    return plain_values(one, name)[0]


@dataclass(kw_only=True)
class Walk:
    """What became of the fields of an API, by path."""

    http: httpx.AsyncClient
    fake: FakeVllm
    path: str
    silent: set[str] = field(default_factory=set[str])
    accepted: set[str] = field(default_factory=set[str])
    """Kinds of objects that are not refused."""

    async def send(self, body: Any) -> tuple[Any, list[str]]:
        """What an answer depends on, None if the request is refused, and the fields that are named."""
        self.fake.requests.clear()
        answer = await self.http.post(self.path, json=body)
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code == 400:
            assert "expected" in answer.json()["error"]["message"], answer.text
            return None, []
        named = [one.strip() for one in answer.headers.get("CUA-Ignored", "").split(",")]
        if "json" not in answer.headers["content-type"]:
            return answer.text.count("data: "), named
        said = answer.json()
        (content,) = [said[name] for name in ("output", "content", "choices") if name in said]
        asked = {name: value for name, value in self.fake.requests[-1].items() if name not in ("seed", "request_id")}
        return (asked, re.sub("[0-9a-f]{32}", "", json.dumps(content))), named

    async def visit(self, annotation: Any, place: str, build: Callable[[Any], Any], within: tuple[Any, ...]) -> None:
        """Try all values of a place in a request, which `build` makes around each."""
        for one in alternatives(annotation):
            if typing_extensions.is_typeddict(one):
                if one not in within:
                    await self.visit_object(one, place, build, (*within, one))
            elif is_list(one):
                await self.visit(typing.get_args(one)[0], place, lambda value: build([value]), within)
            elif typing.get_origin(one) is not typing.Literal or len(typing.get_args(one)) > 1:
                name = place.rpartition(".")[2]
                await self.try_values(plain_values(one, name), place, build)

    async def visit_object(self, kind: Any, place: str, build: Callable[[Any], Any], within: tuple[Any, ...]) -> None:
        base = example(kind)
        if (await self.send(build(base)))[0] is None:
            return
        self.accepted.add(kind.__name__)
        for name, hint in typing_extensions.get_type_hints(kind, include_extras=True).items():
            inner = f"{place}.{name}".lstrip(".")
            await self.visit(hint, inner, lambda value, name=name: build({**base, name: value}), within)

    async def try_values(self, values: list[Any], place: str, build: Callable[[Any], Any]) -> None:
        outcomes = [await self.send(build(value)) for value in values]
        for value, (seen, named) in zip(values, outcomes, strict=True):
            is_named = any(place == one or place.startswith((f"{one}.", f"{one}:")) for one in named)
            changes = any(seen != other for other, _ in outcomes)
            if seen is not None and not is_named and not changes and value not in ASK_FOR_NOTHING:
                self.silent.add(place)


@pytest.fixture
def gateway(client: SamplingClient, renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, renderer, SamplingParams(max_tokens=400, temperature=1.0))


@pytest_asyncio.fixture
async def http(gateway: Gateway) -> AsyncGenerator[httpx.AsyncClient]:
    gateway.open_rollout("r")
    access = gateway.access("r")
    assert access is not None
    headers = {"Authorization": f"Bearer {access.api_key}"}
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/rollouts/r/v1/", headers=headers) as one:
        yield one


@pytest.mark.parametrize("name", APIS)
async def test_no_field_of_a_vendors_package_is_without_effect_and_unnamed(
    name: str, http: httpx.AsyncClient, fake: FakeVllm
) -> None:
    api = APIS[name]
    fake.default_answer = call(action="left_click", coordinate=[500, 250])
    walk = Walk(http=http, fake=fake, path=api.path)

    def build(value: Any, name: str) -> Any:
        if name in ("input", "messages") and isinstance(value, list):  # after a call, and before a user
            value = [QUESTION, api.call, *value, QUESTION]
        return {**api.plain, name: value, **({"stream": True} if name == "stream_options" else {})}

    for one, hint in typing_extensions.get_type_hints(api.requests, include_extras=True).items():
        await walk.visit(hint, one, partial(build, name=one), ())

    known = inert_names() | OTHERWISE_READ
    assert {place for place in walk.silent if not known & {place, *place.split(".")}} == set()
    assert "model" in walk.silent
    assert set(api.takes.split()) - walk.accepted == set()


async def test_a_field_that_no_api_has_yet_is_named_wherever_it_is(http: httpx.AsyncClient) -> None:
    image, new = {"url": SCREENS[0], "new": 1}, {"new": [0]}
    part = {"type": "image_url", "image_url": image, **new}
    sent = {"messages": [{**QUESTION, "content": [part], **new}]}

    answer = await http.post("chat/completions", json={**sent, **new, "\r\nSet-Cookie: a": 1, "e" * 99: 1})

    places = ["messages.content.image_url.new", "messages.content.new", "messages.new", "new", "others"]
    assert answer.headers["CUA-Ignored"] == ", ".join(places)
    assert "Set-Cookie" not in answer.headers


async def test_a_schema_is_named_as_not_enforced_unless_the_call_is_forced(http: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "name": "click", "strict": True, "parameters": SCHEMA}]
    for choice, named in ("auto", "tools.strict"), ("required", None):
        answer = await http.post("responses", json={"input": "hi", "tools": tools, "tool_choice": choice})
        assert answer.headers.get("CUA-Ignored") == named

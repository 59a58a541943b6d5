"""Converts OpenAI requests (Responses and Chat Completions) to conversation items, and these to Responses items.

Images must be inside the request, as `data:` URLs with PNG or JPEG bytes. Anything unsupported is a `RequestError` that
names the place in the request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_fields import FieldPath, list_at, mapping_at, optional_list_at, optional_text_at, text_at
from cua_rl.renderers.request_error import RequestError as RequestError
from cua_rl.types.conversation import (
    EncodedImage,
    Item,
    Message,
    Part,
    Reasoning,
    Role,
    SampledAnswer,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from cua_rl.types.json_values import Json, is_object
from cua_rl.types.rollout import SamplingParams

_TEXT_TYPES = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
_IMAGE_TYPES = ("image_url", "input_image")

_MAX_STOPS = 64  # each is looked for at the end of every message
_REFUSED = {
    "background": "wait for the response",
    "conversation": "send previous_response_id, or all items",
    "prompt": "send its text as instructions or input",
    "functions": "send tools",
    "web_search_options": "describe a search as a tool of type function",
    "audio": "ask for text",
}
"""Fields that would change the meaning of a request, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The conversation of a request and its tools."""

    items: tuple[Item, ...]
    tools: tuple[Tool, ...]
    stops: tuple[str, ...] = ()
    """Texts at which the answer ends; the agent may have put one back behind an earlier answer."""
    max_tokens: int | None = None
    """Maximum length of the answer; None is the run's."""

    def limit(self, params: SamplingParams) -> SamplingParams:
        """The run's parameters with the limits of this request, which may only make an answer shorter."""
        longest = params.max_tokens if self.max_tokens is None else min(params.max_tokens, self.max_tokens)
        return replace(params, max_tokens=longest, stops=self.stops)


@dataclass(frozen=True, slots=True)
class StoredItems:
    """What a Responses request may name instead of sending it again."""

    conversations: dict[str, tuple[Item, ...]] = field(default_factory=dict[str, tuple[Item, ...]])
    """For each response, by its id, the conversation that ends with it, without instructions."""
    items: dict[str, Item] = field(default_factory=dict[str, Item])
    """Output items by their ids."""


def conversation_from_responses(
    request: Json, images: ImageUrls | None = None, stored: StoredItems | None = None
) -> Conversation:
    """The conversation of a Responses request; `instructions` become the first system message.

    Item n of a list `input` is item n of the conversation, counted after the instructions and what `stored` has for
    `previous_response_id`. `images` and `stored` hold those of earlier requests of the same rollout. Raises
    `RequestError` if the request contains something that cannot be rendered for the model.
    """
    stored = stored or StoredItems()
    _refuse_fields(request)
    previous = optional_text_at(request, "previous_response_id", FieldPath("request"))
    if previous is not None and previous not in stored.conversations:
        raise FieldPath("previous_response_id").error("a response of this rollout", previous, "send all items again")
    earlier = () if previous is None else stored.conversations[previous]
    instructions = optional_text_at(request, "instructions", FieldPath("request"))
    system = [_text_message("system", instructions)] if instructions else []
    given = request.get("input", [])
    if isinstance(given, str):
        items: list[Item] = [_text_message("user", text_at(request, "input", FieldPath("request")))]
    else:
        images = images or ImageUrls()
        items = [
            _item_from_responses(item, images, stored, FieldPath(f"input[{index}]"))
            for index, item in enumerate(list_at(given, FieldPath("input")))
        ]
    return Conversation(
        items=(*system, *earlier, *_with_call_ids(items)),
        tools=_tools(request, nested=False),
        stops=_stops(request.get("stop")),
        max_tokens=_max_tokens(request, "max_output_tokens"),
    )


def _item_from_responses(item: object, images: ImageUrls, stored: StoredItems, at: FieldPath) -> Item:
    fields = mapping_at(item, at)
    kind = fields.get("type", "message")
    match kind:
        case "message":
            return _message(fields, images, at)
        case "reasoning":
            # in `content`, as our gateway writes it, or else in the summary
            name = "content" if fields.get("content") else "summary"
            parts = _parts(fields.get(name), images, at / name)
            return Reasoning(text="\n".join(part.text for part in parts if isinstance(part, TextPart)))
        case "function_call":
            return _tool_call(fields.get("call_id"), fields, at)
        case "function_call_output":
            content = _parts(fields.get("output"), images, at / "output")
            return ToolResult(call_id=optional_text_at(fields, "call_id", at) or "", content=content)
        case "item_reference":
            name = text_at(fields, "id", at)
            if name not in stored.items:
                raise at.error("the id of an output item of this rollout", name, "send the item itself")
            return stored.items[name]
        case _:
            raise at.error("message, reasoning, function_call or function_call_output", kind, "leave it out")


def conversation_from_chat(request: Json, images: ImageUrls | None = None) -> Conversation:
    """The conversation of a Chat Completions request.

    An assistant message becomes up to three kinds of items, in this order: reasoning, text, tool calls. `images` are
    those of earlier requests of the same rollout. Raises `RequestError` if the request contains something that cannot
    be rendered for the model.
    """
    _refuse_fields(request)
    items: list[Item] = []
    images = images or ImageUrls()
    for index, message in enumerate(list_at(request.get("messages", []), FieldPath("messages"))):
        at = FieldPath(f"messages[{index}]")
        fields = mapping_at(message, at)
        match fields.get("role"):
            case "tool":
                content = _parts(fields.get("content"), images, at / "content")
                items.append(ToolResult(call_id=optional_text_at(fields, "tool_call_id", at) or "", content=content))
            case "assistant":
                items += _chat_answer(fields, images, at)
            case _:
                items.append(_message(fields, images, at))
    return Conversation(
        items=_with_call_ids(items),
        tools=_tools(request, nested=True),
        stops=_stops(request.get("stop")),
        max_tokens=_max_tokens(request, "max_completion_tokens", "max_tokens"),
    )


def responses_input(
    items: Sequence[Item], image_url: Callable[[EncodedImage], object] = EncodedImage.data_url
) -> list[dict[str, object]]:
    """Items as `input` of a Responses request (a model server takes replayed ones)."""
    return [_responses_item(item, image_url, index) for index, item in enumerate(items)]


def responses_tools(tools: Sequence[Tool]) -> list[dict[str, object]]:
    """Tools in the flat format of a Responses request, without `strict`, which servers write into the prompt."""
    return [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in tools
    ]


def _stops(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else optional_list_at(given, FieldPath("stop"))
    if len(stops) > _MAX_STOPS:
        raise FieldPath("stop").error(f"at most {_MAX_STOPS} texts", len(stops), "send fewer")
    texts = tuple(stop for stop in stops if isinstance(stop, str))
    if len(texts) < len(stops):
        raise FieldPath("stop").error("a text or a list of texts", given, "correct the request")
    return tuple(filter(None, texts))


def _max_tokens(request: Json, *names: str) -> int | None:
    """The first of these fields that is there."""
    for name in names:
        limit = request.get(name)
        if limit is not None:
            if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
                raise FieldPath(name).error("a whole number of at least 1", limit, "correct the request")
            return limit
    return None


def _refuse_fields(request: Json) -> None:
    if request.get("n") not in (None, 1):
        raise FieldPath("n").error("one answer at a time", request["n"], "send it without n")
    for name, advice in _REFUSED.items():
        if request.get(name):
            raise FieldPath("request").error(f"no {name}", request[name], advice)


def _text_message(role: Role, text: str) -> Message:
    return Message(role=role, content=(TextPart(text=text),))


def _message(fields: Json, images: ImageUrls, at: FieldPath) -> Message:
    role = fields.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise at.error("a role among system, developer, user, assistant and tool", role, "use one of them")
    content = _parts(fields.get("content"), images, at / "content")
    if role != "user" and any(isinstance(part, EncodedImage) for part in content):
        raise at.error(f"text in a message of the {role}", "an image", "put it into a user message or tool result")
    return Message(role=role, content=content)


def _tool_call(call_id: object, fields: Json, at: FieldPath) -> ToolCall:
    return ToolCall(
        call_id=optional_text_at({"call_id": call_id}, "call_id", at) or "",
        name=text_at(fields, "name", at),
        arguments=text_at(fields, "arguments", at),
    )


def _chat_answer(fields: Json, images: ImageUrls, at: FieldPath) -> list[Item]:
    name = "reasoning_content" if fields.get("reasoning_content") else "reasoning"
    items: list[Item] = [Reasoning(text=text_at(fields, name, at))] if isinstance(fields.get(name), str) else []
    calls = optional_list_at(fields.get("tool_calls"), at / "tool_calls")
    for part, advice in (("function_call", "send tool_calls"), ("audio", "send its text"), ("refusal", "send content")):
        if fields.get(part):
            raise (at / part).error("nothing", fields[part], advice)
    message = _message(fields, images, at)
    if any(isinstance(part, TextPart) and part.text for part in message.content) or not (items or calls):
        items.append(message)
    for index, call in enumerate(calls):
        place = at / f"tool_calls[{index}]"
        outer = mapping_at(call, place)
        items.append(_tool_call(outer.get("id"), mapping_at(outer.get("function"), place / "function"), place))
    return items


def _with_call_ids(items: Sequence[Item]) -> tuple[Item, ...]:
    """Give ids to calls and results without one, and results the order of their calls: the model sees no ids."""
    named: list[Item] = []
    places: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for kind, group in groupby(items, key=type):
        run = list(group)
        if kind is ToolCall:
            calls = [item for item in run if isinstance(item, ToolCall)]
            run = [replace(call, call_id=call.call_id or f"call_{at}") for at, call in enumerate(calls, len(named))]
            places = {call.call_id: place for place, call in enumerate(run)}
            waiting = dict(places)
        elif kind is ToolResult:
            results = [item for item in run if isinstance(item, ToolResult)]
            given = {result.call_id for result in results}
            for call_id in given:
                waiting.pop(call_id, None)
            num_unnamed = sum(not result.call_id for result in results)
            if num_unnamed not in (0, len(waiting)):
                raise RequestError(
                    expected="a call id in each tool result, or a result for each call",
                    got=f"{num_unnamed} results without an id after {len(waiting)} calls without a result",
                    do="send the ids of the calls",
                )
            unnamed = iter(waiting)
            run = [result if result.call_id else replace(result, call_id=next(unnamed)) for result in results]
            if given <= places.keys():
                run.sort(key=lambda result: places[result.call_id])
        named += run
    return tuple(named)


def _parts(content: object, images: ImageUrls, at: FieldPath) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(text=text_at({"text": content}, "text", at)),)
    parts: list[Part] = []
    for index, part in enumerate(list_at(content, at)):
        place = FieldPath(f"{at}[{index}]")
        fields = mapping_at(part, place)
        kind = fields.get("type")
        if kind in _TEXT_TYPES:
            parts.append(TextPart(text=text_at(fields, "text", place)))
        elif kind == "refusal":
            parts.append(TextPart(text=text_at(fields, "refusal", place)))
        elif kind in _IMAGE_TYPES:
            url = fields.get("image_url")
            nested = url.get("url") if is_object(url) else url
            parts.append(images.image(nested, place / "image_url"))
        else:
            raise place.error("a part of text or an image", kind, "send text or a screenshot")
    return tuple(parts)


def _tools(request: Json, *, nested: bool) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for index, tool in enumerate(optional_list_at(request.get("tools"), FieldPath("tools"))):
        at = FieldPath(f"tools[{index}]")
        fields = mapping_at(tool, at)
        if fields.get("type") != "function":
            raise at.error("a tool of type function", fields.get("type"), "describe it as a function")
        function = mapping_at(fields.get("function"), at / "function") if nested else fields
        parameters = function.get("parameters")
        tools.append(
            Tool(
                name=text_at(function, "name", at),
                description=optional_text_at(function, "description", at) or "",
                parameters={} if parameters is None else mapping_at(parameters, at / "parameters"),
            )
        )
    return tuple(tools)


def _responses_item(item: Item, image_url: Callable[[EncodedImage], object], index: int) -> dict[str, object]:
    match item:
        case SampledAnswer():
            return {"type": "message", "role": "assistant", "content": item.text}
        case Message(role="assistant"):
            text = "".join(part.text for part in item.content if isinstance(part, TextPart))
            return {"type": "message", "role": "assistant", "content": text}
        case Message():
            return {"type": "message", "role": item.role, "content": _responses_parts(item.content, image_url)}
        case Reasoning():
            thought = {"type": "reasoning_text", "text": item.text}
            return {"type": "reasoning", "id": f"rs_{index}", "summary": [], "content": [thought]}
        case ToolCall():
            return {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case ToolResult():
            output = _responses_parts(item.content, image_url)
            return {"type": "function_call_output", "call_id": item.call_id, "output": output or ""}


def _responses_parts(parts: Sequence[Part], image_url: Callable[[EncodedImage], object]) -> list[dict[str, object]]:
    return [
        {"type": "input_text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "input_image", "image_url": image_url(part), "detail": "auto"}
        for part in parts
    ]

"""Qwen3-VL's chat format: a conversation becomes text and image chunks, token for token what the model server reads.

The formats are those of Qwen3-VL Instruct, where thinking in earlier answers stays where it was, so that each prompt
extends the one before it, and of Qwen3-VL Thinking: see `chat_format`. `replay` says how items become messages;
`qwen3_vl_chat_template.jinja` is the Instruct format for servers.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from cua_rl.conversation import (
    EncodedImage,
    Item,
    Message,
    ParsedAnswer,
    Part,
    SampledAnswer,
    TextPart,
    Tool,
    ToolResult,
)
from cua_rl.errors import ConfigError
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.chat_format import INSTRUCT, THINKING, ChatFormat
from cua_rl.renderers.images import ImageSettings, load_image_settings, num_image_tokens
from cua_rl.renderers.replay import ReplayedItem, replay, text_of
from cua_rl.renderers.request_error import RequestError
from cua_rl.types import EncodedTextChunk, ImageChunk, ModelInput

CHAT_TEMPLATE_PATH = Path(__file__).parent / "qwen3_vl_chat_template.jinja"
"""Ships with models that we make; renders what `Qwen3VLRenderer` renders, given `replay`ed conversations."""

END_OF_TURN = "<|im_end|>"
_END_OF_TEXT = "<|endoftext|>"
_IMAGE = "<|image_pad|>"
_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_FOOTER = (
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A stretch of the conversation that the model itself wrote, with its end of turn."""

    text: str


_Piece = str | EncodedImage | _Answer


class Qwen3VLRenderer:
    """Renders conversations for Qwen3-VL, dense and mixture of experts; without image settings, for text-only Qwen3.

    The text-only format keeps earlier thinking too, unlike the template that ships with Qwen3.
    """

    def __init__(
        self,
        *,
        name: str,
        tokenizer: Tokenizer,
        image_settings: ImageSettings | None,
        chat_format: ChatFormat = INSTRUCT,
    ) -> None:
        self.name = name
        self._format = chat_format
        self.image_settings = image_settings
        self._tokenizer = tokenizer
        self._end_of_turn = _token_id(tokenizer, END_OF_TURN)
        self.image_token_id = _token_id(tokenizer, _IMAGE) if image_settings else -1
        """The placeholder of which an image takes `expected_tokens`; -1 if the model takes no images."""
        self.stop_token_ids: tuple[int, ...] = (self._end_of_turn, _token_id(tokenizer, _END_OF_TEXT))
        """What ends an answer: the end of turn first."""

    @property
    def supports_images(self) -> bool:
        return self.image_settings is not None

    def to_send(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[ReplayedItem, ...], tuple[Tool, ...]]:
        """Conversation and tools as the model server has to get them, so that it reads what `render` writes."""
        replayed = replay(items)
        if not tools or not self._format.tools_are_text:
            return replayed, tuple(tools)
        system, conversation = _take_system(replayed)
        return (Message(role="system", content=(TextPart(text=_system_text(system, tools)),)), *conversation), ()

    def render(self, items: Sequence[Item], tools: Sequence[Tool] = ()) -> ModelInput:
        """The prompt for the next answer.

        Raises:
            ConfigError: an image for a model that takes none.
            RequestError: an image that cannot be read, or one where the model cannot see it.
        """
        pieces = [_plain(piece) for piece in _pieces(replay(items), tools, self._format)]
        return ModelInput(chunks=tuple(self._chunks([*pieces, self._format.answer_header])))

    def render_supervised(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[ModelInput, tuple[bool, ...]]:
        """A conversation that ends with an answer, and True for each token of an answer, ends of turns included.

        Answers are encoded on their own, as they would be sampled, and the last token is the last end of turn.

        Raises:
            RequestError: the conversation does not end with an answer; otherwise as `render`.
        """
        pieces = list(_pieces(replay(items), tools, self._format))
        if len(pieces) < 2 or not isinstance(pieces[-2], _Answer):
            last = type(items[-1]).__name__ if items else "nothing"
            raise RequestError(expected="a conversation that ends with an answer", got=last, do="append the answer")
        chunks: list[EncodedTextChunk | ImageChunk] = []
        mask: list[bool] = []
        for is_answer, run in _runs(pieces[:-1]):
            for chunk in self._chunks(run):
                chunks.append(chunk)
                mask += [is_answer] * chunk.length
        return ModelInput(chunks=tuple(_joined(chunks))), tuple(mask)

    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart, given with or without its end of turn; never raises."""
        return parse_answer(self._format.complete(text.removesuffix(END_OF_TURN).removesuffix(_END_OF_TEXT)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; marks such as the end of turn become their special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _chunks(self, pieces: Sequence[str | EncodedImage]) -> Iterator[EncodedTextChunk | ImageChunk]:
        text: list[str] = []
        for piece in pieces:
            if isinstance(piece, str):
                text.append(piece)
                continue
            if text:
                yield self._text_chunk("".join(text))
            text = []
            yield self._image_chunk(piece)
        if text:
            yield self._text_chunk("".join(text))

    def _text_chunk(self, text: str) -> EncodedTextChunk:
        return EncodedTextChunk(tokens=tuple(self.encode(text)))

    def _image_chunk(self, image: EncodedImage) -> ImageChunk:
        if self.image_settings is None:
            raise ConfigError(
                f"expected text only for the renderer {self.name!r}, got an image; use a vision model such as Qwen3-VL"
            )
        return ImageChunk(
            image=image, expected_tokens=num_image_tokens(image.width_px, image.height_px, self.image_settings)
        )


def load_qwen3_vl(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen3-VL model folder."""
    return Qwen3VLRenderer(
        name="qwen3_vl", tokenizer=_load_tokenizer(model_path), image_settings=load_image_settings(model_path)
    )


def load_qwen3_vl_thinking(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen3-VL Thinking model folder."""
    return Qwen3VLRenderer(
        name="qwen3_vl_thinking",
        tokenizer=_load_tokenizer(model_path),
        image_settings=load_image_settings(model_path),
        chat_format=THINKING,
    )


def load_qwen3(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a text-only Qwen3 model folder."""
    return Qwen3VLRenderer(name="qwen3", tokenizer=_load_tokenizer(model_path), image_settings=None)


def _load_tokenizer(model_path: Path) -> Tokenizer:
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"expected a tokenizer in {str(path)!r}, got no such file; save the model's fast tokenizer there"
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ConfigError(f"expected {token!r} in the tokenizer, got a vocabulary without it; use a Qwen3 tokenizer")
    return token_id


def _pieces(items: Sequence[ReplayedItem], tools: Sequence[Tool], chat_format: ChatFormat) -> Iterator[_Piece]:
    system, conversation = _take_system(items)
    if system is not None or tools:
        yield f"<|im_start|>system\n{_system_text(system, tools)}{END_OF_TURN}\n"
    answers = chat_format.write_answers(conversation)
    for index, item in enumerate(conversation):
        match item:
            case Message():
                yield from ("<|im_start|>user\n", *_content(item.content, chat_format), f"{END_OF_TURN}\n")
            case SampledAnswer():
                answer = answers[index]
                yield from (answer.header, _Answer(f"{answer.text}{END_OF_TURN}"), "\n")
            case ToolResult():
                is_first = index == 0 or not isinstance(conversation[index - 1], ToolResult)
                is_last = index + 1 == len(conversation) or not isinstance(conversation[index + 1], ToolResult)
                yield "<|im_start|>user\n<tool_response>\n" if is_first else "\n<tool_response>\n"
                yield from _tool_result_content(item.content, chat_format)
                yield f"\n</tool_response>{END_OF_TURN}\n" if is_last else "\n</tool_response>"


def _take_system(items: Sequence[ReplayedItem]) -> tuple[Message | None, Sequence[ReplayedItem]]:
    """The system message, which comes first, and the rest."""
    first = items[0] if items else None
    return (first, items[1:]) if isinstance(first, Message) and first.role == "system" else (None, items)


def _system_text(system: Message | None, tools: Sequence[Tool]) -> str:
    said = text_of(system) if system else []
    if not tools:
        return "".join(said)
    return "\n\n".join([*said, _TOOLS_HEADER + "".join(f"{_tool_json(tool)}\n" for tool in tools) + _TOOLS_FOOTER])


def _tool_json(tool: Tool) -> str:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _content(parts: Sequence[Part], chat_format: ChatFormat) -> Iterator[str | EncodedImage]:
    for part in parts:
        match part:
            case TextPart():
                yield part.text
            case EncodedImage():
                yield from (f"{chat_format.before_image}<|vision_start|>", part, "<|vision_end|>")


def _tool_result_content(parts: Sequence[Part], chat_format: ChatFormat) -> Iterator[str | EncodedImage]:
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    # vLLM joins a result of text parts alone with line breaks, but not one that holds an image.
    return iter(["\n".join(texts)]) if len(texts) == len(parts) else _content(parts, chat_format)


def _plain(piece: _Piece) -> str | EncodedImage:
    return piece.text if isinstance(piece, _Answer) else piece


def _runs(pieces: Sequence[_Piece]) -> Iterator[tuple[bool, list[str | EncodedImage]]]:
    run: list[str | EncodedImage] = []
    for piece in pieces:
        if not isinstance(piece, _Answer):
            run.append(piece)
            continue
        yield False, run
        yield True, [piece.text]
        run = []


def _joined(chunks: Sequence[EncodedTextChunk | ImageChunk]) -> Iterator[EncodedTextChunk | ImageChunk]:
    tokens: list[int] = []
    for chunk in chunks:
        if isinstance(chunk, EncodedTextChunk):
            tokens += chunk.tokens
            continue
        if tokens:
            yield EncodedTextChunk(tokens=tuple(tokens))
        tokens = []
        yield chunk
    if tokens:
        yield EncodedTextChunk(tokens=tuple(tokens))

"""Qwen's chat format: a conversation as text and image chunks, token for token as the model server reads it.

Qwen3-VL Instruct keeps reasoning in earlier answers, so that each prompt extends the previous one; `chat_format` tells
how Qwen3-VL Thinking, Qwen2.5-VL and Qwen3.5 differ. `replay` defines how items become messages;
`qwen3_vl_chat_template.jinja` is the Instruct format for servers.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from cua_rl.renderers.answer_form import AnswerForm, write_grammar
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.chat_format import INSTRUCT, QWEN2_5, THINKING, ChatFormat, qwen3_5_format
from cua_rl.renderers.function_calls import CALL_FORM
from cua_rl.renderers.images import ImageSettings, load_image_settings, num_image_tokens
from cua_rl.renderers.replay import ReplayedItem, replay, text_of
from cua_rl.renderers.request_error import ContextOverflow, RequestError
from cua_rl.types.conversation import (
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
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import EncodedTextChunk, ImageChunk, ModelInput, SamplingParams

CHAT_TEMPLATE_PATH = Path(__file__).parent / "qwen3_vl_chat_template.jinja"
"""Part of the models that we make; on `replay`ed conversations it renders the same as `Qwen3VLRenderer`."""

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
_IMAGE = "<|image_pad|>"
_CHARACTERS_PER_TOKEN = 16  # texts have 2 to 5; longer tokens are white space and rules


@dataclass(frozen=True, slots=True)
class _Answer:
    """A part of the conversation that the model wrote, including its end of turn."""

    text: str


_Piece = str | EncodedImage | _Answer


class Qwen3VLRenderer:
    """Renders conversations for Qwen3-VL, Qwen2.5-VL and Qwen3.5; without image settings, for text-only Qwen3.

    The text-only format keeps earlier reasoning, too, unlike the template that ships with Qwen3.
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
        """The placeholder token of images, repeated `expected_tokens` times; -1 if the model takes no images."""
        self.stop_token_ids: tuple[int, ...] = (self._end_of_turn, _token_id(tokenizer, END_OF_TEXT))
        """Tokens that end an answer, the end of turn first."""

    @property
    def closes_thinking(self) -> bool:
        """Whether a prompt ends with a think block that is closed: the model answers without reasoning."""
        return "</think>" in self._format.answer_header

    def to_send(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[ReplayedItem, ...], tuple[Tool, ...]]:
        """Conversation and tools to send to the model server, so that its prompt equals that of `render`."""
        replayed = replay(items, self._format.write_answer)
        if self._format.results_are_text:
            replayed = tuple(_with_results_as_messages(replayed))
        if not tools or not self._format.tools_are_text:
            return replayed, tuple(tools)
        system, conversation = _take_system(replayed)
        text = _system_text(system, tools, self._format)
        return (Message(role="system", content=(TextPart(text=text),)), *conversation), ()

    def render(
        self,
        items: Sequence[Item],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        known: dict[str, EncodedTextChunk] | None = None,
    ) -> ModelInput:
        """The prompt for the next answer.

        `known` are the encoded texts of the conversation's previous prompt; those of this one take their place. A text
        between two screenshots recurs in every later prompt, and encoding is most of the work.

        Raises:
            ConfigError: an image for a text-only model.
            ContextOverflow: it has more than `max_tokens`. A text that is far too long is not encoded to its end.
            RequestError: an image that cannot be read, or is where the model cannot see it.
        """
        pieces = [piece.text if isinstance(piece, _Answer) else piece for piece in _pieces(items, tools, self._format)]
        earlier, used = known or {}, dict[str, EncodedTextChunk]()

        def encode(text: str) -> EncodedTextChunk:
            if text not in used:
                if max_tokens is not None and text not in earlier:
                    self._refuse_too_long(text, max_tokens)
                used[text] = earlier.get(text) or self._encode_chunk(text)
            return used[text]

        chunks: list[EncodedTextChunk | ImageChunk] = []
        length = 0
        for chunk in self._chunks([*pieces, self._format.answer_header], encode):
            chunks.append(chunk)
            length += chunk.length
            if max_tokens is not None and length > max_tokens:
                raise _overflow(max_tokens)
        if known is not None:
            known.clear()
            known.update(used)
        return ModelInput(chunks=tuple(chunks))

    def render_supervised(
        self, items: Sequence[Item], tools: Sequence[Tool] = ()
    ) -> tuple[ModelInput, tuple[bool, ...]]:
        """A conversation that ends with an answer, and True for each token of an answer, including ends of turns.

        Answers are encoded separately, as they would be sampled; the last token is the last end of turn.

        Raises:
            RequestError: the conversation does not end with an answer; otherwise as `render`.
        """
        pieces = list(_pieces(items, tools, self._format))
        if len(pieces) < 2 or not isinstance(pieces[-2], _Answer):
            last = type(items[-1]).__name__ if items else "nothing"
            raise RequestError(expected="a conversation that ends with an answer", got=last, do="append the answer")
        chunks: list[EncodedTextChunk | ImageChunk] = []
        mask: list[bool] = []
        for is_answer, run in groupby(pieces[:-1], lambda piece: isinstance(piece, _Answer)):
            texts = [piece.text if isinstance(piece, _Answer) else piece for piece in run]
            for chunk in self._chunks(texts, self._encode_chunk):
                mask += [is_answer] * chunk.length
                last_chunk = chunks[-1] if chunks else None
                if isinstance(chunk, EncodedTextChunk) and isinstance(last_chunk, EncodedTextChunk):
                    chunks[-1] = EncodedTextChunk(tokens=last_chunk.tokens + chunk.tokens)
                else:
                    chunks.append(chunk)
        return ModelInput(chunks=tuple(chunks)), tuple(mask)

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> ParsedAnswer:
        """Split an answer, with or without its end of turn, into its parts; never raises.

        The schemas of `tools` give types to arguments where the chat format has none.
        """
        whole = self._format.complete(text.removesuffix(END_OF_TURN).removesuffix(END_OF_TEXT))
        return parse_answer(whole, tools, call_form=self._format.call_form)

    def restrict(self, params: SamplingParams, form: AnswerForm) -> SamplingParams:
        """The parameters of an answer of this form. Ending after the first call takes no grammar."""
        thinks, uses_tags = self._format.answer_header.endswith("<think>\n"), self._format.call_form == CALL_FORM
        grammar = write_grammar(form, thinks=thinks, uses_tags=uses_tags)
        stops = (*params.stops, "</tool_call>") if form.one_call and not grammar else params.stops
        return replace(params, stops=stops, grammar=grammar)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; texts such as the end of turn become their special tokens."""
        # unlike `encode`, it lets other threads run meanwhile, and computes no offsets
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def _refuse_too_long(self, text: str, max_tokens: int) -> None:
        """Raise `ContextOverflow` if the beginning of a text has twice the tokens that all of it may have.

        Encoding takes 200 bytes of memory per character, so a text is only encoded to its end if its beginning shows
        that it may fit. The factor of two leaves room for tokens that the cut divides.
        """
        num_characters = _CHARACTERS_PER_TOKEN * max_tokens
        while num_characters < len(text):
            if len(self.encode(text[:num_characters])) > 2 * max_tokens:
                raise _overflow(max_tokens)
            num_characters *= 4

    def _encode_chunk(self, text: str) -> EncodedTextChunk:
        return EncodedTextChunk(tokens=tuple(self.encode(text)))

    def _chunks(
        self, pieces: Sequence[str | EncodedImage], encode: Callable[[str], EncodedTextChunk]
    ) -> Iterator[EncodedTextChunk | ImageChunk]:
        for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
            if is_text:
                yield encode("".join(piece for piece in run if isinstance(piece, str)))
                continue
            for image in run:
                assert isinstance(image, EncodedImage)
                if self.image_settings is None:
                    raise ConfigError(
                        f"expected text only for the renderer {self.name!r}, got an image; use a vision model such as "
                        "Qwen3-VL"
                    )
                num_tokens = num_image_tokens(image.width_px, image.height_px, self.image_settings)
                yield ImageChunk(image=image, expected_tokens=num_tokens)


def _overflow(max_tokens: int) -> ContextOverflow:
    return ContextOverflow(f"expected at most {max_tokens} tokens, got a longer prompt; shorten the history")


def load_qwen3_vl(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen3-VL model folder."""
    return _load("qwen3_vl", model_path, INSTRUCT)


def load_qwen3_vl_thinking(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen3-VL Thinking model folder."""
    return _load("qwen3_vl_thinking", model_path, THINKING)


def load_qwen2_5_vl(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen2.5-VL model folder."""
    return _load("qwen2_5_vl", model_path, QWEN2_5)


def load_qwen3_5(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a Qwen3.5 or Qwen3.6 model folder."""
    return _load("qwen3_5", model_path, qwen3_5_format(model_path))


def load_qwen3(model_path: Path) -> Qwen3VLRenderer:
    """The renderer of a text-only Qwen3 model folder."""
    return Qwen3VLRenderer(name="qwen3", tokenizer=_load_tokenizer(model_path), image_settings=None)


def _load(name: str, model_path: Path, chat_format: ChatFormat) -> Qwen3VLRenderer:
    tokenizer, image_settings = _load_tokenizer(model_path), load_image_settings(model_path)
    return Qwen3VLRenderer(name=name, tokenizer=tokenizer, image_settings=image_settings, chat_format=chat_format)


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
        raise ConfigError(f"expected {token!r} in the tokenizer, got a vocabulary without it; use a Qwen tokenizer")
    return token_id


def _pieces(items: Sequence[Item], tools: Sequence[Tool], chat_format: ChatFormat) -> Iterator[_Piece]:
    system, conversation = _take_system(replay(items, chat_format.write_answer))
    if system is not None or tools:
        yield f"<|im_start|>system\n{_system_text(system, tools, chat_format)}{END_OF_TURN}\n"
    elif chat_format.default_system and conversation:
        yield f"<|im_start|>system\n{chat_format.default_system}{END_OF_TURN}\n"
    messages = list(_with_results_as_messages(conversation, strips=chat_format.strips_messages))
    answers = chat_format.write_answers(messages)
    for index, item in enumerate(messages):
        match item:
            case Message():
                yield from ("<|im_start|>user\n", *_content(item.content, chat_format), f"{END_OF_TURN}\n")
            case SampledAnswer():
                answer = answers[index]
                yield from (answer.header, _Answer(f"{answer.text}{END_OF_TURN}"), "\n")


def _with_results_as_messages(
    items: Sequence[ReplayedItem], *, strips: bool = False
) -> Iterator[Message | SampledAnswer]:
    """The conversation with tool results as user messages, consecutive ones in one, as Qwen3-VL's template has them."""
    parts: list[Part] = []
    for item in (*items, None):
        if isinstance(item, ToolResult):
            texts = [part.text for part in item.content if isinstance(part, TextPart)]
            # vLLM joins a result of only text parts with line breaks, but not one with an image
            content = [TextPart(text="\n".join(texts))] if len(texts) == len(item.content) else item.content
            content = _strip(content) if strips else content
            opening = "\n<tool_response>\n" if parts else "<tool_response>\n"
            parts += [TextPart(text=opening), *content, TextPart(text="\n</tool_response>")]
            continue
        if parts:
            yield Message(role="user", content=tuple(parts))
            parts = []
        if item is not None:
            yield item


def _take_system(items: Sequence[ReplayedItem]) -> tuple[Message | None, Sequence[ReplayedItem]]:
    """The system message, which comes first, and the rest."""
    first = items[0] if items else None
    return (first, items[1:]) if isinstance(first, Message) and first.role == "system" else (None, items)


def _system_text(system: Message | None, tools: Sequence[Tool], chat_format: ChatFormat) -> str:
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools
    ]
    definitions = [json.dumps({"type": "function", "function": one}, ensure_ascii=False) for one in functions]
    return chat_format.write_system("".join(text_of(system)) if system else None, definitions)


def _strip(parts: Sequence[Part]) -> Sequence[Part]:
    """The parts without the white space at both ends of their joined text."""
    first = next((place for place, part in enumerate(parts) if _is_seen(part)), len(parts))
    last = next((place for place in reversed(range(len(parts))) if _is_seen(parts[place])), -1)
    kept = list(parts[first : last + 1])
    if kept and isinstance(kept[0], TextPart):
        kept[0] = TextPart(text=kept[0].text.lstrip())
    if kept and isinstance(kept[-1], TextPart):
        kept[-1] = TextPart(text=kept[-1].text.rstrip())
    return kept


def _is_seen(part: Part) -> bool:
    return isinstance(part, EncodedImage) or bool(part.text.strip())


def _content(parts: Sequence[Part], chat_format: ChatFormat) -> Iterator[str | EncodedImage]:
    for part in _strip(parts) if chat_format.strips_messages else parts:
        match part:
            case TextPart():
                yield part.text
            case EncodedImage():
                yield from (f"{chat_format.before_image}<|vision_start|>", part, "<|vision_end|>")

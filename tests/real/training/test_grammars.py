"""Which tokens grammars allow, against languages so small that they can be listed, and against answers as written."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xgrammar
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2VLImageProcessor
from vllm.config.structured_outputs import StructuredOutputsConfig
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from cua_rl.renderers.answer_form import AnswerForm, write_grammar
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen2_5_vl, load_qwen3_5, load_qwen3_vl
from cua_rl.renderers.qwen3_vl import load_qwen3_vl_thinking as load_thinking
from cua_rl.training.config import TrainerConfig
from cua_rl.training.grammars import Grammars
from cua_rl.training.head import token_scores
from cua_rl.training.trainer import Trainer
from cua_rl.types.conversation import Message, TextPart, Tool, ToolCall
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Chunk, Datum, EncodedTextChunk, ModelInput, SamplingParams
from tests.builders import stored_image
from tests.real.sampling.tiny_model import build_tiny_model
from tests.real.training.test_exactness import load_stock
from tests.real.training.trainer_calls import forward
from tests.renderers.generated import encode_image, make_image
from tests.renderers.model_folders import build_qwen2_5_folder, build_qwen3_5_folder, build_small_folder
from tests.rounding import assert_equal_but_for_rounding

TOOLS = (
    Tool(
        name="click",
        description="",
        parameters={
            "type": "object",
            "properties": {"x": {"type": "integer"}, "at": {"type": "array"}, "why": {"type": "string"}},
            "required": ["x"],
        },
    ),
    Tool(name="click_on", description="", parameters={"properties": {"name": {"enum": ["a", "b"]}}}),
)
CALLS = (
    ToolCall(call_id="call_0", name="click", arguments='{"x": 5, "at": [1, "2"], "why": "to see"}'),
    ToolCall(call_id="call_1", name="click_on", arguments='{"name": "b"}'),
)
PLAIN = SamplingParams(max_tokens=9, temperature=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_folder(tmp_path_factory.mktemp("grammars") / "small")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def held_datum(prompt: list[int], turns: list[tuple[list[int], str]]) -> Datum:
    """Each turn a prompt, and an answer that was held to a grammar, if to any."""
    tokens, mask, grammars = list[int](), list[bool](), list[tuple[int, str]]()
    for answer, grammar in turns:
        start = len(tokens) + len(prompt)
        grammars += [(start, grammar)] if grammar else []
        tokens += [*prompt, *answer]
        mask += [*[False] * len(prompt), *[True] * len(answer)]
    zeros = (0.0,) * len(tokens)
    return Datum(
        rollout_id="r",
        model_input=ModelInput(chunks=(EncodedTextChunk(tokens=tuple(tokens)),)),
        loss_mask=tuple(mask),
        advantages=zeros,
        sampling_logprobs=zeros,
        policy_versions=(0,) * len(turns),
        grammars=tuple(grammars),
    )


def bits(mask: torch.Tensor, size: int) -> set[int]:
    return {token for token in range(size) if mask[token // 32].item() >> token % 32 & 1}


def test_the_allowed_tokens_are_those_that_a_listed_language_can_go_on_with(folder: Path, tokenizer: Tokenizer) -> None:
    """A language of three texts: a token is allowed if what it adds is still the beginning of one of them."""
    words = ['"set"', '"settings"', '"open"']
    grammar = write_grammar(
        AnswerForm(tools=(), schema={"enum": ["set", "settings", "open"]}), thinks=False, uses_tags=False
    )
    size = tokenizer.get_vocab_size() + 32  # padded, as real ones are
    pieces = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(size - 32)}
    end_of_turn, end_of_text = (tokenizer.token_to_id(one) for one in ("<|im_end|>", "<|endoftext|>"))
    free, held = tokenizer.encode("free").ids, [*tokenizer.encode('"settings"').ids, end_of_turn]
    datums = [held_datum([1, 2], [(free, ""), (held, grammar), (free, "")]), held_datum([3], [(held[:2], grammar)])]

    allowed = Grammars(folder, size).allowed_tokens(datums)

    assert allowed is not None
    found = [bits(allowed.masks[row], size) for row in allowed.rows]
    everything = set(range(size))
    expected = list[set[int]]()
    for at in range(len(held)):
        said = tokenizer.decode(held[:at], skip_special_tokens=False)
        going_on = {token for token, text in pieces.items() if text and any(w.startswith(said + text) for w in words)}
        expected.append(going_on | ({end_of_turn, end_of_text} if said in words else set()))
    all_free = [everything | set(range(size, -(-size // 32) * 32))] * len(free)
    assert found[: len(free)] == [free_mask & everything for free_mask in all_free]
    assert found[len(free) : len(free) + len(held)] == expected
    assert found[len(free) + len(held) : -2] == [everything] * len(free)
    assert found[-2:] == expected[:2]
    assert Grammars(folder, size).allowed_tokens([held_datum([1], [(free, "")])]) is None


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_vllms_back_end_and_sampler_draw_has_the_log_probabilities_of_our_head(
    folder: Path, temperature: float
) -> None:
    """Random logits through vLLM's own masks: tokens and log-probabilities as the server records them."""
    hf: Any = AutoTokenizer.from_pretrained(folder)
    size, ends = len(hf) + 32, hf.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    settings: Any = SimpleNamespace(
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3_vl")),
        speculative_config=None,
    )
    backend = XgrammarBackend(settings, hf, size)
    torch.manual_seed(3)
    weight = torch.randn(size, 8)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", "b"]}}, "required": ["x"]}
    forms = [
        AnswerForm(tools=(), schema=schema),
        AnswerForm(tools=TOOLS, must_call=TOOLS),
        AnswerForm(tools=TOOLS, schema=schema),
    ]
    turns, states, drawn = list[tuple[list[int], str]](), list[torch.Tensor](), list[float]()
    for form, thinks in [(form, thinks) for form in forms for thinks in (False, True)]:
        spec = write_grammar(form, thinks=thinks, uses_tags=thinks)
        grammar = backend.compile_grammar(StructuredOutputOptions.STRUCTURAL_TAG, spec, set(ends))
        tokens = list[int]()
        while len(tokens) < 80 and not grammar.is_terminated():
            states.append(torch.randn(1, 8))
            logits, mask = states[-1] @ weight.T, backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(mask, 0)
            xgrammar.apply_token_bitmask_inplace(logits, mask)  # as `apply_grammar_bitmask` does
            logprobs = Sampler.compute_logprobs(logits / temperature)
            tokens.append(int(torch.multinomial(logprobs.exp(), 1)))
            drawn.append(logprobs[0, tokens[-1]].item())
            assert grammar.accept_tokens("r", tokens[-1:])
        turns.append((tokens, spec))
    datum = held_datum([1, 2], turns)

    allowed = Grammars(folder, size).allowed_tokens([datum])

    targets = torch.tensor([token for tokens, _ in turns for token in tokens])
    scores = token_scores(torch.cat(states), weight, targets, temperature, allowed)
    assert_equal_but_for_rounding(scores.logprobs, drawn, 8 + size)
    free = token_scores(torch.cat(states), weight, targets, temperature).logprobs
    assert (free - torch.tensor(drawn)).abs().mean() > 0.5  # without the masks


def test_masks_reach_the_tokens_of_their_turns_in_packed_rows_with_images(tmp_path: Path) -> None:
    """Against Transformers' own logits: at each token of the turn that was held, the softmax over what was allowed."""
    model_path = build_tiny_model(tmp_path / "tiny")
    renderer = load_qwen3_vl(model_path)
    config = TrainerConfig(model_path=model_path, lora_rank=4, lora_alpha=8, max_restarts=0, micro_batch_tokens=250)
    trainer, stock = Trainer(config), load_stock(model_path)
    size, image_token_id = trainer.model.vocabulary_size, renderer.image_token_id
    grammar = write_grammar(AnswerForm(tools=(), schema={"enum": ["set", "settings"]}), thinks=False, uses_tags=False)
    held, free = renderer.encode('"settings"<|im_end|>'), renderer.encode("so<|im_end|>")
    datums = list[Datum]()
    for seed, answers in enumerate(([(held, grammar), (free, "")], [(free, "")], [(free, ""), (held, grammar)])):
        chunks, mask, grammars = list[Chunk](), list[bool](), list[tuple[int, str]]()
        for answer, spec in answers:
            picture = stored_image(encode_image(make_image(64, 96, seed)))
            question = Message(role="user", content=(picture, TextPart(text=f"Step {seed}.")))
            prompt = renderer.render((question,))
            grammars += [(len(mask) + prompt.length, spec)] if spec else []
            chunks += [*prompt.chunks, EncodedTextChunk(tokens=tuple(answer))]
            mask += [*[False] * prompt.length, *[True] * len(answer)]
        zeros = (0.0,) * len(mask)
        datums.append(
            Datum(
                rollout_id=f"r{seed}",
                model_input=ModelInput(chunks=tuple(chunks)),
                loss_mask=tuple(mask),
                advantages=zeros,
                sampling_logprobs=zeros,
                policy_versions=(0,) * len(answers),
                grammars=tuple(grammars),
            )
        )

    rows = forward(trainer, datums, 0.7)

    for datum, row in zip(datums, rows, strict=True):
        logits = stock_logits(stock, model_path, datum, image_token_id) / 0.7
        allowed = Grammars(model_path, size).allowed_tokens([datum])
        if allowed is not None:
            places = torch.tensor(datum.loss_mask).nonzero()[:, 0]
            for place, mask_row in zip(places.tolist(), allowed.rows.tolist(), strict=True):
                forbidden = set(range(size)) - bits(allowed.masks[mask_row], size)
                logits[place - 1, list(forbidden)] = -torch.inf
        ids = torch.tensor(datum.model_input.token_ids(image_token_id))
        expected = logits[:-1].log_softmax(1).gather(1, ids[1:, None])[:, 0]
        expected = torch.cat([torch.zeros(1), expected]).where(torch.tensor(datum.loss_mask), torch.zeros(()))
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
        plain = forward(trainer, [replace(datum, grammars=())], 0.7)[0]
        assert ((plain - row).abs().max() > 0.5) == bool(datum.grammars)


def stock_logits(model: Any, model_path: Path, datum: Datum, image_token_id: int) -> torch.Tensor:
    """[seq, vocabulary] as a user of Transformers would compute them."""
    ids = torch.tensor([datum.model_input.token_ids(image_token_id)])
    images = [Image.open(BytesIO(one.data)).convert("RGB") for one in datum.model_input.images]
    inputs = dict(Qwen2VLImageProcessor.from_pretrained(model_path)(images=images, return_tensors="pt"))
    types = (ids == image_token_id).int()
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **inputs)
    return whole.logits[0]


def test_a_token_that_its_grammar_forbids_is_an_error_with_its_place(folder: Path, tokenizer: Tokenizer) -> None:
    grammar = write_grammar(AnswerForm(tools=(), schema={"enum": ["set"]}), thinks=False, uses_tags=False)
    answer = tokenizer.encode('"open"').ids
    with pytest.raises(TrainingError, match=r"got \d+ at position [2-9] of 'r'; install the model server's xgrammar"):
        Grammars(folder, 700).allowed_tokens([held_datum([1], [(answer, grammar)])])
    with pytest.raises(TrainingError, match="the grammar of an answer"):
        Grammars(folder, 700).allowed_tokens([held_datum([1], [(answer, "no grammar")])])


@pytest.fixture(scope="module", params=["qwen3_vl", "thinking", "qwen2_5_vl", "qwen3_5"])
def renderer(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    place = tmp_path_factory.mktemp("formats") / "model"
    match request.param:
        case "thinking":
            return load_thinking(folder)
        case "qwen2_5_vl":
            return load_qwen2_5_vl(build_qwen2_5_folder(folder, place))
        case "qwen3_5":
            return load_qwen3_5(build_qwen3_5_folder(folder, place))
        case _:
            return load_qwen3_vl(folder)


def takes(folder: Path, grammar: str, text: str) -> bool:
    """Whether a whole answer keeps to a grammar."""
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(folder))
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(vocabulary).compile_structural_tag(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


def test_forced_answers_are_those_that_the_renderer_writes_and_reads(folder: Path, renderer: Qwen3VLRenderer) -> None:
    question = Message(role="user", content=(TextPart(text="hi"),))
    several = renderer.restrict(PLAIN, AnswerForm(tools=TOOLS, must_call=TOOLS)).grammar
    one = renderer.restrict(PLAIN, AnswerForm(tools=TOOLS, must_call=TOOLS, one_call=True)).grammar

    def written(*calls: ToolCall) -> str:
        """The answer as it stands behind its prompt."""
        whole, mask = renderer.render_supervised((question, *calls), TOOLS)
        tokens = [token for token, is_answer in zip(whole.token_ids(-1), mask, strict=True) if is_answer]
        return renderer.decode(tokens[:-1])

    assert takes(folder, several, written(*CALLS))
    assert renderer.parse(written(*CALLS), TOOLS).tool_calls == CALLS
    assert takes(folder, one, written(CALLS[1]))
    for grammar, text in ((one, written(*CALLS)), (several, "I am done."), (several, written(CALLS[0])[:-3])):
        assert not takes(folder, grammar, text)
    wrong = ToolCall(call_id="call_0", name="click", arguments='{"x": "far"}')
    assert not takes(folder, several, written(wrong))
    begins_thinking = renderer.parse("x").failure is not None  # inside the block that the prompt opened
    assert takes(folder, several, f"Let me see. {written(CALLS[0])}") == begins_thinking


@pytest.mark.parametrize(
    ("form", "head", "tail", "most"),
    [
        (
            AnswerForm(tools=TOOLS, must_call=TOOLS),
            '<tool_call>\n{"name": "click", "arguments": {',
            '"x": 5}}\n</tool_call>',
            2,
        ),
        (AnswerForm(tools=(), schema={"properties": {"x": {"type": "integer"}}}), "{", '"x": 5}', 64),
    ],
)
def test_a_model_cannot_go_on_with_blanks_for_ever(
    folder: Path, form: AnswerForm, head: str, tail: str, most: int
) -> None:
    grammar = write_grammar(form, thinks=False, uses_tags=False)
    assert takes(folder, grammar, f"{head}{' ' * most}{tail}")
    assert not takes(folder, grammar, f"{head}{' ' * (most + 1)}{tail}")


def test_a_call_written_by_the_grammar_of_an_unknown_object_can_be_read(
    folder: Path, renderer: Qwen3VLRenderer
) -> None:
    tool = Tool(name='say "hi"', description="", parameters={})
    grammar = renderer.restrict(PLAIN, AnswerForm(tools=(tool,), must_call=(tool,))).grammar
    (tag,) = json.loads(grammar)["format"].get("tags") or json.loads(grammar)["format"]["elements"][-1]["tags"]
    assert tag["content"]["json_schema"] == {"type": "object"}
    inside = "<parameter=a>\nb\n</parameter>" if "style" in tag["content"] else '{"a": "b"}'
    text = f"{tag['begin']}{inside}{tag['end']}"
    text = f"hm\n</think>\n\n{text}" if renderer.parse("x").failure is not None else text
    assert takes(folder, grammar, text)
    (call,) = renderer.parse(text, (tool,)).tool_calls
    assert (call.name, json.loads(call.arguments)) == ('say "hi"', {"a": "b"})


# keyword, a schema with it, a value that violates it, a value that does not
KEYWORDS: list[tuple[str, Any, Any, Any]] = [
    ("multipleOf", {"type": "number", "multipleOf": 0.5}, 0.7, 1.5),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [1, 1], [1, 2]),
    ("contains", {"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}}, [1], [3]),
    ("not", {"type": "string", "not": {"const": "a"}}, "a", "b"),
    ("if", {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}}, 7, 8),
    ("allOf", {"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "b", "a"),
    ("$ref", {"$ref": "http://a/b"}, "a", 5),
    ("minLength", {"type": "string", "pattern": "^a*$", "minLength": 3}, "a", "aaa"),
    (
        "dependentRequired",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "dependentRequired": {"a": ["b"]},
        },
        {"a": 1},
        {"a": 1, "b": 2},
    ),
]
ENFORCED: list[tuple[Any, Any, Any]] = [
    ({"enum": ["a", 3]}, "b", 3),
    ({"type": "integer", "multipleOf": 5}, 7, 10),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "a", 5),
    ({"const": "a"}, "b", "a"),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 9}, 9, 8),
    ({"type": "string", "minLength": 2, "maxLength": 3}, "aaaa", "aaa"),
    ({"type": "string", "pattern": "^[ab]+$"}, "c", "ab"),
    ({"type": "string", "format": "date"}, "tomorrow", "2026-11-26"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [1], [1, 2]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {}, {"a": 1}),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, {"b": 1}, {"a": 1}),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "a", None),
    ({"type": "array", "minItems": 1}, [], ["a", {"b": 1}]),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "a", 5),
    ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "integer"}}}, "a", 5),
]


def test_keywords_that_are_named_as_without_effect_have_none_and_others_have_one(folder: Path) -> None:
    for keyword, schema, wrong, right in KEYWORDS:
        form = AnswerForm(tools=(), schema=schema)
        grammar = write_grammar(form, thinks=False, uses_tags=False)
        assert keyword in form.not_enforced
        assert takes(folder, grammar, json.dumps(wrong)), keyword
        assert takes(folder, grammar, json.dumps(right)), keyword
    for schema, wrong, right in ENFORCED:
        form = AnswerForm(tools=(), schema=schema)
        grammar = write_grammar(form, thinks=False, uses_tags=False)
        assert form.not_enforced == ()
        assert not takes(folder, grammar, json.dumps(wrong)), schema
        assert takes(folder, grammar, json.dumps(right)), schema

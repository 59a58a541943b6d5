"""The prompt as vLLM computes it: its own conversion of a Responses request, with our template."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cua_rl.renderers.openai_items import conversation_from_responses, responses_input, responses_tools
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen2_5_vl, load_qwen3_5, load_qwen3_vl_thinking
from cua_rl.types.conversation import Item, Message, Reasoning, SampledAnswer, TextPart, Tool, ToolCall
from tests.renderers.generated import generate_conversation
from tests.renderers.model_folders import THINKING_TEMPLATE, build_qwen2_5_folder, build_qwen3_5_folder

transformers = pytest.importorskip("transformers")
pytest.importorskip("vllm")


class VllmPrompts:
    """vLLM's way from a Responses request to prompt ids, without an engine."""

    def __init__(self, folder: Path, family: str = "Qwen3VL", processor: str | None = None) -> None:
        from vllm.config import ModelConfig

        config_class = getattr(transformers, f"{family}Config")
        config_class(architectures=[f"{family}ForConditionalGeneration"]).save_pretrained(folder)
        self.model_config = ModelConfig(model=str(folder), dtype="float32", max_model_len=4096)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.processor = getattr(transformers, f"{processor or family}Processor").from_pretrained(folder)
        self.processor.chat_template = None

    def ids(self, body: dict[str, object]) -> list[int]:
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

        request = ResponsesRequest.model_validate({"model": "m", **body})
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        content_format = resolve_chat_template_content_format(
            None, tools, "auto", self.tokenizer, model_config=self.model_config
        )
        assert content_format == "openai"
        conversation, data, _ = parse_chat_messages(messages, self.model_config, content_format)
        text = safe_apply_chat_template(
            self.model_config, self.tokenizer, conversation, tools=tools, tokenize=False, add_generation_prompt=True
        )
        images = [getattr(image, "media", image) for image in (data or {}).get("image", [])]
        return list(self.processor(text=[text], images=images or None)["input_ids"][0])


@pytest.fixture(scope="module")
def vllm_prompts(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> VllmPrompts:
    folder = tmp_path_factory.mktemp("vllm_qwen3_vl")
    for file in small_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return VllmPrompts(folder)


@pytest.fixture(scope="module")
def thinking_folder(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm_qwen3_vl_thinking")
    for file in small_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_bytes(THINKING_TEMPLATE.read_bytes())
    return folder


def body_of(items: Sequence[Item], tools: Sequence[Tool]) -> dict[str, object]:
    return {"input": responses_input(items), "tools": responses_tools(tools)}


def test_replayed_conversations_are_the_prompt_that_vllm_computes(
    vllm_prompts: VllmPrompts, small_renderer: Qwen3VLRenderer
) -> None:
    for seed in range(100):
        made = generate_conversation(seed)
        expected = vllm_prompts.ids(body_of(*small_renderer.to_send(made.items, made.tools)))
        rendered = small_renderer.render(made.items, made.tools)
        assert rendered.token_ids(small_renderer.image_token_id) == expected, f"seed {seed}"


def test_conversations_with_a_thinking_model_are_the_prompt_that_vllm_computes_tools_included(
    thinking_folder: Path,
) -> None:
    prompts, renderer = VllmPrompts(thinking_folder), load_qwen3_vl_thinking(thinking_folder)
    for seed in range(100):
        made = generate_conversation(seed)
        expected = prompts.ids(body_of(*renderer.to_send(made.items, made.tools)))
        rendered = renderer.render(made.items, made.tools)
        assert rendered.token_ids(renderer.image_token_id) == expected, f"seed {seed}"


def test_conversations_with_qwen2_5_vl_are_the_prompt_that_vllm_computes_tools_and_results_included(
    small_folder: Path, tmp_path: Path
) -> None:
    folder = build_qwen2_5_folder(small_folder, tmp_path / "qwen2_5_vl")
    prompts, renderer = VllmPrompts(folder, "Qwen2_5_VL"), load_qwen2_5_vl(folder)
    for seed in range(100):
        made = generate_conversation(seed)
        expected = prompts.ids(body_of(*renderer.to_send(made.items, made.tools)))
        rendered = renderer.render(made.items, made.tools)
        assert rendered.token_ids(renderer.image_token_id) == expected, f"seed {seed}"


def test_conversations_with_qwen3_5_are_the_prompt_that_vllm_computes_tools_included(
    small_folder: Path, tmp_path: Path
) -> None:
    folder = build_qwen3_5_folder(small_folder, tmp_path / "qwen3_5")
    prompts, renderer = VllmPrompts(folder, "Qwen3_5", "Qwen3VL"), load_qwen3_5(folder)
    for seed in range(100):
        made = generate_conversation(seed)
        expected = prompts.ids(body_of(*renderer.to_send(made.items, made.tools)))
        rendered = renderer.render(made.items, made.tools)
        assert rendered.token_ids(renderer.image_token_id) == expected, f"seed {seed}"


def test_conversations_as_an_agent_sends_them_agree_too_where_there_is_no_thinking(
    vllm_prompts: VllmPrompts, small_renderer: Qwen3VLRenderer
) -> None:
    compared = 0
    for seed in range(100, 200):
        made = generate_conversation(seed, with_thinking=False)
        if _has_adjacent_answers(made.items):
            continue
        expected = vllm_prompts.ids(body_of(made.items, made.tools))
        rendered = small_renderer.render(made.items, made.tools)
        assert rendered.token_ids(small_renderer.image_token_id) == expected, f"seed {seed}"
        compared += 1
    assert compared > 30


def test_several_instructions_and_foreign_answers_agree_after_replay(
    vllm_prompts: VllmPrompts, small_renderer: Qwen3VLRenderer
) -> None:
    def message(role: str, text: str) -> Message:
        return Message(role=role, content=(TextPart(text=text),))

    items = [
        message("developer", "Be brief."),
        message("system", "You operate a phone."),
        message("user", "<|vision_start|><|image_pad|><|vision_end|> and <|im_end|> are only text"),
        Reasoning(text="first"),
        Reasoning(text="second"),
        ToolCall(call_id="a", name="click", arguments="no json"),
        message("assistant", "said after the call"),
        message("assistant", "and once more"),
        Reasoning(text="a thought behind text"),
        SampledAnswer(text=""),
        message("system", "late instruction"),
        message("user", "go on"),
    ]
    rendered = small_renderer.render(items)
    ids = rendered.token_ids(small_renderer.image_token_id)
    assert ids == vllm_prompts.ids(body_of(*small_renderer.to_send(items)))
    assert small_renderer.decode(ids).startswith(
        "<|im_start|>system\nBe brief.\n\nYou operate a phone.<|im_end|>\n<|im_start|>user\n"
        "<vision_start><image_pad><vision_end> and <|im_end|> are only text<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "first\nsecond\n</think>\n\nsaid after the call\n<tool_call>\n"
        '{"name": "click", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>assistant\nand once more<|im_end|>\n'
    )
    late = "<|im_end|>\n<|im_start|>user\nlate instruction<|im_end|>\n<|im_start|>user\ngo on"
    assert late in small_renderer.decode(ids)


def test_a_request_survives_the_way_through_items_and_back(
    vllm_prompts: VllmPrompts, small_renderer: Qwen3VLRenderer
) -> None:
    made = generate_conversation(11)
    body = body_of(*small_renderer.to_send(made.items, made.tools))
    conversation = conversation_from_responses({"instructions": None, **body})
    rendered = small_renderer.render(conversation.items, conversation.tools)
    assert rendered.token_ids(small_renderer.image_token_id) == vllm_prompts.ids(body)


def _has_adjacent_answers(items: list[Item]) -> bool:
    kinds = [isinstance(item, SampledAnswer | ToolCall) or getattr(item, "role", "") == "assistant" for item in items]
    sampled = [isinstance(item, SampledAnswer) for item in items]
    return any(a and b and (c or d) for a, b, c, d in zip(kinds, kinds[1:], sampled, sampled[1:], strict=False))

"""Token for token against Transformers' processor and chat templates."""

import json
from pathlib import Path

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3
from cua_rl.renderers.renderer import make_renderer
from cua_rl.renderers.replay import replay
from cua_rl.types.conversation import Message, SampledAnswer
from tests.renderers.generated import Generated, generate_conversation

transformers = pytest.importorskip("transformers")


def processor_ids(processor: object, made: Generated) -> list[int]:
    text = processor.apply_chat_template(
        made.messages, tools=made.template_tools, tokenize=False, add_generation_prompt=True
    )
    images = [image.convert("RGB") for image in made.images]
    return processor(text=[text], images=images or None)["input_ids"][0]


def assert_same_ids(renderer: Qwen3VLRenderer, processor: object, seed: int) -> int:
    made = generate_conversation(seed)
    rendered = renderer.render(made.items, made.tools)
    assert rendered.token_ids(renderer.image_token_id) == list(processor_ids(processor, made)), f"seed {seed}"
    assert len(rendered.images) == len(made.images)
    return len(made.images)


def test_small_vocabulary_agrees_with_the_processor_on_200_conversations(
    small_folder: Path, small_renderer: Qwen3VLRenderer
) -> None:
    processor = transformers.Qwen3VLProcessor.from_pretrained(small_folder)
    num_images = sum(assert_same_ids(small_renderer, processor, seed) for seed in range(200))
    assert num_images > 400


def test_qwen_vocabulary_agrees_with_the_processor_on_60_conversations(
    qwen_folder: Path, qwen_renderer: Qwen3VLRenderer
) -> None:
    processor = transformers.Qwen3VLProcessor.from_pretrained(qwen_folder)
    num_images = sum(assert_same_ids(qwen_renderer, processor, seed) for seed in range(1000, 1060))
    assert num_images > 100
    assert qwen_renderer.image_token_id == 151655
    assert qwen_renderer.stop_token_ids == (151645, 151643)


def test_text_agrees_with_the_template_that_ships_with_qwen3(qwen_package: Path, qwen_folder: Path) -> None:
    """Without thinking (which Qwen3's text template edits) and without images, the two formats are one."""
    template = json.loads((qwen_package / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen_folder)
    renderer = load_qwen3(qwen_folder)
    compared = 0
    for seed in range(2000, 3500):
        made = generate_conversation(seed, with_images=False, with_thinking=False)
        if made.messages[-1]["role"] == "assistant" or any("</think>" in str(m["content"]) for m in made.messages):
            continue
        messages = [_flat(message) for message in made.messages]
        text = tokenizer.apply_chat_template(
            messages, tools=made.template_tools, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert renderer.render(made.items, made.tools).token_ids(renderer.image_token_id) == ids, f"seed {seed}"
        compared += 1
    assert compared > 50


def test_supervised_tokens_are_the_processor_s_and_the_mask_covers_every_answer(
    small_folder: Path, small_renderer: Qwen3VLRenderer
) -> None:
    processor = transformers.Qwen3VLProcessor.from_pretrained(small_folder)
    compared = 0
    for seed in range(3000, 3080):
        made = generate_conversation(seed, ends_with_answer=True)
        answers = [item.text for item in replay(made.items) if isinstance(item, SampledAnswer)]
        if any(answer[:1].isspace() for answer in answers):
            continue  # there, encoding the answer on its own differs from encoding the whole
        text = processor.apply_chat_template(made.messages, tools=made.template_tools, tokenize=False)
        whole = processor(text=[text], images=made.images or None)["input_ids"][0]
        rendered, mask = small_renderer.render_supervised(made.items, made.tools)
        ids = rendered.token_ids(small_renderer.image_token_id)
        assert [*ids, *small_renderer.encode("\n")] == list(whole), f"seed {seed}"
        trained = small_renderer.decode([token for token, is_answer in zip(ids, mask, strict=True) if is_answer])
        assert trained == small_renderer.decode(small_renderer.encode("".join(f"{a}<|im_end|>" for a in answers)))
        compared += 1
    assert compared > 30


def test_the_template_passes_through_the_renderer_made_from_the_folder(small_folder: Path) -> None:
    processor = transformers.Qwen3VLProcessor.from_pretrained(small_folder)
    made = generate_conversation(7)
    renderer = make_renderer(small_folder)
    assert renderer.render(made.items, made.tools).token_ids(renderer.image_token_id) == processor_ids(processor, made)
    assert any(isinstance(item, Message) for item in made.items)


def _flat(message: dict[str, object]) -> dict[str, object]:
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}

import json
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from cua_rl.environments.phone.demo.templates import EMBEDDED_TRAINING
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.supervised.demonstrations import build_supervised_datum
from scripts.tiny_models.lessons import demonstrate_task
from scripts.tiny_models.vocabulary import CONTROL_TOKENS, build_tokenizer, pieces

BUILT = build_tokenizer(pieces())


def encode(text: str) -> list[int]:
    return BUILT.encode(text, add_special_tokens=False).ids


@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert BUILT.decode(encode(text), skip_special_tokens=False) == text


@given(st.lists(st.sampled_from(pieces()), max_size=8))
def test_any_sequence_of_pieces_survives_encoding_and_decoding(some: list[str]) -> None:
    assert BUILT.decode(encode("".join(some)), skip_special_tokens=False) == "".join(some)


def test_every_piece_and_control_token_is_one_token() -> None:
    assert [text for text in (*pieces(), *CONTROL_TOKENS) if len(encode(text)) != 1] == []


def test_an_experts_click_is_read_as_a_few_tokens() -> None:
    call = (
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 255]}}\n</tool_call>'
    )
    # think, two names, end of thought, call up to the coordinates, x, comma, y, end of call, end of turn
    assert len(encode(f"<think>\nPhone Mail\n</think>\n\n{call}<|im_end|>")) == 10


def test_the_shipped_tokenizer_matches_the_prompts_and_tools_of_today() -> None:
    shipped = Tokenizer.from_file(str(TINY_QWEN3_VL / "tokenizer.json"))
    assert shipped.get_vocab() == BUILT.get_vocab(), "prompts, tools or words changed: make the tiny model anew"


def test_the_shipped_config_names_the_ids_of_the_shipped_tokenizer() -> None:
    config = json.loads((TINY_QWEN3_VL / "config.json").read_text())
    assert config["image_token_id"] == BUILT.token_to_id("<|image_pad|>")
    assert config["video_token_id"] == BUILT.token_to_id("<|video_pad|>")
    assert config["vision_start_token_id"] == BUILT.token_to_id("<|vision_start|>")
    assert config["vision_end_token_id"] == BUILT.token_to_id("<|vision_end|>")
    assert config["text_config"]["vocab_size"] >= BUILT.get_vocab_size()


def test_the_shipped_model_is_small() -> None:
    assert sum(file.stat().st_size for file in Path(TINY_QWEN3_VL).iterdir()) < 12 * 2**20


async def test_prompts_and_answers_of_all_demo_tasks_are_short() -> None:
    renderer = make_renderer(TINY_QWEN3_VL)
    for seed, template in enumerate(EMBEDDED_TRAINING):
        lesson = await demonstrate_task(template, seed, Random(seed), error_rate=0.0, max_turns=1)
        datum = build_supervised_datum(renderer, lesson, name="lesson")
        assert [image.expected_tokens for image in datum.model_input.image_chunks] == [60]
        assert datum.model_input.length - datum.num_trained_tokens <= 120
        assert datum.num_trained_tokens <= 22

"""The commands that make tiny models."""

from pathlib import Path

import pytest

from cua_rl.command_line.recipe import run_recipe
from scripts.tiny_models import make_ladder_model, make_tiny_arithmetic_model, make_tiny_model, make_tiny_page_model
from scripts.tiny_models.vocabulary import arithmetic_pieces, build_tokenizer


def test_a_folder_with_other_things_is_not_replaced_by_a_tiny_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    argument = f"output_path={tmp_path}"

    phones = run_recipe(make_tiny_model.TinyModelConfig, make_tiny_model.main, [argument])
    pages = run_recipe(make_tiny_page_model.TinyPageModelConfig, make_tiny_page_model.main, [argument])
    sums = run_recipe(make_tiny_arithmetic_model.TinyArithmeticModelConfig, make_tiny_arithmetic_model.main, [argument])
    ladder = run_recipe(make_ladder_model.LadderModelConfig, make_ladder_model.main, [argument])

    assert (phones, pages, sums, ladder) == (2, 2, 2, 2)
    assert "output_path: expected a folder that does not exist or is empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()


def test_a_question_of_the_model_that_adds_is_five_tokens_and_an_answer_one() -> None:
    tokenizer = build_tokenizer(arithmetic_pieces())
    # words, number, plus, number, question mark
    assert {len(tokenizer.encode(f"What is {one} + {100 - one}?").ids) for one in range(101)} == {5}
    assert {len(tokenizer.encode(str(number)).ids) for number in range(201)} == {1}

"""Graders in the JSON of OpenAI's reinforcement fine-tuning."""

import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai.types.graders import MultiGrader, PythonGrader, ScoreModelGrader, StringCheckGrader, TextSimilarityGrader
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.host.http_server import serve_app
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.grader import Grader
from cua_rl.judge.grader_file import parse_grader
from cua_rl.judge.judge import Judge
from cua_rl.judge.request import Case
from cua_rl.judge.text_similarity import METRICS
from cua_rl.types.errors import ConfigError, JudgeError
from cua_rl.types.judgement import Judgement
from cua_rl.types.rollout import StopReason

CHECK = {"type": "string_check", "name": "exact", "input": "{{sample.output_text}}", "reference": "{{item.answer}}"}
EQ = CHECK | {"operation": "eq"}
SIMILAR = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{ sample.output_text }}",
    "reference": "{{ item.answer }}",
    "evaluation_metric": "fuzzy_match",
}
PYTHON = {"type": "python", "name": "code", "source": "def grade(sample, item):\n    return len(sample['output_text'])"}
MODEL = {
    "type": "score_model",
    "name": "rubric",
    "model": "o4-mini",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Is {{sample.output_text}} {{item.answer}}?"}]}
    ],
    "sampling_params": {"temperature": 0.5, "max_completions_tokens": 99},
    "range": [0, 10],
    "pass_threshold": 5,
}


def multi(formula: str, **graders: object) -> dict[str, object]:
    return {"type": "multi", "name": "both", "graders": graders, "calculate_output": formula}


def case(said: str | None, **item: object) -> Case:
    return Case(instruction="Say it.", turns=(), answer=said, stop_reason=StopReason.FINISHED, item=item)


async def graded(grader: Mapping[str, object], said: str | None, **item: object) -> Judgement:
    config = JudgeConfig(grader_text=json.dumps(grader))
    return await Grader(config, None).judge(case(said, **item), decides=True)


def test_the_examples_here_are_what_the_publishers_types_take() -> None:
    """The types of the openai package are generated from its specification."""
    StringCheckGrader.model_validate(EQ)
    TextSimilarityGrader.model_validate(SIMILAR)
    PythonGrader.model_validate(PYTHON)
    ScoreModelGrader.model_validate(MODEL)
    MultiGrader.model_validate(multi("exact", graders=EQ) | {"graders": EQ})


@pytest.mark.parametrize(
    ("operation", "answer", "grade"),
    [
        ("eq", "Rome", 1),
        ("eq", "rome", 0),
        ("ne", "rome", 1),
        ("like", "In Rome.", 1),  # the text contains the reference
        ("like", "Ro", 0),
        ("like", "in rome", 0),
        ("ilike", "in rome", 1),
    ],
)
async def test_a_string_check(operation: str, answer: str, grade: float) -> None:
    judgement = await graded(CHECK | {"operation": operation}, answer, answer="Rome")

    assert (judgement.score, judgement.success) == (grade, grade == 1)
    assert judgement.model == "grader exact"
    assert json.loads(judgement.prompt) == CHECK | {"operation": operation}
    assert judgement.cost_usd is None


async def test_no_answer_is_an_empty_text() -> None:
    assert (await graded(CHECK | {"operation": "eq"}, None, answer="")).score == 1


async def test_templates_reach_into_fields_and_into_an_answer_that_is_json() -> None:
    grader = EQ | {"input": "{{sample.output_json.city[1]}}/{{ item.n }}", "reference": "{{item.parts[0].name}}"}

    assert (await graded(grader, '{"city": ["a", "Rome"]}', n=3, parts=[{"name": "Rome/3"}])).score == 1
    assert (await graded(grader, "no JSON", n=3, parts=[{"name": "/3"}])).score == 1


# As rapidfuzz's ratio, rouge-score's F1, and nltk's sentence_bleu and sentence_gleu of split words say
TEXTS = ("the cat sat on the mat today", "The cat is on the mat today")
LONGER = ("one two three four five six", "one two three four five seven eight")


@pytest.mark.parametrize(
    ("metric", "pair", "expected"),
    [
        ("fuzzy_match", TEXTS, 0.9090909090909091),
        ("rouge_1", TEXTS, 0.8571428571428571),
        ("rouge_2", TEXTS, 0.6666666666666666),
        ("rouge_3", TEXTS, 0.4000000000000001),
        ("rouge_4", TEXTS, 0.25),
        ("rouge_5", TEXTS, 0.0),
        ("rouge_l", TEXTS, 0.8571428571428571),
        ("bleu", TEXTS, 0.4347208719449914),
        ("gleu", TEXTS, 0.5),
        ("fuzzy_match", LONGER, 0.8387096774193549),
        ("rouge_1", LONGER, 0.7692307692307692),
        ("rouge_2", LONGER, 0.7272727272727272),
        ("rouge_3", LONGER, 0.6666666666666665),
        ("rouge_4", LONGER, 0.5714285714285715),
        ("rouge_5", LONGER, 0.4),
        ("rouge_l", LONGER, 0.7692307692307692),
        ("bleu", LONGER, 0.6431870218238024),
        ("gleu", LONGER, 0.6363636363636364),
    ],
)
def test_similarities_are_those_of_the_libraries(metric: str, pair: tuple[str, str], expected: float) -> None:
    assert METRICS[metric](*pair) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_a_text_is_like_itself_and_unlike_another(metric: str) -> None:
    text = "one two three four five"
    assert METRICS[metric](text, text) == pytest.approx(1)
    assert METRICS[metric]("", text) == METRICS[metric]("xyzxyz", "ggg") == 0


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("0.5 * exact + 0.5 * close", 0.5 * 0 + 0.5 * 0.75),
        ("max(exact, close) ^ 2", 0.5625),
        ("-close + 2 * (1 + exact) ^ 2", 1.25),  # a power binds closer than a product
        ("sqrt(close) + log(exp(1)) + floor(1.5) + ceil(0.2) + abs(0 - 1) + min(1, 2)", math.sqrt(0.75) + 5),
    ],
)
async def test_a_formula_combines_grades(formula: str, expected: float) -> None:
    judgement = await graded(multi(formula, exact=EQ, close=SIMILAR), "Rose", answer="Rome")

    assert judgement.score == pytest.approx(expected)  # "Rose" and "Rome" have "Roe" in common: 2 * 3 / 8
    assert judgement.reason == "exact=0; close=0.75" or judgement.success is None or judgement.score >= 1


@pytest.mark.parametrize(
    ("formula", "problem"),
    [
        ("1 / exact", "expected a number from calculate_output with {'exact': 0.0}, got float division by zero"),
        ("1e308 * (10 - 9 * exact)", "expected a finite number from calculate_output with {'exact': 0.0}, got inf"),
    ],
)
async def test_a_formula_without_a_value_grades_0_and_is_refused_if_it_never_has_one(
    formula: str, problem: str
) -> None:
    text = json.dumps(multi(formula, exact=EQ))
    worked, broken = (Grader(JudgeConfig(grader_text=text), None) for _ in range(2))

    assert (await worked.judge(case("b", answer="b"), decides=True)).score in (1, 1_000_000)
    for _ in range(9):
        failed = await worked.judge(case("a", answer="b"), decides=True)
        assert (failed.score, failed.success, failed.reason) == (0, False, f"exact=0; {problem}")
    for _ in range(7):
        assert (await broken.judge(case("a", answer="b"), decides=True)).score == 0
    with pytest.raises(ConfigError, match=r"it failed on the first 8: expected a .*; correct its source or formula"):
        await broken.judge(case("a", answer="b"), decides=True)


async def test_an_answer_on_which_python_takes_for_ever_grades_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cua_rl.judge.grader._MAX_CPU_S", 2)
    source = "import re\ndef grade(sample, item):\n    return float(bool(re.match('(a*)*b', sample['output_text'])))"
    judgement = await graded(PYTHON | {"source": source}, "a" * 40)

    assert (judgement.score, judgement.success) == (0, False)
    assert judgement.reason == "TimeoutError: grade used all of its processor time"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"type": "label_model"},
            r"a grader with a type \(string_check, text_similarity, python, score_model, multi\)",
        ),
        ({"operation": "equals"}, "operation: expected one of eq, ne, like, ilike, got 'equals'"),
        ({"inptu": "x"}, "only the keys of string_check .* got 'inptu'; did you mean 'input'"),
        ({"reference": "{{task.answer}}"}, "variables item.<field>, .* got 'task.answer'"),
        ({"reference": "{{sample.output_tools}}"}, "got 'sample.output_tools'"),
        ({"input": 3}, "input: expected a text, got '3'"),
        ({"name": None}, "name: expected a text"),
        (SIMILAR | {"evaluation_metric": "cosine", "operation": None}, "only the keys of text_similarity"),
        (PYTHON | {"input": None}, "only the keys of python"),
    ],
)
def test_a_grader_that_cannot_grade_as_it_says_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_grader(json.dumps(EQ | change), "reward")


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (SIMILAR | {"evaluation_metric": "cosine"}, "evaluation_metric: expected a metric without a model"),
        (
            PYTHON | {"source": "def grade(sample):\n    return 1"},
            r"a function grade\(sample, item\), got '1 arguments'",
        ),
        (PYTHON | {"source": "def grade(sample, item)\n"}, "source: expected Python source"),
        (MODEL | {"range": [1, 0]}, "range: expected two numbers, the smaller first"),
        (MODEL | {"input": "Is it?"}, "input: expected a list of messages"),
        (MODEL | {"sampling_params": {"temperatur": 1}}, "sampling_params: expected only temperature"),
        (MODEL | {"input": [{"role": "user", "content": {"type": "input_audio"}}]}, "content of the types"),
        (multi("exact + clos", exact=EQ, close=SIMILAR), "calculate_output: expected numbers, .* got 'clos'"),
        (multi("__import__('os')", exact=EQ), "calculate_output: expected numbers"),
        (multi("exact.real", exact=EQ), "calculate_output: expected numbers"),
        (multi("inner", inner=multi("exact", exact=EQ)), r"graders.inner: expected a grader with a type"),
        (multi("1"), "graders: expected an object"),
    ],
)
def test_so_is_one_of_the_other_types(grader: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_grader(json.dumps(grader), "reward")


def test_the_body_of_a_request_or_job_is_unwrapped() -> None:
    assert parse_grader(json.dumps({"grader": EQ, "model_sample": "x"}), "f").name == "exact"


def test_braces_in_python_are_no_templates() -> None:
    source = "def grade(sample, item):\n    return float(f'{{{item.get(\"x\")}}}' == '{1}')"
    assert parse_grader(json.dumps(PYTHON | {"source": source}), "f").variables == frozenset()


async def test_python_grades_in_a_process_without_our_secrets_and_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    source = """
import os, socket

def grade(sample, item):
    assert sample["output_json"] == {"n": 4} and item["limit"] == 2
    assert "JUDGE_API_KEY" not in os.environ
    try:
        socket.create_connection(("127.0.0.1", item["port"]), timeout=2)
    except OSError:
        return sample["output_json"]["n"] / item["limit"]
    return -1
"""
    async with serve_app(Starlette(), "127.0.0.1", 0, grace_s=0) as url:
        judgement = await graded(PYTHON | {"source": source}, '{"n": 4}', limit=2, port=int(url.rpartition(":")[2]))

    assert (judgement.score, judgement.reason) == (2.0, "")


async def test_python_that_raises_grades_0_and_is_refused_if_it_never_works() -> None:
    source = "def grade(sample, item):\n    return 1 / len(sample['output_text'])"
    grader = Grader(JudgeConfig(grader_text=json.dumps(PYTHON | {"source": source})), None)

    failed = await grader.judge(case(""), decides=True)
    assert (failed.score, failed.success) == (0, False)
    assert failed.reason == "ZeroDivisionError: division by zero"
    assert (await grader.judge(case("four"), decides=True)).score == 0.25

    broken = Grader(JudgeConfig(grader_text=json.dumps(PYTHON | {"source": "def grade(a, b):\n    return 'x'"})), None)
    for _ in range(7):
        assert (await broken.judge(case("a"), decides=True)).score == 0
    with pytest.raises(ConfigError, match="it failed on the first 8: TypeError: grade returned 'x'"):
        await broken.judge(case("a"), decides=True)


async def test_python_that_ends_its_process_is_a_fault_and_no_reward() -> None:
    source = "import os\ndef grade(sample, item):\n    os._exit(0)"
    with pytest.raises(JudgeError, match="its process left none"):
        await graded(PYTHON | {"source": source}, "a")


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("'x' * 2**21", "expected JSON from a grade in Python"),
        ("'[' * 100_000", "expected JSON from a grade in Python"),
        ("'[1]'", r"expected a grade or an error .* got \[1\]"),
        ('\'{"grade": "1"}\'', "expected a grade or an error"),
        ("'{\"grade\": Infinity}'", "expected a grade or an error .* got {'grade': inf}"),
    ],
)
async def test_a_report_that_is_no_grade_is_a_fault_and_no_reward(report: str, message: str) -> None:
    source = f"""
import os

def grade(sample, item):
    with open(os.environ["GRADE_PATH"], "w") as result:
        result.write({report})
    os._exit(0)
"""
    with pytest.raises(JudgeError, match=message):
        await graded(PYTHON | {"source": source}, "a")


@pytest.mark.parametrize(("grader", "answer"), [(EQ, "a" * 2**16), (PYTHON, "\0" * 2**14)])
async def test_an_answer_that_is_too_long_grades_0(grader: dict[str, Any], answer: str) -> None:
    judgement = await graded(grader, answer, answer="a")

    assert (judgement.score, judgement.success) == (0, False)
    assert "expected an answer of at most" in judgement.reason


async def test_fields_that_are_too_long_for_python_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected source and a task's fields of at most 65536 bytes together"):
        await graded(PYTHON, "a", text="a" * 2**17)


async def test_grades_beyond_what_a_reward_may_be_are_cut_off_and_no_fault() -> None:
    source = "def grade(sample, item):\n    return -abs(float(sample['output_text']) - 12)"
    judgement = await graded(PYTHON | {"source": source}, "1e300")

    assert (judgement.score, judgement.success) == (-1e6, False)


@asynccontextmanager
async def model_grader(
    reply: object, asked: list[Any], model: Mapping[str, object] = MODEL, **settings: Any
) -> AsyncGenerator[Grader]:
    """A grader whose model answers with this."""

    async def complete(request: Request) -> Response:
        asked.append(await request.json())
        message = {"role": "assistant", "content": reply if isinstance(reply, str) else json.dumps(reply)}
        usage = {"prompt_tokens": 1000, "completion_tokens": 500}
        return JSONResponse({"choices": [{"index": 0, "message": message}], "usage": usage})

    routes = [Route("/v1/chat/completions", complete, methods=["POST"])]
    async with serve_app(Starlette(routes=routes), "127.0.0.1", 0, grace_s=0) as url:
        config = JudgeConfig(base_url=f"{url}/v1", model="served", grader_text=json.dumps(model), **settings)
        async with Judge(config, "key") as judge:
            yield Grader(config, judge)


async def test_a_model_is_asked_at_the_judges_endpoint_and_its_cost_is_counted() -> None:
    asked: list[Any] = []
    async with model_grader({"steps": [], "result": 7}, asked, input_price=1.0, output_price=4.0) as grader:
        judgement = await grader.judge(case("Rome", answer="Roma"), decides=True)

    assert (judgement.score, judgement.success) == (7, True)
    assert judgement.cost_usd == pytest.approx((1000 * 1 + 500 * 4) / 1e6)
    assert asked[0]["model"] == "served"  # judge.model: the endpoint may not have the file's
    assert asked[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Is Rome Roma?"}]}]
    assert (asked[0]["temperature"], asked[0]["max_completion_tokens"]) == (0.5, 99)
    assert asked[0]["response_format"]["json_schema"]["schema"]["properties"]["result"] == {"type": "number"}


@pytest.mark.parametrize("said", ['{"city": "\\ud800"}', '{"city": NaN}', '{"city": 1e999}'])
async def test_an_answer_that_only_looks_like_json_is_graded_as_text_that_is_none(said: str) -> None:
    asked: list[Any] = []
    template = {"role": "user", "content": "Is {{sample.output_json.city}} {{item.answer}}?"}
    async with model_grader({"steps": [], "result": 0}, asked, MODEL | {"input": [template]}) as grader:
        assert (await grader.judge(case(said, answer="Roma"), decides=True)).score == 0

    assert asked[0]["messages"][0]["content"] == "Is  Roma?"


@pytest.mark.parametrize(
    "reply", ["seven", {"steps": []}, {"steps": [], "result": 11}, {"result": None}, {"result": 10**400}, "[" * 100_000]
)
async def test_an_answer_that_is_no_number_in_the_range_is_a_fault_and_no_reward(reply: object) -> None:
    async with model_grader(reply, []) as grader:
        with pytest.raises(JudgeError, match=r"expected .* from the grader's model"):
            await grader.judge(case("Rome", answer="Roma"), decides=True)


async def test_a_task_without_a_field_that_the_grader_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected tasks with the field item.answer"):
        await graded(EQ, "Rome")


def test_a_grader_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from cua_rl.judge.grader_file import read_grader

    with pytest.raises(ConfigError, match="expected a grader's JSON file"):
        read_grader(tmp_path / "no.json")

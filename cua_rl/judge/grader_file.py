"""Graders in the JSON of OpenAI's reinforcement fine-tuning, read and checked.

Sources: https://developers.openai.com/api/docs/guides/graders and the types in `openai.types.graders`.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeGuard, TypeVar, cast

from cua_rl.judge.text_similarity import METRICS
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_array, is_object, mapping, sequence

_T = TypeVar("_T")

MAX_SOURCE_BYTES = 48 * 1024  # of Python: source, answer and fields reach its process together
_TEMPLATE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_VARIABLE = re.compile(r"(?:item(?:\.\w+|\[\d+\])+|sample\.output_text|sample\.output_json(?:\.\w+|\[\d+\])*)")
_OPERATIONS: Mapping[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.lower() in text.lower(),
}
_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: math.pow,  # unlike **, it has no complex results
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": cast("Callable[..., float]", min),
    "max": cast("Callable[..., float]", max),
    "floor": cast("Callable[..., float]", math.floor),
    "ceil": cast("Callable[..., float]", math.ceil),
    "abs": math.fabs,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_KEYS: Mapping[str, tuple[str, ...]] = {
    "string_check": ("input", "reference", "operation"),
    "text_similarity": ("input", "reference", "evaluation_metric", "pass_threshold"),
    "python": ("source", "image_tag", "pass_threshold"),
    "score_model": ("input", "model", "range", "sampling_params", "pass_threshold"),
    "multi": ("graders", "calculate_output", "pass_threshold"),
}
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "seed", "reasoning_effort")},
    "max_completions_tokens": "max_completion_tokens",
}
"""Sampling parameters of a grader, by their names in Chat Completions."""
_PARTS = {"input_text", "output_text", "text", "input_image"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGrader:
    """Compares two texts, after templates in them are filled in."""

    text: str
    reference: str
    compare: Callable[[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonGrader:
    """Source that defines `grade(sample, item)`."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGrader:
    """Asks a model for a number in a range."""

    messages: Sequence[Mapping[str, object]]
    model: str
    low: float
    high: float
    sampling: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiGrader:
    """Combines the grades of others by a formula."""

    graders: Mapping[str, TextGrader | PythonGrader | ModelGrader]
    formula: ast.expr


AnyGrader = TextGrader | PythonGrader | ModelGrader | MultiGrader


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderFile:
    """A grader, its name, and what a grade must reach to count as success."""

    name: str
    grader: AnyGrader
    pass_threshold: float
    text: str
    """The file's."""

    @property
    def variables(self) -> frozenset[str]:
        """What its templates name, such as item.reference_answer."""
        return frozenset(_TEMPLATE.findall(" ".join(_templates(json.loads(self.text)))))

    @property
    def models(self) -> tuple[ModelGrader, ...]:
        """The graders in it that ask a model."""
        parts = self.grader.graders.values() if isinstance(self.grader, MultiGrader) else (self.grader,)
        return tuple(part for part in parts if isinstance(part, ModelGrader))


def _templates(value: Mapping[str, object]) -> Iterator[str]:
    yield from (json.dumps(value.get(key), ensure_ascii=False) for key in ("input", "reference"))  # not of source code
    for part in mapping(value.get("graders")).values():
        yield from _templates(mapping(part))


def read_grader(path: Path) -> GraderFile:
    """The grader in a file; raises `ConfigError`, which says where, for what could not be graded as it says."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward: expected a grader's JSON file, got {str(path)!r} ({error}); correct it") from None
    return parse_grader(text, str(path))


def parse_grader(text: str, place: str) -> GraderFile:
    """As `read_grader`, of its text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: expected a grader as JSON, got {error}; correct the file") from None
    if is_object(value) and "grader" in value and "type" not in value:
        value = value["grader"]  # the method of a fine-tuning job, or the body of a request that runs it
    grader = _parse(value, place, may_combine=True)
    assert is_object(value)
    return GraderFile(
        name=str(value["name"]),
        grader=grader,
        pass_threshold=_number(value, "pass_threshold", place, 1.0),
        text=json.dumps(value, ensure_ascii=False, indent=1),
    )


def _parse(value: object, place: str, *, may_combine: bool) -> AnyGrader:
    kinds = [kind for kind in _KEYS if may_combine or kind != "multi"]
    kind = value.get("type") if is_object(value) else None
    if not is_object(value) or not isinstance(kind, str) or kind not in kinds:
        raise _wrong(place, f"a grader with a type ({', '.join(kinds)})", kind or value, "see docs/rft_graders.md")
    for key in value.keys() - {"type", "name", *_KEYS[kind]}:
        near = get_close_matches(key, _KEYS[kind], n=1)
        do = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise _wrong(place, f"only the keys of {kind} (name, {', '.join(_KEYS[kind])})", key, do)
    _text(value, "name", place)
    match kind:
        case "string_check":
            operation = _choice(value, "operation", place, _OPERATIONS)
            return _text_grader(value, place, lambda text, reference: float(operation(text, reference)))
        case "text_similarity":
            if (metric := value.get("evaluation_metric")) in ("cosine", "meteor"):
                do = "use fuzzy_match or rouge_l" if metric == "cosine" else "use gleu, or a python grader"
                raise _wrong(f"{place}.evaluation_metric", "a metric without a model or a dictionary", metric, do)
            return _text_grader(value, place, _choice(value, "evaluation_metric", place, METRICS))
        case "python":
            return _python_grader(value, place)
        case "score_model":
            return _model_grader(value, place)
        case _:
            return _multi_grader(value, place)


def _text_grader(value: Mapping[str, object], place: str, compare: Callable[[str, str], float]) -> TextGrader:
    text, reference = _template(value, "input", place), _template(value, "reference", place)
    return TextGrader(text=text, reference=reference, compare=compare)


def _python_grader(value: Mapping[str, object], place: str) -> PythonGrader:
    source, at = _text(value, "source", place), f"{place}.source"
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise _wrong(at, f"at most {MAX_SOURCE_BYTES} bytes", len(source.encode()), "shorten it")
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(at, "Python source", error, "correct it") from None
    found = next((one for one in body if isinstance(one, ast.FunctionDef) and one.name == "grade"), None)
    if found is None or len(found.args.args) != 2:
        got = "none" if found is None else f"{len(found.args.args)} arguments"
        raise _wrong(at, "a function grade(sample, item)", got, "define it")
    return PythonGrader(source=source)


def _model_grader(value: Mapping[str, object], place: str) -> ModelGrader:
    given = value.get("input")
    if not is_array(given) or not given:
        raise _wrong(f"{place}.input", "a list of messages", given, 'write [{"role": "user", "content": "..."}]')
    messages = [_message(one, f"{place}.input[{index}]") for index, one in enumerate(given)]
    reach = sequence(value.get("range", [0, 1]))
    ends = [float(one) for one in reach if _is_number(one)]
    if not len(ends) == len(reach) == 2 or not ends[0] < ends[1]:
        raise _wrong(f"{place}.range", "two numbers, the smaller first", value.get("range"), "write [0, 1]")
    told: object = value.get("sampling_params") or {}
    got: object = sorted(told.keys() - _SAMPLING.keys()) if is_object(told) else told
    if not is_object(told) or got:
        raise _wrong(f"{place}.sampling_params", f"only {', '.join(_SAMPLING)}", got, "leave others out")
    return ModelGrader(
        messages=messages,
        model=_text(value, "model", place),
        low=ends[0],
        high=ends[1],
        sampling={_SAMPLING[name]: entry for name, entry in told.items() if entry is not None},
    )


def _message(value: object, place: str) -> Mapping[str, object]:
    """A message as Chat Completions has it, its templates not yet filled in."""
    role, content = (value.get("role"), value.get("content")) if is_object(value) else (None, None)
    if role not in ("user", "assistant", "system", "developer"):
        raise _wrong(place, "a message with role and content", value, 'write {"role": "user", "content": "..."}')
    if isinstance(content, str):
        return {"role": role, "content": _checked_template(content, place)}
    parts: list[Mapping[str, object]] = []
    for part in content if is_array(content) else [content]:
        fields = {"type": "input_text", "text": part} if isinstance(part, str) else part
        if not is_object(fields) or fields.get("type") not in _PARTS:
            raise _wrong(place, f"content of the types {', '.join(sorted(_PARTS))}", part, "leave other parts out")
        if fields["type"] == "input_image":
            url = _template(fields, "image_url", place)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": _template(fields, "text", place)})
    return {"role": role, "content": parts}


def _multi_grader(value: Mapping[str, object], place: str) -> MultiGrader:
    given = value.get("graders")
    if not is_object(given) or not given:
        raise _wrong(f"{place}.graders", "an object with a grader of each name", given, "write them")
    graders = {
        name: cast("TextGrader | PythonGrader | ModelGrader", _parse(one, f"{place}.graders.{name}", may_combine=False))
        for name, one in given.items()
    }
    formula, at = _text(value, "calculate_output", place), f"{place}.calculate_output"
    try:
        parsed = ast.parse(formula.replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(at, "a formula", f"{formula!r} ({error})", "correct it") from None
    for one in ast.walk(parsed):
        if not _is_allowed(one, graders):
            expected = f"numbers, + - * / ^, {', '.join(_FUNCTIONS)} and the graders {', '.join(graders)}"
            raise _wrong(
                at, expected, ast.unparse(one) if isinstance(one, ast.expr) else formula, "correct the formula"
            )
    return MultiGrader(graders=graders, formula=parsed)


def _is_allowed(node: ast.AST, graders: Mapping[str, object]) -> bool:
    match node:
        case ast.Name(id=name):
            return name in graders or name in _FUNCTIONS
        case ast.Constant(value=value):
            return _is_number(value)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in _FUNCTIONS
        case _:
            return isinstance(node, ast.BinOp | ast.UnaryOp | ast.USub | ast.Load) or type(node) in _BINARY


def calculate(node: ast.expr, grades: Mapping[str, float]) -> float:
    """The value of a formula; raises `ArithmeticError` or `ValueError` where it has none."""
    match node:
        case ast.Name(id=name) if name in grades:
            return grades[name]
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(operand=operand):
            return -calculate(operand, grades)
        case ast.BinOp(left=left, op=op, right=right):
            return float(_BINARY[type(op)](calculate(left, grades), calculate(right, grades)))
        case ast.Call(func=ast.Name(id=name), args=args):
            return float(_FUNCTIONS[name](*(calculate(one, grades) for one in args)))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} has no number")


def fill(text: str, namespace: Mapping[str, object]) -> str:
    """The text with its templates filled in, with nothing for an answer that is no such JSON.

    Raises:
        KeyError: the task lacks a field.
    """

    def value_of(found: re.Match[str]) -> str:
        try:
            value = look_up(found[1], namespace)
        except KeyError:
            if found[1].startswith("item"):
                raise
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return _TEMPLATE.sub(value_of, text)


def look_up(variable: str, namespace: Mapping[str, object]) -> object:
    """What a variable such as item.parts[0].name stands for; raises `KeyError` if it is not there."""
    value: object = namespace
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", variable):
        if index and is_array(value) and int(index) < len(value):
            value = value[int(index)]
        elif name and is_object(value) and name in value:
            value = value[name]
        else:
            raise KeyError(variable)
    return value


def _template(value: Mapping[str, object], key: str, place: str) -> str:
    return _checked_template(_text(value, key, place), f"{place}.{key}")


def _checked_template(text: str, place: str) -> str:
    for variable in _TEMPLATE.findall(text):
        if _VARIABLE.fullmatch(variable) is None:
            raise _wrong(
                place, "variables item.<field>, sample.output_text and sample.output_json", variable, "correct it"
            )
    return text


def _text(value: Mapping[str, object], key: str, place: str) -> str:
    found = value.get(key)
    if not isinstance(found, str) or (not found and key != "reference"):
        raise _wrong(f"{place}.{key}", "a text", found, f"write {key}")
    return found


def _choice(value: Mapping[str, object], key: str, place: str, choices: Mapping[str, _T]) -> _T:
    found = value.get(key)
    if not isinstance(found, str) or found not in choices:
        raise _wrong(f"{place}.{key}", f"one of {', '.join(choices)}", found, "correct it")
    return choices[found]


def _number(value: Mapping[str, object], key: str, place: str, default: float) -> float:
    found = value.get(key, default)
    if not _is_number(found):
        raise _wrong(f"{place}.{key}", "a number", found, "correct it")
    return float(found)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(place: str, expected: str, got: object, do: str) -> ConfigError:
    return ConfigError(f"{place}: expected {expected}, got {str(got)[:300]!r}; {do}")

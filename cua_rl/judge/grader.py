"""Grades rollouts with a grader of OpenAI's reinforcement fine-tuning, instead of a judge.

`sample.output_text` is the rollout's final answer, empty if there is none; `item` has the task's fields. A grade that
cannot be had (an endpoint that is down, a sandbox that fails) is a fault and never becomes a reward. Python that raises
or uses all of its time, and a formula without a value, cannot handle the answer: the grade is 0. So it is for an answer
that is too long to be graded: with a fault, a policy would escape bad grades.
"""

import asyncio
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from cua_rl.host.guest_account import open_guest_account
from cua_rl.host.processes import OwnedProcess, Report
from cua_rl.host.sandbox import can_sandbox, sandbox_to_join
from cua_rl.host.scratch import make_scratch_folder, remove_tree
from cua_rl.host.users import bare_environment
from cua_rl.judge import grader_program
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.grader_file import (
    GraderFile,
    ModelGrader,
    MultiGrader,
    PythonGrader,
    TextGrader,
    calculate,
    fill,
    parse_grader,
)
from cua_rl.judge.judge import Judge
from cua_rl.judge.request import Case
from cua_rl.types.errors import ConfigError, JudgeError
from cua_rl.types.json_values import is_array, is_object
from cua_rl.types.judgement import MAX_REWARD, Judgement, JudgeVote

logger = logging.getLogger(__name__)

_MAX_CPU_S = 120  # of one grade in Python: OpenAI's limit on its time
_TIMEOUT_S = 600.0  # of its process, which gets less than a core on a busy machine
_MAX_MEMORY_BYTES = 2 * 2**30
_MAX_TOLD_BYTES = 96 * 1024
_MAX_GIVEN_BYTES = 64 * 1024
"""Of source and fields; the rest is for the answer."""
MAX_ANSWER_BYTES = 32 * 1024
_NUM_TRIED = 8
"""Answers in a row without a grade, from Python or a formula that has never worked."""
_RESPONSE = {
    "type": "json_schema",
    "json_schema": {
        "name": "grade",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "steps": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
                        "required": ["description", "conclusion"],
                        "additionalProperties": False,
                    },
                },
                "result": {"type": "number"},
            },
            "required": ["steps", "result"],
            "additionalProperties": False,
        },
    },
}
"""The answer that OpenAI asks its grader models for: steps of reasoning, then the number."""


@dataclass(slots=True)
class _Asked:
    """What grading one rollout has cost, and why it graded so."""

    reasons: list[str] = field(default_factory=list[str])
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    has_worked: bool = False
    """Whether Python or a formula had a grade for the answer."""
    problem: str = ""
    """Why one had none."""


class Grader:
    """Grades attempts; an async context manager. `judge` is the client of the endpoint, if a model is asked."""

    def __init__(self, config: JudgeConfig, judge: Judge | None) -> None:
        self.config = config
        self.file: GraderFile = parse_grader(config.grader_text, "reward")
        self._client = judge
        self._has_worked = False
        self._num_failed = 0

    async def judge(self, case: Case, *, decides: bool) -> Judgement:
        """The grade as the score of one vote, whose verdict says whether it reaches the grader's threshold.

        Raises:
            ConfigError: the task lacks a field that the grader names, or Python or a formula never works.
            JudgeError: there is no grade.
        """
        clock, asked = time.monotonic(), _Asked()
        answer = case.answer or ""
        if (size := len(answer.encode(errors="replace"))) > MAX_ANSWER_BYTES:
            asked.reasons.append(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {size}")
            grade = 0.0
        else:
            sample: dict[str, object] = {"output_text": answer, "output_tools": [], "choices": []}
            with suppress(ValueError, RecursionError):
                # no NaN, and no lone surrogate, with which no model could be asked
                json.dumps(value := json.loads(answer), ensure_ascii=False, allow_nan=False).encode()
                sample["output_json"] = value
            grade = await self._grade(self.file.grader, {"sample": sample, "item": dict(case.item)}, asked)
            self._note(asked)
        grade = max(-MAX_REWARD, min(grade, MAX_REWARD))  # no fault, which would spare a policy its worst grades
        vote = JudgeVote(
            success=grade >= self.file.pass_threshold,
            reason="; ".join(asked.reasons),
            score=grade,
            text=answer,
            duration_s=time.monotonic() - clock,
            num_prompt_tokens=asked.num_prompt_tokens,
            num_answer_tokens=asked.num_answer_tokens,
        )
        return Judgement(
            model=f"grader {self.file.name}",
            prompt=self.file.text,
            prompt_sha256=sha256(self.file.text.encode()).hexdigest(),
            screenshots="none",
            votes=(vote,),
            decides=decides,
            duration_s=vote.duration_s,
            cost_usd=self.config.cost_usd([vote]) if self.file.models else None,
        )

    async def _grade(self, grader: object, names: Mapping[str, object], asked: _Asked) -> float:
        match grader:
            case TextGrader():
                texts = _fill(grader.text, names), _fill(grader.reference, names)
                return await asyncio.to_thread(grader.compare, *texts)
            case PythonGrader():
                return await self._run_python(grader, names, asked)
            case ModelGrader():
                return await self._ask_model(grader, names, asked)
            case MultiGrader():
                parts = grader.graders.items()
                grades = await asyncio.gather(*(self._grade(part, names, asked) for _, part in parts))
                named = dict(zip(grader.graders, grades, strict=True))
                asked.reasons += [f"{name}={grade:g}" for name, grade in named.items()]
                try:
                    if math.isfinite(grade := calculate(grader.formula, named)):
                        asked.has_worked = True
                        return grade
                    asked.problem = f"expected a finite number from calculate_output with {named}, got {grade}"
                except (ArithmeticError, ValueError, TypeError) as error:
                    asked.problem = f"expected a number from calculate_output with {named}, got {error}"
                return 0.0
            case _:
                raise AssertionError(grader)

    async def _ask_model(self, grader: ModelGrader, names: Mapping[str, object], asked: _Asked) -> float:
        assert self._client is not None, "expected a client, because the grader asks a model"
        body = {
            "model": self.config.model or grader.model,
            "messages": _filled(grader.messages, names),
            "response_format": _RESPONSE,
            **grader.sampling,
            **self.config.extra,
        }
        async with self._client.slots:
            reply: Any = await self._client.ask(body)
        try:
            usage: Any = reply.get("usage") or {}
            asked.num_prompt_tokens += int(usage.get("prompt_tokens") or 0)
            asked.num_answer_tokens += int(usage.get("completion_tokens") or 0)
            result = float(json.loads(reply["choices"][0]["message"]["content"])["result"])
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise JudgeError(
                f"expected JSON with a number as result from the grader's model, got {reply!r:.300}"
            ) from error
        if not grader.low <= result <= grader.high:
            raise JudgeError(
                f"expected a result from {grader.low:g} to {grader.high:g} from the grader's model, got {result}"
            )
        return result

    async def _run_python(self, grader: PythonGrader, names: Mapping[str, object], asked: _Asked) -> float:
        limits = {"max_memory_bytes": _MAX_MEMORY_BYTES, "max_cpu_s": _MAX_CPU_S}
        payload = json.dumps({**names, "source": grader.source, **limits}).encode()
        if (given := len(payload) - len(json.dumps(names["sample"]))) > _MAX_GIVEN_BYTES:
            raise ConfigError(
                f"reward: expected source and a task's fields of at most {_MAX_GIVEN_BYTES} bytes together for the "
                f"Python of grader {self.file.name!r}, got {given}; shorten them"
            )
        if len(payload) > _MAX_TOLD_BYTES:
            asked.reasons.append(f"expected an answer of at most {_MAX_TOLD_BYTES - given} bytes as JSON")
            return 0.0
        match await _run_sandboxed(payload):
            case {"grade": int() | float() as grade} if math.isfinite(grade):
                asked.has_worked = True
                return float(grade)
            case {"error": str() as text}:
                asked.problem = text[:1000]
                return 0.0
            case found:
                raise JudgeError(f"expected a grade or an error from grader {self.file.name!r}, got {found!r:.300}")

    def _note(self, asked: _Asked) -> None:
        """Raise `ConfigError` if it failed on the first answers, which is not the policy's doing."""
        if not asked.problem:
            self._has_worked |= asked.has_worked
            return
        asked.reasons.append(asked.problem)
        self._num_failed += 1
        logger.warning("grader=%s %s", self.file.name, asked.problem)
        if not self._has_worked and self._num_failed >= _NUM_TRIED:
            raise ConfigError(
                f"reward: expected grader {self.file.name!r} to grade an answer, it failed on the first "
                f"{self._num_failed}: {asked.problem}; correct its source or formula"
            )

    async def check(self) -> None:
        """Raise `ConfigError` if the endpoint of its model cannot be reached; costs nothing."""
        if self._client is not None:
            await self._client.check()


async def _run_sandboxed(payload: bytes) -> Any:
    """What the program reports; raises `JudgeError` if it reports nothing in time."""
    command = (sys.executable, "-I", grader_program.__file__)
    async with open_guest_account(command, "grader") as account:
        user, path = account.user, account.home / "grade.json"
        if await asyncio.to_thread(can_sandbox):  # without a network, and without files other than the interpreter's
            box = sandbox_to_join(command, account.home / ".tmp", account.home)
            user = replace(user, sandbox=tuple(box))
        logs = make_scratch_folder("log")
        with tempfile.TemporaryFile() as taken:
            process = OwnedProcess(
                command,
                name="grader",
                log_path=logs / "output.log",
                environment=bare_environment(account.home, {"GRADE_PATH": str(path)}),
                folder=account.home,
                user=user,
                told=payload,
                report=Report(path=path, taken=taken),
            )
            try:
                async with asyncio.timeout(_TIMEOUT_S), process:
                    await process.wait()
            except TimeoutError:
                raise JudgeError(f"expected a grade in Python within {_TIMEOUT_S:g} s, got none") from None
            finally:
                said = await asyncio.to_thread(process.log_tail, 5)
                await asyncio.to_thread(remove_tree, logs)
            taken.seek(0)
            state, _, content = taken.read().partition(b"\n")
    if state != b"written":
        raise JudgeError(
            f"expected a grade in Python, its process left none ({state.decode()!r}): {said.strip()[-300:]}"
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise JudgeError(f"expected JSON from a grade in Python, got {content[:300]!r} ({error})") from None


def _fill(text: str, names: Mapping[str, object]) -> str:
    try:
        return fill(text, names)
    except KeyError as missing:
        raise ConfigError(
            f"reward: expected tasks with the field {missing.args[0]}, which the grader names, got one without it; add "
            'it under "item" in the task'
        ) from None


def _filled(value: object, names: Mapping[str, object]) -> object:
    if isinstance(value, str):
        return _fill(value, names)
    if is_object(value):
        return {key: _filled(entry, names) for key, entry in value.items()}
    return [_filled(entry, names) for entry in value] if is_array(value) else value

"""Fields of a request that the gateway accepts, and that change nothing: an agent is told which of its own they are.

The policy's distribution is the run's, because its log-probabilities are trained on. docs/agents.md has the table.
"""

import logging
from collections.abc import Mapping
from typing import Literal

from cua_rl.renderers.answer_form import AnswerForm
from cua_rl.types.json_values import mapping
from cua_rl.types.rollout import SamplingParams

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "max_tool_calls": (),
    "reasoning": ({},),
    "reasoning_effort": (),
    "output_config": ({},),
    "verbosity": (),
    "top_p": (1,),
    "top_k": (),
    "seed": (),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "include": ([],),
    "truncation": ("disabled",),
}
"""With the values that ask for what happens anyway; null is one of them."""

_LIMITS = {"responses": ("max_output_tokens",), "chat": ("max_tokens", "max_completion_tokens")}
_OF_OTHER_API = {"responses": (*_LIMITS["chat"], "response_format"), "chat": (*_LIMITS["responses"], "text")}


class IgnoredFields:
    """Finds them, and warns of each name once."""

    def __init__(self) -> None:
        self._warned = set[str]()

    def find(
        self, request: Mapping[str, object], api: Literal["responses", "chat"], params: SamplingParams, form: AnswerForm
    ) -> tuple[str, ...]:
        """The names of the fields of `request` that ask for something, and do nothing; `params` are the run's.

        Of the schema of the answer's form, they are the keywords that are not enforced.
        """
        neutral = {**_WITHOUT_EFFECT, "temperature": (params.temperature,), **dict.fromkeys(_OF_OTHER_API[api], ())}
        ignored = {name for name, values in neutral.items() if request.get(name) not in (None, *values)}
        for name in _LIMITS[api]:
            limit = request.get(name)
            if isinstance(limit, int) and limit > params.max_tokens:
                ignored.add(name)
        if api == "responses" and mapping(request.get("text")).get("verbosity") is not None:
            ignored.add("text.verbosity")
        schema = "text.format" if api == "responses" else "response_format"
        ignored |= {f"{schema}: {keyword}" for keyword in form.not_enforced}
        if new := ignored - self._warned:
            self._warned |= new
            logger.warning("without effect in an agent's requests: %s (see docs/agents.md)", ", ".join(sorted(new)))
        return tuple(sorted(ignored))

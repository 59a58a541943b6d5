"""Names the fields of an agent's request that the gateway accepts but ignores.

Whatever is not known to be read is named, so also what a vendor adds to its API tomorrow. The policy's distribution is
the run's, because its log-probabilities are trained on. docs/agents.md has the table.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from cua_rl.renderers.answer_form import AnswerForm
from cua_rl.types.json_values import is_array, is_object, mapping, sequence
from cua_rl.types.rollout import SamplingParams

logger = logging.getLogger(__name__)

Api = Literal["responses", "chat", "messages"]

_READ: Mapping[Api, Mapping[str, str]] = {
    "responses": {
        "": "instructions tool_choice parallel_tool_calls previous_response_id max_output_tokens stop stream",
        "stream_options": "",
        "text": "",
        "text.format": "name schema strict",
        "tools": "name description parameters display_width display_height environment display_width_px"
        " display_height_px display_number enable_zoom",
        "input": "role call_id name arguments action actions current_url",
        "input.content": "text refusal image_url annotations logprobs",
        "input.summary": "text",
        "input.output": "text image_url",
    },
    "chat": {
        "": "tool_choice parallel_tool_calls max_tokens max_completion_tokens stop stream",
        "response_format": "",
        "response_format.json_schema": "name schema strict",
        "stream_options": "include_usage",
        "tools": "",
        "tools.function": "name description parameters",
        "messages": "role tool_call_id reasoning_content reasoning annotations",
        "messages.content": "text refusal",
        "messages.content.image_url": "url",
        "messages.tool_calls": "",
        "messages.tool_calls.function": "name arguments",
    },
    "messages": {
        "": "tool_choice max_tokens stop_sequences stream",
        "output_config": "",
        "output_config.format": "schema",
        "output_format": "schema",
        "system": "text",
        "tools": "name description input_schema display_width_px display_height_px display_number enable_zoom",
        "messages": "role",
        "messages.content": "text name input tool_use_id thinking",
        "messages.content.source": "media_type data url",
        "messages.content.content": "text",
        "messages.content.content.source": "media_type data url",
    },
}
"""The names that are read in each object of a request, by its path."""

_SAY_NOTHING = (
    "type id index status phase created_by caller signature pending_safety_checks acknowledged_safety_checks model"
    " store user metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention"
    " prompt_cache_breakpoint cache_control"
)
"""Names in any object: of what our answers have and agents send back, and of who asks, and what a vendor stores, caches
and charges."""

_KNOWN = {
    api: {path: frozenset(f"{names} {_SAY_NOTHING}".split()) for path, names in places.items()}
    for api, places in _READ.items()
}

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "top_p": (1,),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "modalities": (["text"],),
    "detail": ("auto",),
}
"""Values that ask for what happens anyway, as those do that are empty."""

_MAX_NAMES = 32
_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")


class IgnoredFields:
    """Finds them, and warns of each name once."""

    def __init__(self) -> None:
        self._warned = set[str]()

    def find(
        self, request: Mapping[str, object], api: Api, params: SamplingParams, form: AnswerForm
    ) -> tuple[str, ...]:
        """The paths of the fields of `request` that ask for something, and do nothing; `params` are the run's.

        Of the schema of the answer's form, they are the keywords that are not enforced. A name that no API would have,
        which an agent could have made up, is "others".
        """
        neutral = {**_NEUTRAL, "temperature": (params.temperature,)}
        ignored = {
            path if _NAME.fullmatch(path) else "others"
            for path, name, value in _unread(request, "", api)
            if not (value is None or value is False or value in ("", [], {}) or value in neutral.get(name, ()))
        }
        if form.must_call:  # whose grammar is the schema
            ignored -= {"tools.strict", "tools.function.strict"}
        for name in ("max_output_tokens",) if api == "responses" else ("max_tokens", "max_completion_tokens"):
            limit = request.get(name)
            if isinstance(limit, int) and limit > params.max_tokens:
                ignored.add(name)
        schema = {"responses": "text.format", "chat": "response_format", "messages": "output_config.format"}[api]
        ignored |= {f"{schema}: {keyword}" for keyword in form.not_enforced}
        named = sorted(ignored)[:_MAX_NAMES]
        if (new := set(named) - self._warned) and len(self._warned) < 20 * _MAX_NAMES:
            self._warned |= new
            logger.warning("without effect in an agent's requests: %s (see docs/agents.md)", ", ".join(sorted(new)))
        return tuple(named)


def _unread(value: object, place: str, api: Api) -> Iterator[tuple[str, str, object]]:
    """Path, name and value of the fields in the objects at a path that nothing reads."""
    known = _KNOWN[api]
    for fields in map(mapping, sequence(value) if is_array(value) else [value]):
        for name, inner in fields.items():
            path = f"{place}.{name}".lstrip(".")
            if path in known and (is_array(inner) or is_object(inner)):
                yield from _unread(inner, path, api)
            elif path not in known and name not in known[place]:
                yield path, name, inner

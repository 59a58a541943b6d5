"""One sample of an inspect_ai task.

The payload names the task (`file.py@name` or `package/name`), its `args`, the `sample_id` and the `score` that is the
reward, by default the first. It may name the score that is 1 for a `success`; otherwise a reward of 1 is one.
"""

import json
import os
import sys

from inspect_ai import eval as evaluate
from inspect_ai.model import get_model
from inspect_ai.scorer import value_to_float

# this provider speaks Chat Completions; "openai/" asks first, without tools, whether the address knows Responses
PROVIDER = "openai-api/cua"


def main() -> None:
    os.write(int(os.environ["CUA_RESULT_FD"]), b"{}\n")  # what it runs for the policy could write the file
    payload = json.load(sys.stdin)
    address, api_key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    (log,) = evaluate(
        payload["task"],
        task_args=payload.get("args", {}),
        sample_id=payload["sample_id"],
        model=get_model(f"{PROVIDER}/{os.environ['CUA_MODEL']}", base_url=address, api_key=api_key),
        max_retries=0,
        # out of turns, a request is refused, which is an error here: it counts with its score, any other as a fault
        score_on_error=True,
        display="none",
        log_dir=os.environ["CUA_WORK_DIR"],
    )
    sample = log.samples[0] if log.samples else None
    error = (sample.error if sample else None) or log.error
    scores: dict[str, float] = {}
    for name, score in ((sample.scores or {}) if sample else {}).items():
        values = score.value if isinstance(score.value, dict) else {name: score.value}
        scores |= {key: value_to_float()(value) for key, value in values.items()}
    message = error.message if error else None if scores else "expected a score, got none"
    result = {
        "reward": scores[payload.get("score", next(iter(scores)))] if scores else None,
        "success": scores[payload["success"]] >= 1.0 if scores and "success" in payload else None,
        "metrics": scores,
        "answer": sample.output.completion if sample else None,
        # an error leaves a status of "success" where a task allows failures, so the sample itself is asked
        "fault": {"kind": "environment", "message": message} if message else None,
    }
    os.write(int(os.environ["CUA_RESULT_FD"]), json.dumps(result).encode())


if __name__ == "__main__":
    main()

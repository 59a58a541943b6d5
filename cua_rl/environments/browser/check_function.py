"""Runs a check in its own process: `python check_function.py FILE FUNCTION` prints the returned value as JSON.

The function is called with the address of the site and, if it takes two arguments, the agent's answer. This module
uses only the standard library.
"""

import inspect
import json
import os
import runpy
import sys
from pathlib import Path


def main(file: str, function: str) -> None:
    """Call the function and print its value on the last line; it can import modules beside its file."""
    sys.path.insert(0, str(Path(file).parent))
    verify = runpy.run_path(file)[function]
    given = [os.environ["CUA_SITE_URL"], os.environ["CUA_ANSWER"]]
    arguments = inspect.signature(verify).parameters.values()
    value = verify(*given[: sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in arguments)])
    sys.stderr.flush()
    print("\n" + json.dumps(value, default=repr), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""A check in a process of its own: `python check_function.py FILE FUNCTION` prints what the function returns, as JSON.

The function gets the site's address and, if it takes two arguments, the agent's answer. Standard library only.
"""

import inspect
import json
import os
import runpy
import sys
from pathlib import Path


def main(file: str, function: str) -> None:
    """Call the function and print its value on the last line; modules beside the file can be imported."""
    sys.path.insert(0, str(Path(file).parent))
    verify = runpy.run_path(file)[function]
    given = [os.environ["CUA_SITE_URL"], os.environ["CUA_ANSWER"]]
    arguments = inspect.signature(verify).parameters.values()
    value = verify(*given[: sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in arguments)])
    sys.stderr.flush()
    print("\n" + json.dumps(value, default=repr), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

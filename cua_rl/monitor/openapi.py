"""`python -m cua_rl.monitor.openapi` prints the API schema, from which the web app's types are generated."""

import json
import sys
from typing import Any

from cua_rl.monitor.app import make_app
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.security import AccessRules, make_token


def openapi_schema() -> dict[str, Any]:
    return make_app(Databases([]), AccessRules(write_token=make_token())).openapi()


def main() -> None:
    sys.stdout.write(json.dumps(openapi_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""The commands. Unsupported systems are refused before an import fails on them."""

import sys

from cua_rl.host.system import refusal

if (_sentence := refusal()) is not None:
    print(_sentence, file=sys.stderr)
    sys.exit(2)

"""Programs that a person starts. Other systems are refused before anything is imported that they do not have."""

import sys

from cua_rl.system import refusal

if (_sentence := refusal()) is not None:
    print(_sentence, file=sys.stderr)
    sys.exit(2)

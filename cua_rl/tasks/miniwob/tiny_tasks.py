"""The MiniWoB++ tasks that a model of under two million parameters can learn: few words to read, one click each."""

TINY_TASKS = ("click-button", "click-color", "click-dialog-2")
"""All of the development set."""

_BUTTONS = ("submit", "okay", "ok", "yes", "no", "cancel", "next", "previous")
_COLORS = (
    "red", "blue", "olive", "lime", "black", "white", "grey", "purple", "orange", "yellow", "cyan", "pink", "magenta",
)  # fmt: skip
LABELS = (*_BUTTONS, *(name.capitalize() for name in _BUTTONS), *_COLORS, "x", "OK")
"""Everything that is to be clicked on their pages; "Cancel" is both a button and in a dialog."""

INSTRUCTION_PIECES = (
    "Click", " on", " the", " button", " button.", " colored", " box", " box.", " in", " dialog", " labeled", ".",
    "List", " what", " you", " see",
)  # fmt: skip
"""The other words of their instructions."""

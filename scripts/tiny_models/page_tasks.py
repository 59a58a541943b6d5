"""The MiniWoB++ tasks that a model of under two million parameters can learn: shapes and colours, one click each."""

TINY_TASKS = ("click-color", "click-dialog-2", "click-widget")
"""All of the development set."""

_COLORS = (
    "red", "blue", "olive", "lime", "black", "white", "grey", "purple", "orange", "yellow", "cyan", "pink", "magenta",
)  # fmt: skip
_WIDGETS = ("radio", "checkbox", "text", "textarea", "button")
LABELS = (*_COLORS, *_WIDGETS, "x", "OK", "Cancel")
"""Labels of all click targets on their pages."""

INSTRUCTION_PIECES = (
    "Click", " on", " a", " the", " widget", " colored", " box", " in", " dialog", " labeled", ".", "List", " what",
    " you", " see",
)  # fmt: skip
"""The other words of their instructions."""

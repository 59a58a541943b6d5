"""Names of actions, keys and buttons in other data sets and tools."""

from collections.abc import Mapping

_KINDS: Mapping[str, frozenset[str]] = {
    "click": frozenset({"click", "tap", "left_click", "mouse_click", "leftclick", "click_at"}),
    "double_click": frozenset({"double_click", "doubleclick", "dblclick", "mouse_dblclick"}),
    "right_click": frozenset({"right_click", "rightclick"}),
    "long_press": frozenset({"long_press", "longpress", "long_tap"}),
    "move": frozenset({"mouse_move", "move", "moveto", "hover", "hover_at"}),
    "drag": frozenset({"drag", "dragto", "swipe", "left_click_drag", "drag_and_drop", "mouse_drag_and_drop"}),
    "touch": frozenset({"touch_and_lift"}),
    "scroll": frozenset({"scroll", "vscroll", "scroll_at"}),
    "page": frozenset({"scroll_document"}),
    "type": frozenset({"type", "input_text", "write", "typewrite", "keyboard_type", "type_text", "input"})
    | {"type_text_at", "keyboard_insert_text"},
    "keys": frozenset({"key", "press", "hotkey", "keyboard_press", "press_key", "keypress", "key_combination"}),
    "back": frozenset({"navigate_back", "go_back", "press_back", "back"}),
    "home": frozenset({"navigate_home", "press_home", "home"}),
    "enter": frozenset({"keyboard_enter", "press_enter", "enter"}),
    "wait": frozenset({"wait", "noop", "sleep", "wait_5_seconds"}),
    "answer": frozenset({"answer", "send_msg_to_user"}),
    "finish": frozenset({"status", "terminate", "finish", "finished", "done", "complete", "stop", "report_infeasible"})
    | {"end"},
    "look": frozenset({"screenshot", "take_screenshot", "zoom", "cursor_position", "open_web_browser"}),
    "start": frozenset({"open_app", "open", "launch", "launch_app", "goto", "navigate", "search"}),
    "none": frozenset({"go_forward", "forward", "hold_key", "left_mouse_down", "left_mouse_up", "mouse_down"})
    | {"mouse_up", "mousedown", "mouseup", "key_down", "key_up", "keydown", "keyup", "triple_click", "tripleclick"}
    | {"middle_click", "middleclick", "hscroll", "new_tab", "tab_close", "tab_focus", "bash", "str_replace_editor"}
    | {"str_replace_based_edit_tool", "moverel", "dragrel", "select_option", "left_out"},
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
"""What our tools do about an action of this name."""
LOOKS = _KINDS["look"]
"""Actions that only look: our agent sees the screen at every turn anyway."""
STARTS = _KINDS["start"]
"""Actions that go to an app or page by its name, which our tools cannot do."""
BUTTONS = {
    **{"back": "Back", "go_back": "Back", "home": "Home", "go_home": "Home", "enter": "Enter", "return": "Enter"},
    **{"recents": "Menu", "recent_apps": "Menu", "app_switch": "Menu"},
}
"""Buttons of our tool for phones. A key called menu is not among them: ours shows the recent apps."""
KEYS = {
    **{"control": "ctrl", "control_l": "ctrl", "control_r": "ctrl", "shift_l": "shift", "shift_r": "shift"},
    **{"alt_l": "alt", "alt_r": "alt", "option": "alt", "super_l": "super", "command": "meta", "return": "enter"},
    **{"prior": "pageup", "next": "pagedown", "page_up": "pageup", "page_down": "pagedown"},
    **{"minus": "-", "plus": "+", "equal": "=", "period": ".", "comma": ","},
    **{"slash": "/", "backslash": "\\", "semicolon": ";", "apostrophe": "'", "grave": "`"},
}
"""Names of keys in X11 and of other systems."""
SUCCEEDED = {"success", "successful", "succeeded", "complete", "completed", "done", "finished", "true"}
FAILED = {"infeasible", "impossible", "failure", "failed", "fail", "false"}
DIRECTIONS = {"down": (0, 1), "up": (0, -1), "right": (1, 0), "left": (-1, 0)}
THOUSANDTHS = frozenset({"click_at", "hover_at", "type_text_at", "scroll_at"})
"""Actions of Gemini, whose coordinates are thousandths of the screen."""
NO_EFFECT = frozenset(
    {"delay", "description", "thought", "reasoning", "explanation", "intent", "safety_decision", "interval"}
)
"""Arguments that give a reason or a duration of the gesture."""

"""What buttons inside apps and on the launcher do; what they act on follows from the screen they are on."""

from typing import Literal

AppCommand = Literal[
    "call",
    "end_call",
    "new_contact",
    "save_contact",
    "delete_contact",
    "call_contact",
    "message_contact",
    "send_text",
    "delete_note",
    "save_alarm",
    "start_timer",
    "stop_timer",
    "create_folder",
    "delete_file",
    "open_address",
    "download",
    "take_screenshot",
    "pin_icon",
    "unpin_icon",
    "move_icon",
    "uninstall",
    "make_home_folder",
    "rename_home_folder",
    "set_wallpaper",
]

"""Finds elements in accessibility trees of Android, as AndroidControl has one for each screenshot.

Messages: google-deepmind/android_env, android_env/proto/a11y.
"""

from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import DecodeError
from pybase64 import b64decode

from cua_rl.exchange.tfrecords import message_class
from cua_rl.types.errors import ConfigError

_INT, _BOOL = FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_BOOL
_SIDES = enumerate(("left", "top", "right", "bottom"), start=1)
_FLAGS = {14: "is_clickable", 15: "is_editable", 19: "is_long_clickable", 23: "is_visible"}
_FOREST = message_class(
    "Forest",
    {
        "Rect": {number: (side, _INT, False) for number, side in _SIDES},
        "Node": {2: ("bounds", "Rect", False), **{number: (flag, _BOOL, False) for number, flag in _FLAGS.items()}},
        "Tree": {1: ("nodes", "Node", True)},
        "Window": {4: ("layer", _INT, False), 11: ("tree", "Tree", False)},
        "Forest": {1: ("windows", "Window", True)},
    },
)


def find_element(tree: str, x: float, y: float) -> tuple[float, ...]:
    """Left, top, right and bottom of what a touch at a pixel hits; empty if it hits nothing that takes touches.

    It is the smallest element there in the front window that has one. `tree` is in base64; raises `ConfigError`.
    """
    try:
        forest = _FOREST.FromString(b64decode(tree, validate=True))
    except (ValueError, DecodeError) as error:
        raise ConfigError(
            f"expected accessibility trees of AndroidControl in base64, got {tree[:60]!r} ({error}); leave them out, "
            "and clicks are compared by their distance"
        ) from None
    for window in sorted(forest.windows, key=lambda one: one.layer, reverse=True):
        hit = [
            (node.bounds.right - node.bounds.left, node.bounds.bottom - node.bounds.top, node.bounds)
            for node in window.tree.nodes
            if node.is_visible and (node.is_clickable or node.is_long_clickable or node.is_editable)
            if node.bounds.left <= x <= node.bounds.right and node.bounds.top <= y <= node.bounds.bottom
        ]
        if hit:
            *_, bounds = min(hit, key=lambda one: one[0] * one[1])
            return bounds.left, bounds.top, bounds.right, bounds.bottom
    return ()

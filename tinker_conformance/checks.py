"""All checks by tier. A check is a public function of its tier's module; its name is the sentence that it checks."""

from collections.abc import Callable, Mapping
from types import ModuleType

from tinker_conformance import image_checks, model_checks, restart_checks, text_checks, wire_checks
from tinker_conformance.server import Server

Check = Callable[[Server], None]

TIERS: Mapping[str, ModuleType] = {
    "T0": wire_checks,
    "T1": text_checks,
    "T2": image_checks,
    "T3": model_checks,
    "T4": restart_checks,
}


def checks_of(tier: str) -> dict[str, Check]:
    """In the order of the module."""
    module = TIERS[tier]
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__ and _takes_a_server(value)
    }


def _takes_a_server(value: object) -> bool:
    annotations: Mapping[str, object] = getattr(value, "__annotations__", {})
    return annotations == {"server": Server, "return": None}

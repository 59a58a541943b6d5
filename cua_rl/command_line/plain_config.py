"""A configuration as JSON that may be stored and shown."""

from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import chz

from cua_rl.command_line.fields import setting_fields
from cua_rl.host.masking import known_secrets, mask_secrets, remember_secrets
from cua_rl.types.json_values import is_object, mapping


def plain_config(config: object) -> dict[str, object]:
    """A chz configuration or a mapping as JSON data, groups nested, without what only the run fills in.

    Masked are values of settings named like `gbox_api_key`, users and passwords in URLs, and every secret of the
    environment. What is masked here is masked in logs and errors too from now on.
    """
    settings = _plain(config)
    if not is_object(settings):
        raise TypeError(f"expected a chz configuration or a mapping, got {config!r}")
    remember_secrets(settings)
    return mask_secrets(settings, known_secrets())


def stored_setting(config: Mapping[str, Any], path: str) -> Any:
    """The value of `loss.kl_loss_coef` in a stored configuration, None without; earlier runs stored `kl_loss_coef`.

    Prefixes of groups were joined to names with an underscore (`judge_model`), or left out.
    """
    value: Any = config
    for name in path.split("."):
        value = mapping(value).get(name)
    if value is not None:
        return value
    return config.get(path.replace(".", "_"), config.get(path.rpartition(".")[2]))


def find_stored(config: Mapping[str, Any], path: str, *, is_for_group: bool = False) -> tuple[bool, Any]:
    """Whether a stored configuration has a value, which may be None, for the setting `loss.clip_low`; and the value.

    `is_for_group`: earlier runs stored the setting under the name of its group, `loss`.
    """
    value: Any = config
    for name in path.split("."):
        if not is_object(value) or name not in value:
            break
        value = value[name]
    else:
        return True, value
    group = config.get(path.partition(".")[0])
    if isinstance(group, Mapping):
        return False, None  # of a version that did not have this setting
    value = group if is_for_group else stored_setting(config, path)
    return value is not None, value


def _is_many(value: object) -> TypeGuard[Collection[object]]:
    return isinstance(value, list | tuple | set | frozenset)


def _plain(value: object) -> object:
    if chz.is_chz(value):
        value = {name: getattr(value, name) for name in setting_fields(type(value))}
    if is_object(value):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if _is_many(value):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)

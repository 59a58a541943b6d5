"""The file of variables that recipes read: `.env` of the working folder, or the one that `CUA_RL_ENV_FILE` names.

Parent folders are not searched: a file in `/tmp` or `/home` that somebody else wrote would decide where runs and keys
are sent.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from cua_rl.host.masking import is_secret_name
from cua_rl.types.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_VARIABLE = "CUA_RL_ENV_FILE"
_LOADS_CODE = (
    "LD_PRELOAD LD_AUDIT LD_LIBRARY_PATH DYLD_INSERT_LIBRARIES DYLD_LIBRARY_PATH DYLD_FRAMEWORK_PATH GCONV_PATH "
    "BASH_ENV NODE_OPTIONS NODE_PATH PYTHONSTARTUP PYTHONHOME PYTHONPATH PYTHONUSERBASE PYTHONINSPECT PYTHONBREAKPOINT"
)
"""Variables by which a file of settings would decide which code every child process runs."""


def with_environment_file(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment with what the file adds to it; variables that are already set keep their values.

    Raises:
        ConfigError: `CUA_RL_ENV_FILE` names a file that does not exist, or the file names code to load.
    """
    from dotenv import dotenv_values

    path = Path(environ.get(FILE_VARIABLE) or ".env").expanduser()
    if not path.is_file():
        if environ.get(FILE_VARIABLE):
            raise ConfigError(f"{FILE_VARIABLE}: expected a file of variables, got {str(path)!r}; correct or unset it")
        return dict(environ)
    if not _is_trusted(path, is_named=bool(environ.get(FILE_VARIABLE))):
        return dict(environ)
    values = {name: value for name, value in dotenv_values(path).items() if value is not None}
    if found := sorted(values.keys() & set(_LOADS_CODE.split())):
        raise ConfigError(
            f"{path}: expected settings and keys, got {', '.join(found)}, which loads code into every program that a "
            "run starts; remove it, or export it in the shell if you mean it"
        )
    if path.stat().st_mode & 0o004 and any(value and is_secret_name(name) for name, value in values.items()):
        logger.warning("%s holds secrets and every user of this machine may read it; run: chmod 600 %s", path, path)
    return values | dict(environ)


def load_environment_file() -> None:
    os.environ.update(with_environment_file(os.environ))


def _is_trusted(path: Path, *, is_named: bool) -> bool:
    """Whether no one else can change the file, and it is ours or root's, or was named on purpose."""
    found = path.stat()
    if (is_named or found.st_uid in (os.geteuid(), 0)) and not found.st_mode & 0o002:
        return True
    logger.warning(
        "%s is ignored: user %s, who owns it, or everybody could have written it; take ownership of it and make it "
        "private, or name it in %s",
        path,
        found.st_uid,
        FILE_VARIABLE,
    )
    return False

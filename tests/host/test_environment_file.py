"""A file of variables may set what we read, not what our programs run."""

import os
from pathlib import Path

import pytest

from cua_rl.host.environment_file import FILE_VARIABLE, with_environment_file
from cua_rl.types.errors import ConfigError
from scripts.red_team.services import LOADS_CODE


def made(folder: Path, text: str, owner: int | None = None) -> dict[str, str]:
    """An environment that names the file, so that tests need not change the working folder."""
    path = folder / ".env"
    path.write_text(text)
    path.chmod(0o600)
    if owner is not None:
        for changed in (path, folder):
            os.chown(changed, owner, owner)
    return {FILE_VARIABLE: str(path)}


@pytest.mark.parametrize("name", [*LOADS_CODE, "LD_AUDIT", "PYTHONSTARTUP", "DYLD_LIBRARY_PATH", "PYTHONUSERBASE"])
def test_a_variable_that_loads_code_is_refused(name: str, tmp_path: Path) -> None:
    environ = made(tmp_path, f"HF_TOKEN=x\n{name}=/tmp/theirs\n")

    with pytest.raises(ConfigError, match=rf"expected settings and keys, got {name}, which loads code"):
        with_environment_file(environ)
    # what the shell exports is the caller's own
    assert with_environment_file({name: "/tmp/mine"})[name] == "/tmp/mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: only root can give files away")
def test_a_file_in_a_folder_of_another_user_counts_only_if_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = made(tmp_path, "CUA_B=theirs\n", owner=60_000)
    monkeypatch.chdir(tmp_path)

    assert "CUA_B" not in with_environment_file({})
    assert ".env is ignored: user 60000" in caplog.text
    assert with_environment_file(environ)["CUA_B"] == "theirs"


def test_a_named_file_that_everybody_may_write_is_ignored(tmp_path: Path) -> None:
    environ = made(tmp_path, "CUA_B=anybody\n")
    (tmp_path / ".env").chmod(0o666)

    assert "CUA_B" not in with_environment_file(environ)

"""Configuration that may be stored and shown."""

import json
from pathlib import Path
from typing import Any

import chz
import pytest

from cua_rl.command_line.plain_config import plain_config


@chz.chz
class Inner:
    monitor_token: str = "abcdefgh"
    max_tokens: int = 5


@chz.chz
class Example:
    gbox_api_key: str | None = "key-1234"
    tinker_api_key: str | None = None
    log_path: Path = Path("/tmp/run")
    database: str = "postgresql://user:hunter2@db:5432/runs"
    tasks: Any = ({"source_type": "ids", "api_key": "inner-key"},)
    note: str = "sk-from-environment"
    inner: Inner = chz.field(default_factory=Inner)


def test_configuration_is_json_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-environment")

    plain = plain_config(Example())

    assert json.loads(json.dumps(plain)) == {
        "gbox_api_key": "***",
        "tinker_api_key": None,
        "log_path": "/tmp/run",
        "database": "postgresql://user:***@db:5432/runs",
        "tasks": [{"source_type": "ids", "api_key": "***"}],
        "note": "***",
        "inner": {"monitor_token": "***", "max_tokens": 5},
    }

"""A rollout as one page that a colleague opens without a network."""

import re
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from cua_rl.recipes.export_rollout import ExportConfig, cli_main
from cua_rl.types.errors import ConfigError
from tests.real.monitor.conftest import Shown

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_an_exported_step_refers_to_nothing_outside_of_its_file(shown: Shown, tmp_path: Path) -> None:
    out = tmp_path / "step.html"
    await cli_main(ExportConfig(run="run", step=1, out=str(out)), {"DATABASE_URL": shown.url})

    page = out.read_text(encoding="utf-8")
    rollouts = (await shown.json("/api/runs/1/rollouts", phase="step", step=1))["items"]
    assert len(rollouts) == 4
    assert all(item["rollout_id"] in page for item in rollouts)
    assert page.count("data:image/png;base64,") >= len(rollouts)
    references = re.findall(r"""(?:src|href|action|data|poster|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert [text for text in references if not text.startswith(("data:", "#tip"))] == []
    assert not re.search(r"<(script|link|iframe|object|embed|base)\b|@import|\son\w+=", page)
    assert "https:" not in page
    assert "http:" not in page


async def test_a_prefix_of_several_ids_is_refused_and_a_longer_one_is_enough(shown: Shown, tmp_path: Path) -> None:
    ids = [item["rollout_id"] for item in (await shown.json("/api/runs/1/rollouts", phase="step", step=1))["items"]]
    out = tmp_path / "rollout.html"

    with pytest.raises(ConfigError, match="rollout_id: expected the beginning of one rollout's id"):
        await cli_main(ExportConfig(run="run", rollout_id="", out=str(out)), {"DATABASE_URL": shown.url})

    await cli_main(ExportConfig(run="run", rollout_id=ids[0], out=str(out)), {"DATABASE_URL": shown.url})
    assert [one in out.read_text(encoding="utf-8") for one in ids] == [True, *[False] * (len(ids) - 1)]


async def test_a_rollout_is_downloaded_as_the_page_that_the_command_writes(shown: Shown, tmp_path: Path) -> None:
    rollout_id = (await shown.json("/api/runs/1/rollouts", phase="step", step=1))["items"][0]["rollout_id"]
    out = tmp_path / "rollout.html"
    await cli_main(ExportConfig(run="run", rollout_id=rollout_id, out=str(out)), {"DATABASE_URL": shown.url})

    answer = await shown.client.get(f"/api/runs/1/rollouts/{rollout_id}/page")
    assert answer.text == out.read_text(encoding="utf-8")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert re.fullmatch(r'attachment; filename="rollout-[0-9A-Za-z]+\.html"', answer.headers["content-disposition"])
    assert "default-src 'none'" in answer.headers["content-security-policy"]


async def test_a_rollout_is_downloaded_as_a_film_with_a_frame_for_each_screen(shown: Shown) -> None:
    items = (await shown.json("/api/runs/1/rollouts", phase="step", step=1))["items"]
    for item in items:
        rollout = await shown.json(f"/api/runs/1/rollouts/{item['rollout_id']}")
        screens = [turn["before"] for turn in rollout["turns"] if turn["before"]]
        screens += [turn["after"] for turn in rollout["turns"][-1:] if turn["after"]]
        kind = ("gif", "webp")[item["member_index"] % 2]
        answer = await shown.client.get(f"/api/runs/1/rollouts/{item['rollout_id']}/film", params={"kind": kind})
        assert answer.status_code == (200 if screens else 404)
        if screens:
            with Image.open(BytesIO(answer.content)) as film:
                assert (film.format, answer.headers["content-type"]) == (kind.upper(), f"image/{kind}")
                # equal neighbours are shown as one frame for longer
                assert 1 <= film.n_frames <= len(screens)  # pyright: ignore[reportAttributeAccessIssue]
    assert (await shown.client.get("/api/runs/1/rollouts/unknown/film")).status_code == 404
    assert (await shown.client.get("/api/runs/1/rollouts/unknown/page")).status_code == 404

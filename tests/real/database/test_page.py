"""docs/database.md: it names every table, and its queries run on a run as it is recorded."""

import re
from pathlib import Path

from cua_rl.database.models import Base
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import EvaluationEnded, RolloutSource
from cua_rl.recipes.prune import PruneConfig, cli_main
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start
from tests.real.monitor.analyses import save, suite_result
from tests.real.monitor.events import make_step_events

PAGE = (Path(__file__).parents[3] / "docs" / "database.md").read_text(encoding="utf-8")
STATEMENTS = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_names_every_table_in_the_drawing_and_in_the_list() -> None:
    drawing = PAGE.split("```text")[1].split("```")[0]
    listed = PAGE.split("| table |")[1].split("\n\n")[0]

    names = set(Base.metadata.tables)
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", drawing)) == []
    assert set(re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in listed.splitlines()[2:]))) == names


async def test_every_query_of_the_page_answers_and_its_deletions_leave_nothing_of_the_run(url: str) -> None:
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        baseline = source_events(make_group(seed=9, group_id="before"), 0, "baseline")
        ended = EvaluationEnded(
            source=RolloutSource(phase="baseline", step=0), metrics={"eval/held_out/success_rate": 0.5}
        )
        for event in [start(), *baseline, ended, *make_step_events(1), *make_step_events(2)]:
            await recorder.record(event)
    save(url, "1", suite_result([True, True], [True, False], accepted="a", first="a", second="b"), kind="suite")
    # an evaluation of models, or a run
    questions = [
        text.replace("'my-run@%'", "'run%'").replace("'my-run'", "'run'")
        for text in STATEMENTS
        if text.startswith("SELECT")
    ]
    deletions = [text.replace("'my-run'", "'run'") for text in STATEMENTS if text.startswith("DELETE")]

    assert [text for text in questions if not run_sql(url, text)] == []
    assert len(questions) == 13
    for text in deletions:
        run_sql(url, text)
    run_sql(url, "UPDATE screenshots SET created_at = created_at - interval '2 hours'")
    await cli_main(PruneConfig(dry_run=False), {"DATABASE_URL": url})
    left = {name: run_sql(url, f"SELECT count(*) FROM {name}")[0][0] for name in ("rollouts", "turns", "screenshots")}
    assert left == {"rollouts": 0, "turns": 0, "screenshots": 0}

"""Every command that people type, in a process of its own: no test imports for it what it forgot to import itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cua_rl.database.migrations import migrate_blocking
from cua_rl.database.postgres import EmbeddedPostgres
from tests.documentation.examples import read_examples
from tests.documentation.reader import LOAD_TORCH, check_parser
from tests.documentation.test_examples import MODULES, PAGES
from tests.real.database.conftest import run_sql

ROOT = Path(__file__).parents[2]
TAKE_NO_HELP = {
    "benchmarks.trainer_steps",  # a part of trainer_against_trl, which starts it
    "benchmarks.trl_steps",
    "scripts.metrics_page",  # writes docs/metrics.md, whatever it is given
    "scripts.repair_imports",  # changes the installation
}


def commands() -> list[str]:
    folders = ("cua_rl/recipes", "scripts", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).glob("*.py") if "__main__" in file.read_text()]
    names = {str(file.relative_to(ROOT).with_suffix("")).replace("/", ".") for file in files}
    return sorted((names | {"cua_rl.rebuild_database", "scripts.red_team"}) - TAKE_NO_HELP)


def run_command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, env=os.environ | environ
    )


@pytest.mark.parametrize("command", commands())
def test_a_command_says_how_it_is_used(command: str) -> None:
    done = run_command(command, "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_documented_commands_of_programs_that_load_torch_take_their_options() -> None:
    examples = [one.words for page in (*PAGES, *MODULES) for one in read_examples(page) if one.kind == "command"]
    typed = [words[words.index("-m") + 1 :] for words in examples if "-m" in words]
    found = [words for words in typed if words[0] in LOAD_TORCH]

    for module, *arguments in found:
        check_parser(module, arguments)
    assert {words[0] for words in found} == LOAD_TORCH


async def test_a_database_with_tables_is_rebuilt_by_the_command_as_often_as_it_is_typed(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "postgres", tmp_path / "postgres.log") as server:
        migrate_blocking(server.url)
        tables = run_sql(server.url, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename")
        for _ in range(2):
            done = run_command("cua_rl.rebuild_database", "--yes", DATABASE_URL=server.url)

            assert done.returncode == 0, done.stderr
            assert f"created {len(tables) - 1} empty ones" in done.stdout  # beside Alembic's own
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
            assert run_sql(server.url, query) == tables


@pytest.mark.parametrize("module", ["columns", "models", "session", "recorder", "migrations"])
def test_whoever_imports_a_part_of_the_database_has_every_table(module: str) -> None:
    program = f"import cua_rl.database.{module}, cua_rl.database.models as m; print(*sorted(m.Base.metadata.tables))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    assert {"turns", "judgements", "judge_prompts", "rollout_overrides"} <= set(done.stdout.split())

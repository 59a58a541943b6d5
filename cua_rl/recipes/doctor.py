"""Check a machine before its first run: `python -m cua_rl.recipes.doctor preset=h100-4b`.

Takes the settings of recipes.train, starts the same model server and trainer, checks that they agree, and measures
memory and speed. Prints a table with what to do, and writes doctor.json, to be attached to bug reports.
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import chz
from rich.console import Console

from cua_rl.command_line.fields import setting, with_presets
from cua_rl.command_line.recipe import run_recipe
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.run.training_config import TRAIN_PRESETS, TRAIN_SECTIONS, CLIConfig, train_presets
from cua_rl.run_folder.log_directory import run_folder
from cua_rl.types.errors import ConfigError, CuaError, boundary


@with_presets(train_presets, explain_field, accept_value)
@chz.chz
class DoctorConfig(CLIConfig):
    """Check this machine for a training run with these settings."""

    json: Path | None = setting(None, "file for the findings; None is doctor.json in the doctor's folder")


async def cli_main(config: DoctorConfig) -> None:
    """Make the checks, show and write what they found; raises `CuaError` if one failed."""
    from cua_rl.doctor.doctor import about, run_doctor
    from cua_rl.reporting.diagnosis import Diagnosis  # after the command line is parsed: see recipes/train.py

    if config.dry_run:
        raise ConfigError(
            "dry_run: expected false, as the doctor measures this machine, got true; estimate without it: "
            "python -m cua_rl.recipes.train dry_run=true"
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    started = datetime.now(UTC)
    folder = run_folder(config.log_path, config.log_dir, f"doctor-{started:%Y%m%d-%H%M%S}")
    path = config.json or folder / "doctor.json"
    with boundary(
        ConfigError, f"log_path, json: expected places to write to, got {str(folder)!r}, {str(path)!r}; change them"
    ):
        for needed in (folder / "logs", path.parent):
            needed.mkdir(parents=True, exist_ok=True)
    diagnosis = Diagnosis(folder)
    try:
        await run_doctor(config, diagnosis, say)
    finally:
        diagnosis.show(Console())
        diagnosis.write(path, {"started": started.isoformat(), **about(config, diagnosis)})
        print(f"for a bug report: {path}")
    if diagnosis.failed():
        raise CuaError(f"expected no check to fail, got {', '.join(diagnosis.failed())}; do what the table says")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(DoctorConfig, cli_main, argv, TRAIN_PRESETS, TRAIN_SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

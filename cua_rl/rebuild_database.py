"""`python -m cua_rl.rebuild_database`: drop our tables and create them again. Asks before it destroys data."""
# ruff: noqa: T201 - it talks to a person

import argparse
import asyncio
import os
import sys

from sqlalchemy import func, inspect, select, text

from cua_rl.database.migrations import migrate_blocking
from cua_rl.database.models import Base
from cua_rl.database.session import check_connection, database_url, make_writer_engine, shown_url
from cua_rl.host.environment_file import with_environment_file
from cua_rl.host.masking import mask_known
from cua_rl.types.errors import ConfigError, CuaError, DatabaseError, boundary

_SHOWN_TABLES = ("trainings", "steps", "rollouts", "turns", "screenshots")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cua_rl.rebuild_database", description="drop our tables and create them again"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(arguments)
    try:
        url = database_url(with_environment_file(os.environ))
        if url is None:
            raise ConfigError(
                "expected a database in DATABASE_URL (or POSTGRES_HOST, POSTGRES_DB, POSTGRES_USER, "
                "POSTGRES_PASSWORD), got none; set it. An embedded database is rebuilt by deleting its folder while no "
                "run uses it."
            )
        asyncio.run(check_connection(url))
        engine = make_writer_engine(url)
        try:
            with engine.connect() as connection:
                present = set(inspect(connection).get_table_names())
                tables = [Base.metadata.tables[name] for name in _SHOWN_TABLES if name in present]
                counts = {
                    table.name: connection.scalars(select(func.count()).select_from(table)).one() for table in tables
                }
            print(f"Database {shown_url(url)}")
            print("Rows that will be deleted: " + (", ".join(f"{n} {name}" for name, n in counts.items()) or "none"))
            if not options.yes:
                if not sys.stdin.isatty():
                    raise ConfigError("expected a terminal to ask before deleting, got none; add --yes if you are sure")
                if input("Delete them all? Type yes: ").strip() != "yes":
                    print("Nothing was changed.")
                    return 1
            # only our tables and Alembic's mark: the database may hold those of other programs
            with (
                boundary(DatabaseError, "cannot drop the tables (does a run still use them?)"),
                engine.begin() as owner,
            ):
                owner.execute(text("SET LOCAL lock_timeout = '5s'"))
                Base.metadata.drop_all(owner)
                owner.execute(text("DROP TABLE IF EXISTS alembic_version"))
        finally:
            engine.dispose()
        migrate_blocking(url)
        print(f"Dropped the old tables and created {len(Base.metadata.tables)} empty ones.")
        return 0
    except ConfigError as error:
        print(mask_known(str(error)), file=sys.stderr)
        return 2
    except CuaError as error:
        print(mask_known(str(error)), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

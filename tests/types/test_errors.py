import asyncio

from cua_rl.types.errors import DatabaseError, first_error


async def test_an_error_of_tasks_side_by_side_is_the_one_that_says_something() -> None:
    lost = DatabaseError("the database is away")

    async def fail() -> None:
        raise lost

    async def run_group() -> None:
        async with asyncio.TaskGroup() as members:
            members.create_task(fail())

    async def run_step() -> None:
        async with asyncio.TaskGroup() as groups:
            groups.create_task(run_group())

    (ended,) = await asyncio.gather(run_step(), return_exceptions=True)

    assert isinstance(ended, ExceptionGroup)
    assert first_error(ended) is lost
    assert first_error(lost) is lost

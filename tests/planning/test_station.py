"""Times worked out by hand, in virtual time."""

import asyncio

import pytest

from cua_rl.planning.station import Station
from cua_rl.planning.virtual_time import run_in_virtual_time


def ends(*arrivals: tuple[Station, float, float]) -> list[float]:
    """When each request ends: at which station, when it arrives, its units."""

    async def ask(station: Station, at_s: float, units: float) -> float:
        await asyncio.sleep(at_s)
        await station.work(units)
        return asyncio.get_running_loop().time()

    async def ask_all() -> list[float]:
        return list(await asyncio.gather(*(ask(*arrival) for arrival in arrivals)))

    return [pytest.approx(end, abs=1e-4) for end in run_in_virtual_time(ask_all())]


def test_a_request_alone_takes_its_units() -> None:
    assert ends((Station(alone_s=2.0, each_s=1.0), 0.0, 3.0)) == [9.0]


def test_requests_slow_each_other_while_they_are_together() -> None:
    station = Station(alone_s=0.0, each_s=1.0)

    # from 0 to 1 alone, half done; together both take 2 s a unit, so the first ends at 3; the second then has half left
    assert ends((station, 0.0, 2.0), (station, 1.0, 1.5)) == [3.0, 3.5]
    assert station.busy_s == pytest.approx(3.5)


def test_what_does_not_fit_waits() -> None:
    station = Station(alone_s=1.0, each_s=0.0, capacity=1)

    assert ends((station, 0.0, 1.0), (station, 0.0, 1.0), (station, 0.5, 1.0)) == [1.0, 2.0, 3.0]


def test_neighbours_halve_each_other_while_both_are_busy() -> None:
    server, trainer = Station(alone_s=1.0, each_s=0.0), Station(alone_s=1.0, each_s=0.0)
    server.neighbours, trainer.neighbours = [trainer], [server]

    # the trainer works alone for 1 s, then both at half speed: the server's 1 unit takes until 3, the trainer's last
    # unit of three is alone again
    assert ends((trainer, 0.0, 3.0), (server, 1.0, 1.0)) == [4.0, 3.0]


def test_a_request_without_work_ends_at_once() -> None:
    assert ends((Station(alone_s=1.0, each_s=0.0), 1.0, 0.0)) == [1.0]

"""What a trainer asks of the nodes of a cluster, and what it makes of their ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cua_rl.cluster import Actor, ActorLost, Cluster, ClusterLost, Node
from cua_rl.run.trainer_nodes import ClusterTrainer, find_room
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import TrainerDeathError


def _nodes(*num_gpus: float) -> list[Node]:
    return [
        Node(node_id=str(index), address="10.0.0.1", num_cpus=8.0, num_gpus=num) for index, num in enumerate(num_gpus)
    ]


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "num_processes", "room"),
    [
        ((0.0, 8.0, 8.0), 2, None, {"GPU": 8}),
        ((0.0, 8.0, 4.0, 8.0), 2, None, {"GPU": 8}),
        ((0.0, 8.0, 4.0, 8.0), 3, None, {"GPU": 4}),
        ((0.0, 8.0, 8.0), 2, 3, {"GPU": 3}),
        ((0.0, 8.0), 2, None, {"GPU": 8}),  # the second node is not there yet
        ((0.0, 0.0), 2, None, {"CPU": 1}),
        ((0.0, 0.0), 2, 2, {"CPU": 2}),
        ((), 1, None, {"CPU": 1}),
    ],
)
def test_each_node_gives_as_many_gpus_as_all_chosen_ones_have(
    gpus: tuple[float, ...], num_nodes: int, num_processes: int | None, room: dict[str, float]
) -> None:
    assert find_room(_nodes(*gpus), num_nodes, num_processes) == room


class FakeNode(Actor):
    """A node that answers `ask` once told to, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[object, ...]]] = []
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def call(self, method: str, *arguments: object) -> Any:
        self.told.append((method, arguments))
        match method:
            case "free_address":
                return "10.0.0.1:29500"
            case "start":
                return "somewhere"
            case "ask":
                return await asyncio.shield(self.answer)
            case "ended":
                return await asyncio.shield(self.death)
            case _:
                return None


class FakeCluster(Cluster):
    """A cluster of nodes with four GPUs each."""

    def __init__(self) -> None:
        self.started: list[FakeNode] = []
        self.reserved: list[Sequence[Mapping[str, float]]] = []
        self.num_released = 0

    def nodes(self) -> list[Node]:
        return _nodes(4.0, 4.0)

    @asynccontextmanager
    async def placed(
        self, kind: Callable[[], object], rooms: Sequence[Mapping[str, float]], timeout_s: float
    ) -> AsyncGenerator[list[FakeNode]]:
        self.reserved.append(rooms)
        nodes = [FakeNode() for _ in rooms]
        self.started += nodes
        yield nodes
        self.num_released += 1

    async def put(self, payload: bytes) -> object:
        return payload


def _trainer(cluster: FakeCluster, tmp_path: Path) -> ClusterTrainer:
    return ClusterTrainer(TrainerConfig(num_nodes=2), None, tmp_path / "logs" / "trainer.log", cluster)


async def test_the_ranks_of_all_nodes_meet_at_the_first_one_with_a_secret_of_each_start(tmp_path: Path) -> None:
    cluster = FakeCluster()
    trainer = _trainer(cluster, tmp_path)
    for _ in range(2):
        await trainer.open()
        await trainer.close()

    assert cluster.reserved == [[{"GPU": 4}, {"GPU": 4}]] * 2
    assert cluster.num_released == 2
    starts = [dict(node.told)["start"] for node in cluster.started]
    variables: list[Any] = [arguments[-1] for arguments in starts]
    assert [each["NODE_RANK"] for each in variables] == ["0", "1", "0", "1"]
    assert {each["NUM_NODES"] for each in variables} == {"2"}
    assert {each["CUA_RL_MEETING"] for each in variables} == {"10.0.0.1:29500"}
    secrets = [each["CUA_RL_MEETING_TOKEN"] for each in variables]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert len(secrets[0]) == 64
    assert [Path(str(arguments[3])).name for arguments in starts[:2]] == ["trainer-1.log", "trainer-2.log"]


async def test_a_request_ends_with_the_ranks_of_any_node_and_with_the_loss_of_any_actor(tmp_path: Path) -> None:
    cluster = FakeCluster()
    trainer = _trainer(cluster, tmp_path)
    for which, error in ((1, TrainerDeathError("its log ended")), (0, ActorLost("the node died"))):
        await trainer.open()
        first, other = cluster.started[-2:]
        asking = asyncio.create_task(trainer.ask(b"request"))
        first.answer.set_result(b"answer")
        assert await asking == b"answer"
        first.answer = asyncio.get_running_loop().create_future()
        asking = asyncio.create_task(trainer.ask(b"request"))
        await asyncio.sleep(0)
        (first, other)[which].death.set_exception(error)
        with pytest.raises(TrainerDeathError, match=str(error)):
            await asking
        await trainer.close()


async def test_a_trainer_is_not_started_again_once_the_cluster_is_out_of_reach(tmp_path: Path) -> None:
    cluster = FakeCluster()
    trainer = _trainer(cluster, tmp_path)
    await trainer.open()
    asking = asyncio.create_task(trainer.ask(b"request"))
    await asyncio.sleep(0)
    cluster.started[1].death.set_exception(ClusterLost("this machine's node has ended"))
    with pytest.raises(ClusterLost):
        await asking
    await trainer.close()

"""What a trainer asks of the nodes of a cluster."""

import pytest

from cua_rl.cluster import Node
from cua_rl.run.trainer_nodes import find_room


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

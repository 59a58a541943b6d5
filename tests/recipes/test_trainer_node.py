"""What a trainer node refuses before it starts anything."""

import pytest

from cua_rl.recipes.trainer_node import main
from cua_rl.training.link import TOKEN_VARIABLE

NODE = ["listen=10.0.0.1:29400"]
NODES = [*NODE, "num_nodes=2", "rendezvous=10.0.0.1:29500", "interface=eth1"]
TOKEN = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("arguments", "token", "complaint"),
    [
        (NODE, "", "CUA_RL_TRAINER_TOKEN: expected at least 32 random characters"),
        (NODE, TOKEN[1:], "got 31"),
        (["listen=0.0.0.0:29400"], TOKEN, "listen: expected the IP address of one interface"),
        (["listen=[::]:29400"], TOKEN, "listen: expected the IP address of one interface"),
        ([*NODE, "num_nodes=2", "interface=eth1"], TOKEN, "rendezvous: expected it with several nodes only"),
        ([*NODE, "num_nodes=2", "rendezvous=10.0.0.1:29500"], TOKEN, "interface: expected it with several nodes only"),
        ([*NODE, "interface=eth1"], TOKEN, "interface: expected it with several nodes only got num_nodes=1"),
        ([*NODES, "node_rank=2"], TOKEN, "node_rank: expected less than num_nodes=2"),
        ([*NODES, "rendezvous=*:29500"], TOKEN, "rendezvous: expected the IP address of one interface"),
        ([*NODES, "rendezvous=10.0.0.1:29400"], TOKEN, "rendezvous: expected another port than listen"),
    ],
)
def test_a_node_that_would_let_anybody_in_does_not_start(
    arguments: list[str],
    token: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)

    assert main(arguments) == 2

    assert complaint in " ".join(capsys.readouterr().err.split())

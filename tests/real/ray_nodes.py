"""Nodes of a Ray cluster as a user starts them, but for what takes processor time and serves nobody here."""

import sys
from collections.abc import Mapping

NODE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_worker_niceness": "0",  # or what runs there waits for all other tests
    "RAY_START_HOOK": "cua_rl.cluster.shape_node",
}


def head_command(address: str, port: int) -> list[str]:
    """Starts the first node, which serves at this address."""
    return _start(
        "--head", f"--port={port}", f"--node-ip-address={address}", "--no-monitor", "--include-dashboard=false"
    )


def node_command(address: str, head: str) -> list[str]:
    """Starts another node at this address."""
    return _start(f"--address={head}", f"--node-ip-address={address}")


def _start(*words: str) -> list[str]:
    sizes = ("--num-cpus=2", "--object-store-memory=100000000", "--include-log-monitor=false")
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *sizes, *words]

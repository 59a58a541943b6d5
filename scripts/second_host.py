"""Another host for checks between machines: a network namespace of this one, with a cable to it."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_OUR_ADDRESS, _THEIR_ADDRESS = "10.213.79.1", "10.213.79.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondHost:
    """A host that reaches this one, and nothing else."""

    our_address: str
    """Address of this machine, as the other one sees it."""
    interface: str
    """Interface of this machine, at the end of the cable."""
    prefix: list[str]
    """What a command begins with to run there."""


@contextmanager
def second_host(name: str) -> Generator[SecondHost]:
    """A namespace `name` while the block runs; needs root."""
    if Path(f"/run/netns/{name}").exists():  # of a check that was killed
        _ip("netns", "del", name)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", "cua_ours", "type", "veth", "peer", "name", "cua_theirs", "netns", name)
        _ip("addr", "add", f"{_OUR_ADDRESS}/30", "dev", "cua_ours")
        _ip("link", "set", "cua_ours", "up")
        _ip("-n", name, "addr", "add", f"{_THEIR_ADDRESS}/30", "dev", "cua_theirs")
        _ip("-n", name, "link", "set", "cua_theirs", "up")
        yield SecondHost(our_address=_OUR_ADDRESS, interface="cua_ours", prefix=["ip", "netns", "exec", name])
    finally:
        _ip("netns", "del", name)  # takes both ends of the cable with it


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False)
    if done.returncode:
        raise SystemExit(f"expected `ip {' '.join(arguments)}` to work, it ended with status {done.returncode}")

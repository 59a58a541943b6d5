"""Attacks on browser and desktops."""

import os
import socket
from contextlib import suppress
from functools import partial
from socket import AF_INET

import psutil

from cua_rl.host.processes import is_loopback
from scripts.red_team.findings import Finding, Findings, Targets, canaries_of, check, check_all, skipped
from scripts.red_team.floods import Cost, small_cost
from scripts.red_team.targets import command_line, listeners
from scripts.red_team.users import STRANGER_UID, as_user


def attack_browser(targets: Targets) -> Findings:
    """Row 2: DevTools without authentication, no sandbox as root, secrets in the browser's environment."""
    if targets.devices is None:
        yield skipped(2, "DevTools of Chromium", "no browser could be started")
        return
    below = psutil.Process(targets.devices.process.pid).children(recursive=True)
    browsers = [
        process for process in below if "chrom" in process.name() and "process_guard" not in command_line(process)
    ]
    ports = sorted({port for _, port, _ in listeners(browsers)})
    yield check_all(2, "TCP ports of Chromium", browsers, ports)
    yield check_all(2, "Chromium as root", browsers, [each.pid for each in browsers if each.uids().real == 0])
    found = {canary for process in below for canary in canaries_of(process)}
    yield check_all(2, "canaries in the environment of browser, its driver and desktops", below, found)


def attack_files(targets: Targets) -> Findings:
    """Row 8: FIFOs, endless and sparse files on a desktop, read by its validator."""
    devices = targets.devices
    if devices is None:
        yield skipped(8, "files of a desktop", "no desktop could be started")
        return
    devices.tell(number=0, shell="mkfifo pipe; ln -s /dev/zero zero; truncate -s 1G sparse; echo mine > note")
    before = devices.tell(number=1, query="files")["peak_bytes"]
    for name, times in (("sparse", 1), ("zero", 1), ("pipe", 40)):  # what takes every thread comes last
        told = devices.tell(number=0, query=f"file:{name}", times=times)
        other = devices.tell(number=1, query="files")["seconds"]
        cost, before = Cost(wait_s=other, growth_bytes=told["peak_bytes"] - before), told["peak_bytes"]
        got = f"{told['seconds']:.1f} s, {told['text'][:30]!r}; {cost}"
        is_held = told["seconds"] < 10 and cost.is_small()
        yield check(8, f"{times} reads of {name}", f"< 10 s; {small_cost()}", got, is_held)


def attack_other_desktop(targets: Targets) -> Findings:
    """Row 9: one desktop writes another one's files, and draws on its screen."""
    devices = targets.devices
    if devices is None:
        yield skipped(9, "another desktop", "no desktop could be started")
        return
    _, other = devices.facts["desktops"]
    devices.tell(number=1, shell="echo right > answer.txt")
    devices.tell(number=0, shell=f"echo wrong > {other['home']}/answer.txt; ls {other['home']}")
    text = devices.tell(number=1, query="file:answer.txt")["text"]
    if os.geteuid() != 0 and text.strip() != "right":
        yield skipped(
            9, "a desktop overwrites another one's file", "needs root: without it and namespaces, desktops share a user"
        )
    else:
        yield check(9, "a desktop overwrites another one's file", "right", text, text.strip() == "right")
    look = "echo looked; cat /proc/[0-9]*/environ 2>/dev/null | grep -ao 'canary-[a-z0-9-]*'; true"
    spied = devices.tell(number=0, shell=look)
    looked, *found = spied["text"].split()
    found = {word for word in found if word.startswith("canary-")}
    is_held = looked == "looked" and not found
    yield check(9, "canaries in the processes that a desktop sees", "none", found or looked, is_held)
    answer = _open_display(other["display"])
    yield check(9, "an X display without its cookie", "refused", answer, answer != "opened")


def attack_site(targets: Targets) -> Findings:
    """Row 19: another user finishes the task of a rollout by asking its site directly."""
    attack = "another user asks the site of a rollout"
    if targets.devices is None:
        yield skipped(19, attack, "no site could be started")
        return
    port, has_own_network = int(targets.devices.facts["site_port"]), targets.devices.facts["has_own_network"]

    def ask(host: str) -> str:
        with socket.socket() as connection:
            connection.settimeout(10)
            connection.connect((host, port))  # `create_connection` would import what a stranger may not read
            connection.sendall(b"GET /api/state HTTP/1.0\r\n\r\n")
            return connection.recv(100).decode() or "hung up"

    uid = STRANGER_UID if os.geteuid() == 0 else os.geteuid()
    said = as_user(uid, lambda: ask("127.0.0.1"))
    if has_own_network:
        yield check(19, attack, "refused", said, "ConnectionRefusedError" in said)
    else:
        yield Finding(row=19, attack=attack, expected="", got=f"no namespaces: {said[:50]}", verdict="not promised")
    addresses = [each.address for some in psutil.net_if_addrs().values() for each in some if each.family == AF_INET]
    others = ["127.0.0.2", *(address for address in addresses if not is_loopback(address))]
    reached = [host for host in others if "ConnectionRefusedError" not in as_user(uid, partial(ask, host))]
    yield check(19, "sites that other machines reach", "none", reached or "none", not reached)


def _open_display(display: str) -> str:
    """What an X server says to a client without authorization: 1 is success (X protocol, connection setup)."""
    path = f"/tmp/.X11-unix/X{display.removeprefix(':')}"
    for address in (path, f"\0{path}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(address)
            client.sendall(b"l\0\x0b\0\0\0\0\0\0\0\0\0")
            return "opened" if client.recv(1) == b"\x01" else "refused"
    return "no socket that can be reached"

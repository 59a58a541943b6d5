"""Send a run to a monitor that is killed in the middle, and compare what arrived with what was recorded.

    python -m scripts.check_ingest_outage [--outage-s 60] [--steps 12] [--turn-s 0.5]

The monitor is a server process over a real Postgres. The run is another process in a network namespace of its own (as
root; on plain loopback otherwise), which records made-up rollouts into its own database and sends them on. When the
first steps have arrived the monitor is killed with SIGKILL, and started again after the outage. Ends with status 1
unless every row arrived once: both databases must give the same answers.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import psycopg

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import make_writer_engine
from cua_rl.events import RolloutSource, TrainingEnded
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.monitor.projects import create_project
from cua_rl.monitor.sender import MonitorAddress, SendingRecorder
from cua_rl.renderers.renderer import make_renderer
from scripts.monitor_process import monitor_process, scratch_postgres
from scripts.random_taps import RandomTaps
from scripts.second_host import second_host
from scripts.seed_monitor import MODEL, begin, run_source, train

SAME = {
    "trainings": "SELECT run_name, status, total_steps, num_completed_steps FROM trainings",
    "steps": "SELECT step, status, policy_version, trained_policy_version, num_datums, datums_sha256, trained_on,"
    " adapter_sha256 FROM steps ORDER BY 1",
    "groups": "SELECT group_id, group_index, status, num_rollouts, num_faulty, num_successes, reward_mean"
    " FROM groups ORDER BY 1",
    "rollouts": "SELECT rollout_id, task_id, seed, member_index, status, num_turns, stop_reason, success, reward,"
    " advantage, answer, error, started_at, ended_at, duration_s, max_turns, parent_id, fork_turn, worker,"
    " turn_advantages, turn_rewards, num_prompt_tokens, num_cached_tokens, num_sampled_tokens, num_trained_tokens,"
    " max_gap, min_logprob FROM rollouts ORDER BY 1",
    "turns": "SELECT r.rollout_id, turn_index, response_id, prompt_token_ids, prompt_chunks::text, sampled_tokens,"
    " sampling_logprobs, training_logprobs, policy_version, stop, text, failure_kind, t.request::text, t.action::text,"
    " before_sha256, after_sha256, t.duration_s, grammar, state, action_error, cached_tokens"
    " FROM turns t JOIN rollouts r ON r.id = t.rollout_pk ORDER BY 1, 2",
    "validations": "SELECT r.rollout_id, query, expected, actual, v.success FROM validations v"
    " JOIN rollouts r ON r.id = v.rollout_pk ORDER BY 1",
    "judgements": "SELECT r.rollout_id, j.prompt_sha256, p.text, model, decides, j.success, agreement, votes::text,"
    " cost_usd, j.duration_s FROM judgements j JOIN rollouts r ON r.id = j.rollout_pk"
    " JOIN judge_prompts p ON p.sha256 = j.prompt_sha256 ORDER BY 1",
    "screenshots": "SELECT sha256, format, md5(data) FROM screenshots ORDER BY 1",
}
"""Questions to which both databases must give the same answers."""


def main() -> int:
    """Run from the command line; `--send-*` is how the script starts its sender."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--outage-s", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turn-s", type=float, default=0.5)
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    parser.add_argument("--send-from", help=argparse.SUPPRESS)
    parser.add_argument("--spool", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    return asyncio.run(_send(given) if given.send_to else _check(given))


async def _send(given: argparse.Namespace) -> int:
    """Record a run and send it to the monitor, until everything has arrived."""
    renderer = make_renderer(MODEL)
    policy = RandomTaps(renderer)
    policy.turn_s = given.turn_s
    address = MonitorAddress(base_url=given.send_to, token=os.environ["MONITOR_PROJECT_TOKEN"])
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(DatabaseRecorder(given.send_from, image_token_id=renderer.image_token_id))
        sender = SendingRecorder(
            own, address, given.spool, image_token_id=renderer.image_token_id, close_timeout_s=120.0
        )
        recorder = await stack.enter_async_context(sender)
        await recorder.record(begin("outage", given.steps))
        for step in range(1, given.steps + 1):
            groups = await run_source(recorder, policy, RolloutSource(phase="step", step=step), num_groups=4, turns=5)
            await train(recorder, policy, step, groups)
        await recorder.record(TrainingEnded(status="completed"))
        await own.flush()
        print(json.dumps({"recorded_at": time.time(), "waiting_bytes": recorder.num_waiting_bytes}), flush=True)
        await recorder.wait_until_sent()
        print(json.dumps({"sent_at": time.time()}), flush=True)
    return 0


async def _check(given: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        own_url, folder = await stack.enter_async_context(scratch_postgres())
        url, _ = await stack.enter_async_context(scratch_postgres())
        prefix, host = stack.enter_context(_network())
        engine = make_writer_engine(url)
        _, token = create_project(engine, "outage")
        engine.dispose()
        port = free_port(host=host)
        first = await stack.enter_async_context(AsyncExitStack())
        monitor = await first.enter_async_context(monitor_process(url, folder, host=host, port=port))
        started = time.monotonic()
        sender = _make_sender(given, prefix, monitor.base_url, own_url, folder, token)
        await stack.enter_async_context(sender)
        while not (num_before := _count(url, "turns")) or _count(url, "steps") < given.steps // 4:
            await asyncio.sleep(0.5)
            _require_running(sender)
        os.kill(monitor.find().pid, signal.SIGKILL)
        await first.aclose()
        killed = time.monotonic()
        print(f"killed the monitor at {killed - started:.0f} s with {num_before} turns stored", flush=True)
        await asyncio.sleep(given.outage_s)
        num_waiting = _count(own_url, "turns") - _count(url, "turns")
        await stack.enter_async_context(monitor_process(url, folder, host=host, port=port))
        away_s = time.monotonic() - killed
        print(f"started it again after {away_s:.0f} s; {num_waiting} turns wait in the queue", flush=True)
        status = await sender.wait()
        print(sender.log_tail().strip())
        return _report(own_url, url, "namespace" if prefix else "loopback", away_s, num_waiting, status)


def _make_sender(
    given: argparse.Namespace, prefix: list[str], base_url: str, own_url: str, folder: Path, token: str
) -> OwnedProcess:
    options = [f"--steps={given.steps}", f"--turn-s={given.turn_s}", f"--send-to={base_url}", f"--send-from={own_url}"]
    command = [*prefix, sys.executable, "-m", "scripts.check_ingest_outage", *options, f"--spool={folder / 'spool'}"]
    environment = os.environ | {"MONITOR_PROJECT_TOKEN": token}
    return OwnedProcess(command, name="sender", log_path=folder / "sender.log", environment=environment)


def _require_running(sender: OwnedProcess) -> None:
    if not sender.is_running:
        raise SystemExit(f"expected the sender to go on, it ended; take more --steps\n{sender.log_tail()}")


def _report(own_url: str, url: str, network: str, away_s: float, num_waiting: int, status: int | None) -> int:
    different = [table for table, query in SAME.items() if _rows(own_url, query) != _rows(url, query)]
    counts = {f"num_{table}": _count(url, table) for table in SAME}
    figure = {"figure": "ingest_outage", "network": network, "outage_s": round(away_s, 1), "turns_queued": num_waiting}
    print(json.dumps(figure | counts | {"tables_that_differ": different, "sender_status": status}), flush=True)
    return 1 if different or status else 0


def _rows(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def _count(url: str, table: str) -> int:
    return int(str(_rows(url, f"SELECT count(*) FROM {table}")[0][0]))


@contextmanager
def _network() -> Generator[tuple[list[str], str]]:
    """The command that enters the sender's own network namespace, and our address as it sees us."""
    if os.geteuid() != 0:
        print("no root, so no network namespace: the sender uses plain loopback", flush=True)
        yield [], "127.0.0.1"
        return
    with second_host("cua_rl_outage") as host:
        yield host.prefix, host.our_address


if __name__ == "__main__":
    sys.exit(main())

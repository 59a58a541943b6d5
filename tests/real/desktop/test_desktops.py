"""Linux desktops with a real X server, a window manager and real programs."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.patience import IdleClock, patience

pytest.importorskip("Xlib", reason="scripts/install_system_packages.sh and `make setup` install what desktops need")

from Xlib.error import DisplayConnectionError

from cua_rl.agent.device_step import perform
from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.desktop.device import LinuxDesktop
from cua_rl.environments.desktop.session import PROGRAMS
from cua_rl.environments.desktop.templates import DESKTOP_TASKS, DesktopTemplate
from cua_rl.environments.desktop.x_screen import XScreen
from cua_rl.environments.device import ActionRejected
from cua_rl.environments.pool import open_pool
from cua_rl.host.sandbox import can_sandbox
from cua_rl.host.scratch import remove_abandoned
from cua_rl.host.system import resident_bytes
from cua_rl.host.users import can_change_user
from cua_rl.types.actions import Click, DoubleClick, Drag, OpenApp, PressKey, RightClick, Scroll, TypeText
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, TaskError, UnusableError

NEEDED = (*PROGRAMS, "mousepad", "pcmanfm", "xterm")
pytestmark = pytest.mark.skipif(
    any(shutil.which(program) is None for program in NEEDED),
    reason=f"needs {', '.join(NEEDED)}: run scripts/install_system_packages.sh",
)


@pytest.fixture
async def backend() -> AsyncIterator[LinuxDesktops]:
    async with LinuxDesktops(width_px=640, height_px=480) as desktops:
        yield desktops


@pytest.fixture
async def desktop(backend: LinuxDesktops) -> AsyncIterator[LinuxDesktop]:
    device = await backend.make(DESKTOP_TASKS[0].make_task(0).device_request())
    assert isinstance(device, LinuxDesktop)
    try:
        yield device
    finally:
        await device.close()


async def eventually(desktop: LinuxDesktop, query: str, expected: str) -> None:
    """Programs save in their own time."""
    async with asyncio.timeout(patience(60)):
        while (await desktop.query(query)).strip() != expected.strip():
            await asyncio.sleep(0.05)


async def different_picture(desktop: LinuxDesktop, before: EncodedImage) -> None:
    """Programs draw in their own time, on a busy machine more so."""
    async with asyncio.timeout(patience(60)):
        while (await desktop.observe()).sha256 == before.sha256:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("template", DESKTOP_TASKS, ids=[template.task_id for template in DESKTOP_TASKS])
async def test_an_untouched_desktop_fails_and_the_expert_succeeds(
    template: DesktopTemplate, backend: LinuxDesktops
) -> None:
    task, instance = template.make_task(7), template.instance(7)
    desktop = await backend.make(task.device_request())
    assert isinstance(desktop, LinuxDesktop)
    try:
        assert task.prepare is not None
        await task.prepare(desktop)
        assert not (await task.validate(desktop, None)).success

        for action in instance.route:
            await desktop.execute(action)
        if instance.query != "answer":
            await eventually(desktop, instance.query, instance.expected)
        answer = instance.expected if instance.query == "answer" else None
        assert (await task.validate(desktop, answer)).success
    finally:
        await desktop.close()


async def test_an_editor_gets_clicks_keys_and_any_character(desktop: LinuxDesktop) -> None:
    await desktop.write_file("note.txt", "")
    await desktop.run_program(["mousepad", "note.txt"], window="note.txt")
    before = await desktop.observe()

    await desktop.execute(Click(x=320, y=240))
    await desktop.execute(TypeText(text="Grüße → naïve Ω 漢\tyes\nSecond LINE"))
    await desktop.execute(PressKey(keys=("ctrl", "s")))

    await eventually(desktop, "file:note.txt", "Grüße → naïve Ω 漢\tyes\nSecond LINE")
    after = await desktop.observe()
    assert (after.width_px, after.height_px) == (640, 480)
    assert after.sha256 != before.sha256


async def test_the_mouse_does_all_that_a_mouse_does(desktop: LinuxDesktop) -> None:
    await desktop.run_program(["xterm", "-T", "Terminal", "-geometry", "80x24+0+0"], window="Terminal")
    for action in (
        RightClick(x=600, y=460),  # the window manager's menu
        PressKey(keys=("esc",)),
        TypeText(text="seq 300\n"),
        Scroll(x=100, y=100, down_px=-500),
        DoubleClick(x=8, y=60),
        Drag(x=8, y=160, to_x=120, to_y=200),
    ):
        before = await desktop.observe()
        await desktop.execute(action)
        await different_picture(desktop, before)


async def test_what_a_desktop_cannot_do_is_told_to_the_model(desktop: LinuxDesktop) -> None:
    with pytest.raises(ActionRejected, match="no key 'hyperspace'"):
        await desktop.execute(PressKey(keys=("hyperspace",)))
    with pytest.raises(ActionRejected, match="mouse and keyboard"):
        await desktop.execute(OpenApp(name="Editor"))


async def test_programs_run_as_an_ordinary_user_without_the_controllers_secrets(
    desktop: LinuxDesktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GBOX_API_KEY", "secret")
    assert "secret" not in await desktop.shell("env")
    assert (await desktop.shell("id -u")).strip() != "0"


async def test_no_menu_or_key_of_the_window_manager_starts_a_program(desktop: LinuxDesktop) -> None:
    for num_downs in range(1, 6):  # with openbox' own settings, the first entry of the menu starts a terminal
        await desktop.execute(RightClick(x=300, y=200))
        for key in (*["down"] * num_downs, "right", "enter", "esc", "esc"):
            await desktop.execute(PressKey(keys=(key,)))
    for keys in (("win", "e"), ("win", "d"), ("ctrl", "alt", "t"), ("menu",)):
        await desktop.execute(PressKey(keys=keys))

    await asyncio.sleep(1.0)  # nothing says that no program is about to start
    programs = (await desktop.shell("ps -o comm= -u $(id -u)")).split()
    assert await desktop.query("window_titles") == ""
    assert not [name for name in programs if "term" in name]


@pytest.mark.skipif(not (can_change_user() or can_sandbox()), reason="neither root nor namespaces")
async def test_a_desktop_reaches_neither_files_nor_display_of_another(backend: LinuxDesktops) -> None:
    request = DESKTOP_TASKS[0].make_task(0).device_request()
    one, other = [desktop for _ in range(2) if isinstance(desktop := await backend.make(request), LinuxDesktop)]
    try:
        await other.write_file("note.txt", "mine")
        for command in (
            f"echo stolen > {other.home}/note.txt",
            f"cat {other.home}/note.txt",
            f"ls {other.home}",
            f"ls {other.home.parent}",
            f"cat {other.authority}",
            f"rm -rf {other.home}",
        ):
            said = await one.shell(f"({command}) 2>/dev/null")
            assert not {"note.txt", "mine"} & set(said.split()), command
        assert "Can't open display" in await one.shell(f"DISPLAY={other.display} xterm -e true 2>&1")
        number = other.display.removeprefix(":")
        if can_change_user():  # of the same user, the cookie alone is in the way
            assert "Permission denied" in await one.shell(f"perl -e '{CONNECT}' /tmp/.X11-unix/X{number} 2>&1")
        assert await other.query("file:note.txt") == "mine"
    finally:
        await asyncio.gather(one.close(), other.close())


CONNECT = "use Socket; socket(S, PF_UNIX, SOCK_STREAM, 0); connect(S, pack_sockaddr_un($ARGV[0])) or die $!"


async def test_a_display_needs_its_cookie(backend: LinuxDesktops) -> None:
    request = DESKTOP_TASKS[0].make_task(0).device_request()
    one, other = [desktop for _ in range(2) if isinstance(desktop := await backend.make(request), LinuxDesktop)]
    try:
        with pytest.raises(DisplayConnectionError, match="Invalid MIT-MAGIC-COOKIE-1 key"):
            XScreen(other.display, one.authority)
        XScreen(other.display, other.authority).close()
    finally:
        await asyncio.gather(one.close(), other.close())


@pytest.mark.skipif(not can_sandbox(), reason="not permitted here: networks of their own")
async def test_a_desktop_has_loopback_and_no_other_network(desktop: LinuxDesktop) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connect = f"bash -c 'echo > /dev/tcp/127.0.0.1/{port}' 2>&1"
        assert "Connection refused" in await desktop.shell(connect)
        listening = await desktop.shell("cat /proc/net/dev")
    assert [line.split(":")[0].strip() for line in listening.splitlines()[2:]] == ["lo"]


async def test_files_that_never_end_delay_nobody_and_take_no_memory(backend: LinuxDesktops) -> None:
    request = DESKTOP_TASKS[0].make_task(0).device_request()
    hostile, other = [desktop for _ in range(2) if isinstance(desktop := await backend.make(request), LinuxDesktop)]
    try:
        await hostile.shell("mkfifo pipe; ln -s /dev/zero zero; truncate -s 10G sparse; ln -s /etc/passwd link")
        await other.write_file("note.txt", "mine")
        before_bytes = resident_bytes()

        names = ["pipe"] * 40 + ["zero", "sparse", "link"]
        async with asyncio.timeout(patience(20)), asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(hostile.query(f"file:{name}")) for name in names]
            printed = tasks.create_task(hostile.shell("cat zero"))
            clock = IdleClock()
            assert await other.query("file:note.txt") == "mine"
            assert clock.look() < 5.0  # a read of ten gigabytes takes longer

        assert {read.result() for read in reads} == {""}
        assert len(printed.result()) == 1 << 20
        assert resident_bytes() - before_bytes < 150_000_000
    finally:
        await asyncio.gather(hostile.close(), other.close())


async def test_a_command_that_prints_forever_ends_although_its_output_is_read_late(
    desktop: LinuxDesktop, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = asyncio.StreamReader.read

    async def read_late(reader: asyncio.StreamReader, max_bytes: int = -1) -> bytes:
        await asyncio.sleep(0.002)
        return await read(reader, max_bytes)

    monkeypatch.setattr(asyncio.StreamReader, "read", read_late)
    async with asyncio.timeout(patience(60)):
        assert len(await desktop.shell("cat /dev/zero")) == 1 << 20


async def test_a_command_can_be_given_up_although_another_program_holds_its_output(desktop: LinuxDesktop) -> None:
    async with asyncio.timeout(patience(60)):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await desktop.shell("setsid sleep 1000 & sleep 1000")
        assert await desktop.shell("echo alive") == "alive\n"


@pytest.mark.skipif(not can_change_user(), reason="not root: it would halt the X servers of others")
async def test_titles_and_lists_of_windows_that_programs_invent_take_no_memory(desktop: LinuxDesktop) -> None:
    program = """
from Xlib import X, Xatom
from Xlib.display import Display
display = Display()
root = display.screen().root
listed, title = display.intern_atom("_NET_CLIENT_LIST"), display.intern_atom("_NET_WM_NAME")
window = root.create_window(0, 0, 1, 1, 0, X.CopyFromParent)
for _ in range(96):  # 24 MB; the server copies the whole title each time
    window.change_property(title, Xatom.STRING, 8, bytes([116]) * 250_000, X.PropModeAppend)
for kind, size, value in ((Xatom.WINDOW, 32, [window.id] * 3), (Xatom.STRING, 8, b"words")):
    root.change_property(listed, kind, size, value)
    display.sync()
    print("done", flush=True)
    input()
"""
    invent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        env={"DISPLAY": desktop.display, "XAUTHORITY": str(desktop.authority)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert invent.stdin is not None
    assert invent.stdout is not None
    await invent.stdout.readline()
    before = resident_bytes()
    assert await desktop.query("window_titles") == "\n".join(["t" * 1000] * 3)
    assert resident_bytes() - before < 20 * 2**20
    invent.stdin.write(b"\n")
    await invent.stdout.readline()
    assert await desktop.query("window_titles") == ""
    invent.kill()
    await invent.wait()


async def test_a_desktop_whose_x_server_was_halted_can_be_closed(desktop: LinuxDesktop) -> None:
    await desktop.shell("pkill -STOP -x -u $(id -u) Xvfb")

    waiting = asyncio.create_task(desktop.query("window_titles"))

    async with asyncio.timeout(patience(60)):
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        await desktop.close()
        with pytest.raises(DeviceError):
            await waiting


@pytest.mark.parametrize(
    "command",
    [
        "pkill -KILL -x -u $(id -u) Xvfb",  # its connections end before its process has
        "pkill -KILL -x -u $(id -u) Xvfb; sleep 0.5",
        "pkill -STOP -x -u $(id -u) Xvfb",
    ],
)
async def test_a_program_that_takes_the_screen_away_ends_the_rollout_and_what_it_wrote_counts(
    desktop: LinuxDesktop, command: str
) -> None:
    await desktop.write_file("note.txt", "tea")
    await desktop.shell(command)
    desktop._screen_timeout_s = 1.0  # a minute is long

    step = await perform(desktop, Click(x=1, y=1))

    assert step.is_last
    assert await desktop.query("file:note.txt") == "tea"
    with pytest.raises(UnusableError):
        await desktop.query("window_titles")


async def test_validators_read_only_the_home_folder(desktop: LinuxDesktop) -> None:
    with pytest.raises(TaskError, match="home folder"):
        await desktop.query("file:../../etc/passwd")
    with pytest.raises(TaskError, match="expected a query"):
        await desktop.query("passwords")


async def test_nothing_of_a_desktop_is_left_for_the_next_lease() -> None:
    request = DESKTOP_TASKS[0].make_task(1).device_request()
    async with open_pool(LinuxDesktops(), max_devices=1) as pool:
        for _ in range(2):
            async with pool.lease(request) as desktop:
                assert isinstance(desktop, LinuxDesktop)
                assert await desktop.query("window_titles") == ""
                assert await desktop.query("files") == ""
                kept = "ls" if can_sandbox() else "true"  # without a sandbox, this is the machine's own folder
                assert "left" not in await desktop.shell(f"{kept} $TMPDIR /tmp")
                await desktop.write_file("note.txt", "")
                await desktop.run_program(["mousepad", "note.txt"], window="note.txt")
                for action in (TypeText(text="tea"), PressKey(keys=("ctrl", "s")), PressKey(keys=("capslock",))):
                    await desktop.execute(action)
                clock = IdleClock()
                while (await desktop.query("file:note.txt")).strip() != "tea" and clock.look() < 5.0:
                    await asyncio.sleep(0.05)
                assert (await desktop.query("file:note.txt")).strip() == "tea"
                if can_sandbox():
                    await desktop.shell("mkdir /tmp/left; touch /tmp/left/over")
                await desktop.shell("touch $TMPDIR/left")
                folder = desktop.home.parent
            assert not folder.exists()


async def test_a_killed_controller_leaves_no_process_and_the_next_one_no_folder(tmp_path: Path) -> None:
    program = tmp_path / "controller.py"
    program.write_text(
        "import asyncio\n"
        "from cua_rl.environments.desktop.desktops import LinuxDesktops\n"
        "from cua_rl.environments.desktop.templates import DESKTOP_TASKS\n"
        "async def main():\n"
        "    async with LinuxDesktops() as backend:\n"
        "        desktop = await backend.make(DESKTOP_TASKS[0].make_task(0).device_request())\n"
        "        print(desktop.home, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    controller = await asyncio.create_subprocess_exec(sys.executable, str(program), stdout=subprocess.PIPE)
    assert controller.stdout is not None
    home = (await controller.stdout.readline()).decode().strip()
    controller.kill()
    await controller.wait()

    async with asyncio.timeout(patience(60)):
        while home in await asyncio.to_thread(_all_environments):
            await asyncio.sleep(0.05)
    async with asyncio.timeout(patience(60)):
        while await asyncio.to_thread(Path(home).exists):  # as long as a guard is at work
            await asyncio.to_thread(remove_abandoned, Path(tempfile.gettempdir()))  # what every process begins with
            await asyncio.sleep(0.1)


def _all_environments() -> str:
    """HOME of every living process that says it, as one text."""
    texts: list[str] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            texts.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)

"""Linux desktops with a real X server, a window manager and real programs."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("Xlib", reason="scripts/install_system_packages.sh and `make setup` install what desktops need")

from cua_rl.actions import Click, DoubleClick, Drag, OpenApp, PressKey, RightClick, Scroll, TypeText
from cua_rl.conversation import EncodedImage
from cua_rl.devices.desktop.device import LinuxDesktop
from cua_rl.devices.desktop.session import PROGRAMS
from cua_rl.devices.device import ActionRejected
from cua_rl.errors import TaskError
from cua_rl.tasks.desktop.desktops import LinuxDesktops
from cua_rl.tasks.desktop.templates import DESKTOP_TASKS, DesktopTemplate

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
    async with asyncio.timeout(60):
        while (await desktop.query(query)).strip() != expected.strip():
            await asyncio.sleep(0.05)


async def different_picture(desktop: LinuxDesktop, before: EncodedImage) -> None:
    """Programs draw in their own time, on a busy machine more so."""
    async with asyncio.timeout(60):
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


async def test_validators_read_only_the_home_folder(desktop: LinuxDesktop) -> None:
    with pytest.raises(TaskError, match="home folder"):
        await desktop.query("file:../../etc/passwd")
    with pytest.raises(TaskError, match="expected a query"):
        await desktop.query("passwords")


async def test_a_reset_desktop_is_as_new(backend: LinuxDesktops, desktop: LinuxDesktop) -> None:
    task = DESKTOP_TASKS[0].make_task(1)
    await desktop.write_file("note.txt", "old")
    await desktop.run_program(["mousepad", "note.txt"], window="note.txt")

    assert await backend.reset(desktop, task.device_request()) is desktop

    assert await desktop.query("window_titles") == ""
    assert await desktop.query("files") == ""


async def test_a_killed_controller_leaves_no_process_and_the_next_one_no_folder(tmp_path: Path) -> None:
    program = tmp_path / "controller.py"
    program.write_text(
        "import asyncio\n"
        "from cua_rl.tasks.desktop.desktops import LinuxDesktops\n"
        "from cua_rl.tasks.desktop.templates import DESKTOP_TASKS\n"
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

    async with asyncio.timeout(60):
        while home in await asyncio.to_thread(_all_environments):
            await asyncio.sleep(0.05)
    async with LinuxDesktops():
        assert not Path(home).exists()


def _all_environments() -> str:
    """HOME of every living process that says it, as one text."""
    texts: list[str] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            texts.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(texts)

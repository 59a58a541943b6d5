"""Runs OSWorld's wrapper with the real package desktop-env on a scripted machine, which takes notes of what is typed.

`python osworld_machine.py WRAPPER`
"""

import io
import json
import re
import runpy
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from threading import Thread
from typing import Any

from PIL import Image


class Machine(BaseHTTPRequestHandler):
    """What OSWorld's server inside a virtual machine answers, as far as the task needs it."""

    note = ""

    def do_GET(self) -> None:
        file = io.BytesIO()
        Image.new("RGB", (160, 96), "white").save(file, "PNG")
        self.answer(file.getvalue(), "image/png")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        typed = re.search(r"typewrite\('(\w+)'", body)
        Machine.note += typed[1] if typed else ""
        answer = {"status": "success", "returncode": 0, "output": Machine.note, "error": ""}
        self.answer(json.dumps(answer).encode(), "application/json")

    def answer(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Provider:
    """Stands for both the manager and the provider of virtual machines."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get_vm_path(self, **_: Any) -> str:
        return "machine"

    def get_ip_address(self, path: str) -> str:
        return f"127.0.0.1:{self.port}:9222:8006:8080"

    def start_emulator(self, *_: Any) -> None: ...

    def stop_emulator(self, *_: Any) -> None: ...


def provide(*_: object, **__: object) -> tuple[Provider, Provider]:
    provider = Provider(server.server_port)
    return provider, provider


server = ThreadingHTTPServer(("127.0.0.1", 0), Machine)
Thread(target=server.serve_forever, daemon=True).start()
desktop_env: Any = import_module("desktop_env.desktop_env")
desktop_env.create_vm_manager_and_provider = provide
runpy.run_path(sys.argv[1], run_name="__main__")

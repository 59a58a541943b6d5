"""A GBox double on a socket of this process, and what talks to it."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cua_rl.environments.gbox.boxes import GboxBoxes
from cua_rl.environments.gbox.device import Capture
from cua_rl.environments.gbox.service import Gbox, make_gbox
from cua_rl.host.http_server import serve_app
from tests.doubles.gbox_server import KEY, GboxDouble


@dataclass(frozen=True)
class GboxService:
    """The double, and its address."""

    double: GboxDouble
    base_url: str

    def connect(self) -> Gbox:
        return make_gbox(KEY, self.base_url)

    def backend(self, box_type: Any = "android", *, run: str = "a-run", films: Path | None = None) -> GboxBoxes:
        return self.backend_with(box_type=box_type, run_key=run, recordings=films)

    def backend_with(self, **changes: Any) -> GboxBoxes:
        values: dict[str, Any] = {"box_type": "android", "run_key": "a-run", "capture": Capture(settle_s=0.0)}
        return GboxBoxes(connect=self.connect, run_name="run", **values | changes)


@asynccontextmanager
async def serve_gbox(double: GboxDouble | None = None) -> AsyncGenerator[GboxService]:
    """Serve the double on a free port."""
    double = double or GboxDouble()
    async with serve_app(double.app(), "127.0.0.1", 0, grace_s=0) as url:
        yield GboxService(double, f"{url}/api/v1/")

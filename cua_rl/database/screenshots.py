"""The bytes of screenshots: in the database, or as files named by their hash in a folder or an object store.

The variable CUA_RL_SCREENSHOTS names the store: `file:///shared/screenshots`, or a URL of whatever else fsspec has a
driver for (`s3://bucket/folder` with s3fs); keys are in the environment too, as each driver reads them. Writers and
readers need the variable alike. Without it new screenshots go into the database, where all are found that are there.
"""

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Screenshot
from cua_rl.host.masking import mask_text
from cua_rl.renderers.images import image_size
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError, DatabaseError, boundary

STORE_VARIABLE = "CUA_RL_SCREENSHOTS"


SCREENSHOT_BYTES = func.coalesce(Screenshot.size_bytes, func.octet_length(Screenshot.data))
"""The size of a screenshot, wherever its bytes are."""


class StoreError(DatabaseError):
    """The store of screenshots cannot be reached, or lacks one."""


class ScreenshotStore:
    """A folder or an object store; raises `StoreError` for whatever goes wrong there."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` for a URL without a driver."""
        self._url = mask_text(url)
        with boundary(ConfigError, f"{STORE_VARIABLE}: expected the URL of a folder or an object store"):
            from fsspec.core import url_to_fs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

            self._files, self._root = cast("tuple[Any, str]", url_to_fs(url))
        self._is_folder = urlsplit(url).scheme in ("", "file")

    def _paths(self, hashes: Iterable[str]) -> dict[str, str]:
        """The hash that each path belongs to; it may come from a database that somebody else has filled."""
        if wrong := [digest for digest in hashes if not digest.isalnum()]:
            raise StoreError(f"expected hashes as names of screenshots, got {wrong[0][:100]!r}")
        return {f"{self._root}/{digest[:2]}/{digest}": digest for digest in hashes}

    def write(self, images: Mapping[str, bytes]) -> None:
        """Store images by their hashes; one that is there is replaced by the same."""
        with boundary(StoreError, f"cannot write screenshots to {self._url}"):
            files = {path: images[digest] for path, digest in self._paths(images).items()}
            if not self._is_folder:
                self._files.pipe(files)
                return
            for name, data in files.items():
                path = Path(name)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # screenshots are private
                part = path.with_name(f"{path.name}.{os.getpid()}")  # whoever reads finds the whole file or none
                part.write_bytes(data)
                part.replace(path)

    def read(self, hashes: Collection[str]) -> dict[str, bytes]:
        """Images by their hashes."""
        with boundary(StoreError, f"expected these screenshots in {self._url}, cannot read them"):
            paths = self._paths(hashes)
            found = {paths[path]: data for path, data in self._files.cat(list(paths)).items()} if paths else {}
        for digest, data in found.items():
            if sha256(data).hexdigest() != digest:
                raise StoreError(f"expected the screenshot {digest!r} in {self._url}, got other bytes under its name")
        return found

    def remove(self, hashes: Collection[str]) -> None:
        """Remove images, of which some may be gone."""
        paths = list(self._paths(hashes))
        with boundary(StoreError, f"cannot remove screenshots from {self._url}"):
            try:
                if paths:
                    self._files.rm(paths)
            except FileNotFoundError:
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._files.rm([path])

    def check(self) -> None:
        """Write and remove a file."""
        self.write({"check": b""})
        self.remove(["check"])


def open_store(environ: Mapping[str, str] = os.environ) -> ScreenshotStore | None:
    """The store that the environment names, None for the database; raises `ConfigError` if it has no driver."""
    url = environ.get(STORE_VARIABLE)
    return ScreenshotStore(url) if url else None


def require_store() -> ScreenshotStore:
    """The store, for screenshots that are not in the database; raises `StoreError`."""
    store = open_store()
    if store is None:
        raise StoreError(
            f"expected {STORE_VARIABLE} in the environment for screenshots outside of the database, got none; set it "
            "as for the run that recorded them"
        )
    return store


async def load_images(session: AsyncSession, hashes: Collection[str]) -> dict[str, EncodedImage]:
    """Those of these images that were recorded, by their hashes; pruned ones have no `data`."""
    found = (await session.scalars(select(Screenshot).where(Screenshot.sha256.in_(sorted(hashes))))).all()
    outside = [row.sha256 for row in found if row.data is None and row.removed_at is None]
    read = await asyncio.to_thread(lambda: require_store().read(outside)) if outside else {}
    return {row.sha256: _build_image(row, row.data or read.get(row.sha256, b"")) for row in found}


def _build_image(row: Screenshot, data: bytes) -> EncodedImage:
    width_px, height_px = row.width_px, row.height_px
    if data and (width_px is None or height_px is None):  # an earlier version wrote it without its size
        with boundary(DatabaseError, f"reading the size of screenshot {row.sha256!r}"):
            width_px, height_px = image_size(data)
    image_format = "png" if row.format == "png" else "jpeg"
    image = EncodedImage(data=data, format=image_format, width_px=width_px or 0, height_px=height_px or 0)
    return image if data else named_image(image, row.sha256)


def named_image(image: EncodedImage, digest: str) -> EncodedImage:
    """An image without its bytes, which were pruned, under their hash."""
    object.__setattr__(image, "sha256", digest)
    return image

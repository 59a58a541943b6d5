"""The server behind a page, while the page is in use."""

from typing import Protocol, runtime_checkable


class PageSite(Protocol):
    """A server that belongs to one page while the page is in use."""

    @property
    def url(self) -> str:
        """The prefix of all its addresses."""
        ...

    async def answer(self, name: str) -> str:
        """Answer a query about the server, such as its database; raises `TaskError` for an unknown one."""
        ...

    async def release(self, *, is_clean: bool = True) -> None:
        """Called once, when the page is given back; if not `is_clean`, its scripts may still be running."""
        ...


@runtime_checkable
class CopiedSite(PageSite, Protocol):
    """A site whose state can be put into another one."""

    async def snapshot(self) -> bytes | None:
        """Its state, None if it cannot tell it; raises `DeviceError`."""
        ...

    async def restore(self, state: bytes) -> None:
        """Put the state of another one in its place; raises `DeviceError` if it then has another state."""
        ...

"""A method call as its handler sees it: who called, and the descriptors that came with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostd.bus import library
from hostd.bus.stream import close_all
from hostd.errors import InvalidArgs

if TYPE_CHECKING:
    from hostd.bus.library import Message


class Call:
    """Owns the descriptors of a call until a handler takes them over; what is left is closed with it."""

    def __init__(self, message: Message, fds: list[int]) -> None:
        self.message = message
        self._fds: list[int | None] = list(fds)

    @property
    def sender(self) -> str:
        """The caller's unique name, which the bus vouches for."""
        return self.message.sender

    @property
    def path(self) -> str:
        """The object that was called."""
        return self.message.path

    @property
    def interactive(self) -> bool:
        """The caller can wait for a person to authenticate."""
        return bool(self.message.flags & library.ALLOW_INTERACTIVE_AUTHORIZATION)

    def take_fd(self, index: int) -> int:
        """The descriptor that a handle in the body stands for; the caller of this closes it.

        Raises InvalidArgs where none came with the message, or it is taken already.
        """
        # A handle is a number that the sender wrote: it may say anything.
        fd = self._fds[index] if 0 <= index < len(self._fds) else None
        if fd is None:
            raise InvalidArgs(
                f"handle {index} has no descriptor: {len(self._fds)} came with the message, each to be used once"
            )
        self._fds[index] = None
        return fd

    def close(self) -> None:
        """Closes every descriptor that nobody took over."""
        left = [fd for fd in self._fds if fd is not None]
        self._fds = []
        close_all(left)

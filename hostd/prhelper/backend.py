"""What the supervisor asks of those who run the helper: systemd, or hostd itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hostd.linux.pidfd import Process
    from hostd.prhelper.path import Inode


@dataclass(frozen=True, slots=True)
class End:
    """How a helper ended, in words. `killed`: by somebody's SIGKILL, or unknown: that says nothing of the next one.
    `again`: the next one was started already, and ended likewise."""

    words: str
    killed: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What runs. The process belongs to the back end."""

    listening: bool = False
    #: Where our listener's file was made; None without one.
    inode: Inode | None = None
    process: Process | None = None
    #: Helpers that only finish with their clients.
    retired: tuple[int, ...] = ()
    #: The program that is (or would be) run, and its capabilities as a bit set.
    program: bytes = b""
    capabilities: int = 0

    @property
    def pid(self) -> int:
        """The helper's; 0 where none runs."""
        return self.process.pid if self.process is not None else 0


class Backend(Protocol):
    """Runs one helper on one listener. Calls its `changed` when a helper of its died.

    All methods may raise OSError, and HelperFailed that says what to do; then what was done of it is found by looking.
    """

    name: str

    async def find(self) -> Found:
        """What runs now."""
        ...

    def take_ends(self) -> list[End]:
        """How helpers ended since the last call, those that were told to stop not among them."""
        ...

    async def start(self) -> None:
        """A listener at the path, unless ours is there still, and a helper on it. The path is free or ours."""
        ...

    def end(self, why: str = "") -> None:
        """Ends the helper, to be replaced on the same listener: asks it, or kills it where `why` says what is wrong.

        Returns at once; `why` is what `take_ends` tells then.
        """
        ...

    async def retire(self) -> None:
        """Closes the listener; the helper stays for the clients it has, and goes with the last one."""
        ...

    async def stop(self) -> None:
        """Closes the listener and ends every helper; our socket is removed."""
        ...

    def detach(self) -> None:
        """Lets go of everything and leaves all as it runs: hostd ends."""
        ...

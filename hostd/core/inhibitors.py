"""Inhibitors: somebody wants clean-up to wait, for as long as a file descriptor stays open.

As logind does it: the client gets one end of a FIFO, and the kernel tells of its end, however it comes. The FIFO and a
note of who and why lie in the runtime directory, so they survive a restart of hostd: opening the FIFO again shows at
once whether a writer is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostd.core.model import Inhibitor
from hostd.errors import LimitExceeded
from hostd.linux import small_file
from hostd.linux.clock import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

#: Inhibitors at one time: each costs hostd a descriptor and whoever took it another.
MOST = 1024
_NOTE = ".json"
#: Of a note, in bytes: who and why have 1,024 each, which JSON may write in six times as many.
_LARGEST = 1 << 16


@dataclass(slots=True)
class _Taken:
    inhibitor: Inhibitor
    fd: int


class Inhibitors:
    """All inhibitors of one hostd. `ended` is called with each that has been let go."""

    def __init__(self, runtime_dir: str, ended: Callable[[Inhibitor], None]) -> None:
        self.directory = os.path.join(runtime_dir, "inhibit")
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._taken: dict[str, _Taken] = {}
        #: By pod, "" for all; asked at each look at a VM.
        self._on: dict[str, list[Inhibitor]] = {}
        self._ended = ended

    def of(self, pod_uid: str) -> list[Inhibitor]:
        """Those that hold this VM, the ones for all VMs among them."""
        return [inhibitor for each in dict.fromkeys(("", pod_uid)) for inhibitor in self._on.get(each, ())]

    def take(self, pod_uid: str, who: str, why: str) -> int:
        """The writing end for the client; its last copy's closing ends the inhibitor. Raises LimitExceeded, OSError."""
        if len(self._taken) >= MOST:
            raise LimitExceeded(f"{MOST} inhibitors are taken already: let one go first")
        name = secrets.token_hex(8)
        note = {"boot": boot_id(), "pod_uid": pod_uid, "who": who, "why": why}
        os.mkfifo(name, 0o600, dir_fd=self._fd)
        try:
            small_file.replace(self._fd, name + _NOTE, json.dumps(note).encode())
            reader = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            self._remove_files(name)
            raise
        try:
            writer = os.open(name, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            os.close(reader)
            self._remove_files(name)
            raise
        self._keep(name, Inhibitor(pod_uid, who, why), reader)
        return writer

    def restore(self) -> list[str]:
        """Takes up what an earlier hostd left, and says in words what could not be used."""
        complaints: list[str] = []
        for entry in sorted(os.listdir(self._fd)):
            if entry.endswith(_NOTE) or entry.startswith("."):
                continue
            try:
                self._restore_one(entry)
            except (OSError, ValueError, RecursionError) as error:
                self._remove_files(entry)
                complaints.append(f"inhibitor {entry} cannot be taken up and is dropped: {error}")
        self._drop_notes_without_fifo()
        return complaints

    def _restore_one(self, name: str) -> None:
        inhibitor = _inhibitor(json.loads(small_file.read(name + _NOTE, _LARGEST, self._fd)))
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError("it is no FIFO")
        self._keep(name, inhibitor, fd)
        if self._let_go(fd):
            self._end(name)

    def close(self) -> None:
        """Stops watching; the files stay for the next hostd."""
        for taken in self._taken.values():
            asyncio.get_running_loop().remove_reader(taken.fd)
            os.close(taken.fd)
        self._taken.clear()
        self._on.clear()
        os.close(self._fd)

    def _keep(self, name: str, inhibitor: Inhibitor, fd: int) -> None:
        self._taken[name] = _Taken(inhibitor, fd)
        self._on.setdefault(inhibitor.pod_uid, []).append(inhibitor)
        asyncio.get_running_loop().add_reader(fd, self._on_readable, name)

    def _on_readable(self, name: str) -> None:
        if self._let_go(self._taken[name].fd):
            self._end(name)

    @staticmethod
    def _let_go(fd: int) -> bool:
        """Whether no writer is left. What a client writes into its handle means nothing and is thrown away."""
        try:
            return os.read(fd, 4096) == b""
        except BlockingIOError:
            return False

    def _end(self, name: str) -> None:
        taken = self._taken.pop(name)
        self._on[taken.inhibitor.pod_uid].remove(taken.inhibitor)
        if not self._on[taken.inhibitor.pod_uid]:
            del self._on[taken.inhibitor.pod_uid]
        asyncio.get_running_loop().remove_reader(taken.fd)
        os.close(taken.fd)
        self._remove_files(name)
        self._ended(taken.inhibitor)

    def _remove_files(self, name: str) -> None:
        for file in (name, name + _NOTE):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(file, dir_fd=self._fd)

    def _drop_notes_without_fifo(self) -> None:
        for entry in os.listdir(self._fd):
            if entry.removesuffix(_NOTE) not in self._taken:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(entry, dir_fd=self._fd)


def _inhibitor(note: object) -> Inhibitor:
    """What a note says. Raises ValueError."""
    match note:
        case {"boot": boot} if boot != boot_id():
            raise ValueError("it is of another boot")
        case {"boot": _, "pod_uid": str(pod_uid), "who": str(who), "why": str(why)}:
            f"{pod_uid}{who}{why}".encode()  # half of a surrogate pair came from no client
            return Inhibitor(pod_uid, who, why)
    raise ValueError("its note does not say who, and why")

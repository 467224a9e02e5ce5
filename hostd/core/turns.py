"""VMs that wait for a worker to unmount their layers: one after the other, in the order in which they came."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hostd.core.model import VM
    from hostd.linux.pool import Worker

#: VMs that a worker gets at a time, where so many wait: what it costs to tell it, and to hear of it, is shared.
_TOGETHER = 64


class Turns:
    """A queue for workers. `take` gives one that is free, and `hopeless` why there is none and will be none for long;
    `begin` gets VMs and a worker, which it gives back; `starve` gets a VM for which there is none. None raises."""

    def __init__(
        self,
        take: Callable[[], Worker | None],
        hopeless: Callable[[], Exception | None],
        begin: Callable[[list[VM], Worker], None],
        starve: Callable[[VM, Exception], None],
    ) -> None:
        self._take = take
        self._hopeless = hopeless
        self._begin = begin
        self._starve = starve
        self._waiting: deque[VM] = deque()
        self._serving = False

    @property
    def crowded(self) -> bool:
        """Somebody waits."""
        return bool(self._waiting)

    def add(self, vm: VM) -> None:
        """Its turn comes when a worker is free and all who came before had theirs."""
        self._waiting.append(vm)
        self.serve()

    def take_back(self, vms: Sequence[VM]) -> None:
        """They had their turn, and the worker did not come to them: the next is theirs."""
        self._waiting.extendleft(reversed(vms))
        self.serve()

    def close(self) -> None:
        """Nobody's turn comes any more."""
        self._waiting.clear()

    def serve(self) -> None:
        """A worker may have come free, or none ever will."""
        if self._serving:  # a worker is given back while turns are given out: the loop below sees it
            return
        self._serving = True
        try:
            while self._waiting:
                if worker := self._take():
                    together = min(_TOGETHER, len(self._waiting))
                    self._begin([self._waiting.popleft() for _ in range(together)], worker)
                elif error := self._hopeless():
                    self._starve(self._waiting.popleft(), error)
                else:
                    return
        finally:
            self._serving = False

"""Answers that grow with the node: made in slices, so that a VM's death is looked after in between.

Such an answer says how things are when it goes out, as one that is made at once does: whatever changes between two
slices is made again. So a signal that came before the answer tells nothing that the answer does not have.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from hostd.bus.marshal import Elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hostd.core.model import VM
    from hostd.core.service import Event, VMService

#: The loop's other work gets its turn after this many seconds.
SLICE = 0.001


class LongAnswers:
    """Makes them one after the other: many callers who ask for everything at once delay each other, and nobody else."""

    def __init__(self, service: VMService) -> None:
        self._service = service
        self._turn = asyncio.Lock()

    async def of_vms(
        self, make: Callable[[VM], list[bytes]], chosen: Callable[[], Iterable[VM]] | None = None
    ) -> Elements:
        """What `make` has of each VM, as marshalled elements. `chosen`: of other VMs than all, oldest first.

        Raises what `make` raises.
        """
        async with self._turn:
            made = await self._in_slices(chosen or self._service.vms, make)
            # Nothing is awaited from here on until the answer is on its way.
            return Elements([part for each in made for part in each])

    async def _in_slices(
        self, chosen: Callable[[], Iterable[VM]], make: Callable[[VM], list[bytes]]
    ) -> list[list[bytes]]:
        made: dict[str, list[bytes]] = {}
        changed: set[str] = set()

        def on_event(event: Event) -> None:
            changed.add(event.vm.pod_uid)

        unsubscribe = self._service.subscribe(on_event)
        try:
            until = time.monotonic() + SLICE
            for vm in list(chosen()):
                # What has changed since the beginning, or is gone, waits for the end.
                if vm.pod_uid not in changed:
                    made[vm.pod_uid] = make(vm)
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + SLICE
            kept = made.keys() - changed
            return [made[vm.pod_uid] if vm.pod_uid in kept else make(vm) for vm in chosen()]
        finally:
            unsubscribe()

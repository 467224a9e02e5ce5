"""A keeper of devices in a process of its own, to be killed.

    python -m tests.support.device_daemon SOCKET SYSFS STATE

It serves lines on a Unix socket: `claim DEVICE VM` and `release DEVICE VM`, answered with `ok` or an error's name.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from hostd.config import OnExit
from hostd.devices.claims_store import ClaimsStore
from hostd.devices.service import DeviceKeeper
from hostd.devices.sysfs import Sysfs
from hostd.devices.udev import DeviceEvents
from hostd.errors import HostdError


class _Silent(DeviceEvents):
    """No events: what is tested is not udev, and the library takes its time to load."""

    def start(self) -> None:
        """Hears nothing."""


async def main(socket: str, sysfs: str, state: str) -> None:
    """Serves until it is killed."""
    silent: Callable[[Callable[[], None]], DeviceEvents] = _Silent
    keeper = DeviceKeeper(
        ClaimsStore(state),
        Sysfs(os.fsencode(sysfs)),
        lambda: OnExit.RELEASE,
        lambda _pod_uid, _names: None,
        listen=silent,
    )
    keeper.start([])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            verb, device, vm = line.decode().split()
            try:
                await (keeper.claim if verb == "claim" else keeper.release)(device, vm)
                answer = "ok"
            except HostdError as error:
                answer = type(error).__name__
            writer.write(answer.encode() + b"\n")

    server = await asyncio.start_unix_server(serve, socket)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))

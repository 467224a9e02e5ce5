"""The drop-in by which hostd's configuration reaches hostd-pr-helper.socket, where it says other than the unit."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hostd.config import PRHelper

PATH: Final = "/run/systemd/system/hostd-pr-helper.socket.d/50-hostd.conf"
#: Where the unit itself listens.
_UNIT_SOCKET: Final = b"/run/kubevirt/daemons/pr/pr-helper.sock"


def text(config: PRHelper) -> str:
    """What the drop-in has to say; "" = nothing, the unit is right as it is.

    Owner and mode are not in it: SocketUser= takes no number that has no name on the host, so hostd sets them itself.
    """
    if _real(config.socket) == _real(_UNIT_SOCKET):
        return ""
    path = os.fsdecode(config.socket).replace("%", "%%")
    return (
        "# Written by hostd, from pr-helper.socket in hostd.toml(5). Changes here are lost.\n"
        f"[Socket]\nListenStream=\nListenStream={path}\n"
    )


def _real(path: bytes) -> bytes:
    # /var/run is /run, and the unit has it so.
    directory, name = os.path.split(path)
    return os.path.join(os.path.realpath(directory), name)


def write(wanted: str, path: str = PATH) -> bool:
    """Makes the drop-in so; whether it has changed, and systemd has to be told. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            found = file.read()
    except FileNotFoundError:
        found = ""
    if found == wanted:
        return False
    if not wanted:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return True
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    temporary = f"{path}.new"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(wanted)
    os.rename(temporary, path)
    return True

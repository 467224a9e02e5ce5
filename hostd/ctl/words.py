"""States, times and holders, in words for people."""

from __future__ import annotations

import signal
from datetime import datetime
from typing import TYPE_CHECKING

from hostd.ctl.screen import Cell, Style
from hostd.kubevirt.qemu import looks_like_qemu

if TYPE_CHECKING:
    from hostd.client.model import VM, Holder, Layer

_STYLES = {
    "running": Style.GOOD,
    "ready": Style.GOOD,
    "in-use": Style.GOOD,
    "exited": Style.WAIT,
    "cleaning": Style.WAIT,
    "held": Style.WAIT,
    "detached": Style.WAIT,
    "starting": Style.WAIT,
    "standby": Style.WAIT,
    "blocked": Style.BAD,
    "busy": Style.BAD,
    "hung": Style.BAD,
    "mismatch": Style.BAD,
    "unhealthy": Style.BAD,
    "failed": Style.BAD,
    "refused": Style.BAD,
    "backing-off": Style.BAD,
    "released": Style.DIM,
    "gone": Style.DIM,
    "disabled": Style.DIM,
    "free": Style.DIM,
}
_REASONS = {
    "poweroff": "powered off",
    "error": "ended with an error",
    "signal": "was killed",
    "oom": "was killed for want of memory",
    "unknown": "ended, nobody knows how",
}
#: How a holder holds, and what may be done about it; {pid} and {name} are filled in.
_HOW = {
    "open": ("has a file of it open", "`ls -l /proc/{pid}/fd` shows which; end the process, or let it close the file"),
    "cwd": ("has its working directory in it", "let it change its directory, or end it"),
    "root": ("has its root directory in it", "end the process, or stop its container"),
    "exe": ("runs a program out of it", "end the process"),
    "map": ("has a file of it mapped into memory", "end the process"),
    "loop": ("is a loop device on a file of it", "unmount what is on it, then `losetup -d /dev/{name}`"),
    "namespace": (
        "keeps a copy of the mount in a mount namespace of its own",
        "stop that container or process (`nsenter -t {pid} -m findmnt` shows the copy)",
    ),
    "mount": ("is a mount on top of it or out of it", "unmount that first (`findmnt` shows it)"),
    "umount": (
        "is hostd's own worker, which hangs in the umount",
        "bring back the storage behind it, or give it up (`umount -f`, `dmsetup remove --force`); the worker ends then",
    ),
}


def state_cell(state: str) -> Cell:
    """A state in its colour."""
    return Cell(state, _STYLES.get(state, Style.NONE))


def name_of(vm: VM) -> str:
    """What a VM is called in a table: its name where there is one."""
    return vm.full_name or vm.pod_uid


def count(number: int, what: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def age(usec: int, now_usec: int) -> str:
    """How long ago that was: `now`, `42s`, `5m`, `3h`, `12d`; a dash where it has not come."""
    if not usec:
        return "-"
    seconds = max(now_usec - usec, 0) // 1_000_000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def duration(usec: int) -> str:
    """A span: `4.2 ms`, `1.3 s`."""
    return f"{usec / 1000:.1f} ms" if usec < 1_000_000 else f"{usec / 1_000_000:.1f} s"


def clock(usec: int) -> str:
    """A point in time as this machine's clock on the wall shows it, or a dash."""
    if not usec:
        return "-"
    return datetime.fromtimestamp(usec / 1_000_000).astimezone().isoformat(" ", "seconds")


def ending(reason: str, status: int, number: int) -> str:
    """How a QEMU ended."""
    words = _REASONS.get(reason, reason or "ended")
    if number > 0:
        return f"{words} ({_signal(number)})"
    return f"{words} (status {status})" if status > 0 else words


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def layer_name(layer: Layer) -> str:
    """What a layer is called: its volume, or for kernel-boot the file."""
    return f"{layer.volume} ({layer.kind})"


def holding(holder: Holder, owner: str, *, own: bool = False) -> tuple[str, str]:
    """What a holder does, and what may be done. `owner`: the VM of its pod, where that is one; `own`: it is this VM."""
    if looks_like_qemu(holder.name.encode()):
        return f"process {holder.pid} is the QEMU of {owner or holder.pod_uid or 'a VM'} and has it ({holder.how})", (
            "shut that VM down; a layer is never taken from a living QEMU"
        )
    words, advice = _HOW.get(holder.how, (f"holds it ({holder.how})", "end it, or wait until it ends"))
    who = f"process {holder.pid}, {holder.name}{_of_pod(holder, owner, own=own)}," if holder.pid else holder.name
    advice = advice.format(pid=holder.pid, name=holder.name)
    if holder.pid and holder.pod_uid and not own:
        advice += f". Or end its pod: `crictl pods --label io.kubernetes.pod.uid={holder.pod_uid}` names it"
    return f"{who} {words}", advice


def _of_pod(holder: Holder, owner: str, *, own: bool) -> str:
    if own:
        return " in the VM's own pod"
    return f" in {f'the pod of {owner}' if owner else f'pod {holder.pod_uid}'}" if holder.pod_uid else ""

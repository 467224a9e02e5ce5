"""The bus with a thousand VMs on it: how fast it answers, and what that costs a VM that dies meanwhile.

Clients here are sockets and frames: nothing of an answer is parsed, so what is measured is hostd and the bus.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from hostd.bus import library, names
from hostd.bus.stream import FIXED_HEADER, frame_lengths
from tests.bench.death import hostd_round
from tests.bench.figures import Figure
from tests.support.bus import Bare, PrivateBus
from tests.support.mountns import Child
from tests.support.node import Node

LIBRARIES = ("dbus-fast", "dbus-next")
_LONG = {"cleanup": {"settle": "1h", "retain": "1h"}}
_NO_REPLY = 1

Call = tuple[str, str, str, str, list[object]]
READ: Callable[[str], Call] = lambda path: (path, names.PROPERTIES, "Get", "ss", [names.VM, "State"])  # noqa: E731
LIST_VMS: Call = (names.ROOT, names.MANAGER, "ListVMs", "", [])
MANAGED: Call = (names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects", "", [])
PING: Call = (names.ROOT, names.PEER, "Ping", "", [])


class Peer:
    """A connection that sends calls and reads whole frames."""

    def __init__(self, bus: PrivateBus) -> None:
        self._sock = Bare(bus).sock
        self._sock.settimeout(60)
        self._serial = 1
        self._in = bytearray()
        self._next(2)

    def send(self, call: Call, destination: str = names.BUS_NAME) -> None:
        """One call; its answer is not waited for."""
        self._serial += 1
        self._sock.sendall(library.call(self._serial, destination, *call))

    def answer(self) -> bytearray:
        """The next answer; signals are passed by."""
        frame = self._next(2, 3)
        assert frame[1] == 2, f"an error: {bytes(frame)!r}"
        return frame

    def ask(self, call: Call, destination: str = names.BUS_NAME) -> bytearray:
        """A call and its answer."""
        self.send(call, destination)
        return self.answer()

    def signals(self, count: int) -> None:
        """Reads so many signals."""
        for _ in range(count):
            self._next(4)

    def listen(self) -> None:
        """What hostd tells of its VMs comes here from now on."""
        rule = f"type='signal',sender='{names.BUS_NAME}',member='PropertiesChanged'"
        self.ask((names.DBUS_PATH, names.DBUS, "AddMatch", "s", [rule]), names.DBUS)

    def _next(self, *kinds: int) -> bytearray:
        while (frame := self._frame())[1] not in kinds:
            pass
        return frame

    def _frame(self) -> bytearray:
        self._have(FIXED_HEADER)
        size = sum(frame_lengths(self._in))
        self._have(size)
        frame = self._in[:size]
        del self._in[:size]
        return frame

    def _have(self, size: int) -> None:
        while len(self._in) < size:
            data = self._sock.recv(1 << 20)
            if not data:
                raise ConnectionResetError("the bus hung up")
            self._in += data

    def close(self) -> None:
        """Gone."""
        self._sock.close()


class Crowd:
    """A node with so many VMs that an agent has told of, with two layers each."""

    def __init__(self, node: Node, vms: int) -> None:
        self.node = node
        self.peer = Peer(node.bus)
        self.uids = [str(uuid.uuid4()) for _ in range(vms)]
        self.paths = [names.vm_path(uid) for uid in self.uids]
        for number, uid in enumerate(self.uids):
            details = {"VMIUID": str(uuid.uuid4()), "Namespace": "default", "Name": f"vm-{number}"}
            given = {name: library.variant("s", value) for name, value in details.items()}
            self.peer.ask((names.ROOT, names.MANAGER, "RegisterVM", "sa{sv}", [uid, given]))
            for volume in ("container-disks/disk_0.img", "hotplug-disks/data.img"):
                target = f"{node.kubelet.decode()}/pods/{uid}/volumes/kubernetes.io~empty-dir/{volume}"
                self.peer.ask((names.ROOT, names.MANAGER, "TrackLayer", "ssa{sv}", [uid, target, {}]))

    def read(self) -> None:
        """A property of one VM, and of fifteen more before the first answer is looked at."""
        for path in self.paths[:16]:
            self.peer.send(READ(path))
        for _ in range(16):
            self.peer.answer()

    def list(self) -> None:
        """ListVMs."""
        self.peer.ask(LIST_VMS)

    def managed(self) -> None:
        """GetManagedObjects."""
        self.peer.ask(MANAGED)

    def burst(self) -> None:
        """Every VM changes, by a call of one of eight clients; until the last signal of it is here."""
        grace = int(time.monotonic() * 1e6)  # another one each time: else there is nothing to tell
        clients = [Peer(self.node.bus) for _ in range(8)]
        self.peer.listen()
        for number, path in enumerate(self.paths):
            clients[number % 8].send((path, names.VM, "SetGrace", "t", [grace]))
        self.peer.signals(len(self.paths))
        for client in clients:
            client.close()

    @contextmanager
    def under(self, load: Callable[[Crowd], None]) -> Iterator[None]:
        """Another process does this all the time."""

        def work(tell: Callable[[object], None]) -> None:
            self.peer = Peer(self.node.bus)
            load(self)
            tell(None)
            while True:
                load(self)

        with Child(work) as child:
            child.hear()
            yield


LOADS: dict[str, Callable[[Crowd], None]] = {
    "property reads": Crowd.read,
    "ListVMs": Crowd.list,
    "GetManagedObjects": Crowd.managed,
    "bursts of signals": Crowd.burst,
}


def answers(vms: int = 1000, rounds: int = 12) -> Iterator[Figure]:
    """What the two libraries make of it, side by side."""
    found = {name: dict(_measured(name, vms, rounds)) for name in LIBRARIES if find_spec(name.replace("-", "_"))}
    first, *others = found
    for (title, unit), samples in found[first].items():
        if title.startswith("a VM dies"):
            for name in found:
                yield Figure(f"{title} ({name})", unit, found[name][title, unit], "quiet", found[name][QUIET])
        elif (title, unit) != QUIET:
            other = others[0] if others else ""
            yield Figure(f"{title} ({first})", unit, samples, other, found[other][title, unit] if other else ())


QUIET = ("quiet", "ms")


def _measured(name: str, vms: int, rounds: int) -> Iterator[tuple[tuple[str, str], Sequence[float]]]:
    with Node(settings=_LONG, environment={"HOSTD_DBUS_LIBRARY": name}) as node:
        node.hostd.start()
        crowd = Crowd(node, vms)
        yield ("Ping, one after the other", "1/s"), _rate(lambda: crowd.peer.ask(PING), rounds)
        yield (
            ("property reads, one after the other", "1/s"),
            _rate(lambda: crowd.peer.ask(READ(crowd.paths[0])), rounds),
        )
        yield ("property reads, 16 at a time", "1/s"), [each * 16 for each in _rate(crowd.read, rounds, 20)]
        yield (f"ListVMs, {vms} VMs", "ms"), _times(crowd.list, rounds)
        yield (f"GetManagedObjects, {vms} VMs", "ms"), _times(crowd.managed, rounds)
        yield (f"{vms} SetGrace, to the last of {vms} signals", "ms"), _times(crowd.burst, 5)
        quiet: list[float] = []
        for title, load in LOADS.items():
            loaded: list[float] = []
            # In turns, so that what else the machine does falls on both.
            for _ in range(rounds // 4):
                quiet += [hostd_round(node, 3) for _ in range(2)]
                with crowd.under(load):
                    loaded += [hostd_round(node, 3) for _ in range(4)]
            yield (f"a VM dies during {title}", "ms"), loaded
        yield QUIET, quiet


def _times(act: Callable[[], object], rounds: int) -> list[float]:
    """Milliseconds each."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        found.append((time.perf_counter() - begun) * 1000)
    return found


def _rate(act: Callable[[], object], rounds: int, of: int = 100) -> list[float]:
    """How often a second, by so many at a time."""
    return [of * 1000 / each for each in _times(lambda: [act() for _ in range(of)], rounds)]

"""Metrics in Prometheus' text format: what is now, and in the daemon what was counted since its start.

    metrics = Metrics(service, workers_hung=lambda: len(pool.hung), helper=lambda: helper.status)
    metrics.render()                            # for GetMetrics, which `hostctl metrics` asks
    textfile = Textfile(path, metrics)          # for node_exporter's textfile collector
    textfile.start(); …; textfile.close()

The text is made by the prometheus_client library, which is imported only where metrics are wanted.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

from hostd import __version__
from hostd.core.model import ExitReason, LayerState, State
from hostd.core.service import Event, LayerBlocked, VMChanged, VMExited, VMNew, VMReleased, VMRemoved, VMService
from hostd.errors import NotSupported
from hostd.kubevirt.targets import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hostd.core.model import VM, Layer

log = logging.getLogger(__name__)

#: Upper bounds of the clean-up histogram (s); the grace, 2 s unless configured, is in what it counts.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
#: After a change the textfile is written this late (s): many changes of one moment are one write.
SETTLE: Final = 1.0
_MODE: Final = 0o644


class Helper(Protocol):
    """What is told of qemu-pr-helper."""

    @property
    def enabled(self) -> bool: ...  # noqa: D102
    @property
    def state(self) -> str: ...  # noqa: D102
    @property
    def restarts(self) -> int: ...  # noqa: D102
    @property
    def clients(self) -> int: ...  # noqa: D102


@dataclass(slots=True)
class Counts:
    """What happened since the daemon began."""

    exits: Counter[str] = field(default_factory=Counter)
    released: int = 0
    layers_released: int = 0
    blocked: int = 0
    retries: int = 0
    bus_connections: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    #: Of each bucket alone, with the one above all bounds at the end.
    cleanups: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    cleanup_seconds: float = 0.0


class Metrics:
    """Counts what a service tells, and renders it. `changed` is called after each event."""

    def __init__(
        self,
        service: VMService,
        *,
        workers_hung: Callable[[], int] = lambda: 0,
        helper: Callable[[], Helper | None] = lambda: None,
    ) -> None:
        self._service = service
        self._workers_hung = workers_hung
        self._helper = helper
        self._attempts: dict[str, int] = {}
        self.counts = Counts()
        self.changed: Callable[[], None] = lambda: None

    def listen(self) -> Callable[[], None]:
        """Counts from now on; the result ends it."""
        return self._service.subscribe(self._on_event)

    def bus_connected(self) -> None:
        """The name is ours (again)."""
        self.counts.bus_connections += 1
        self.changed()

    def probed(self, *, answered: bool) -> None:
        """qemu-pr-helper was asked."""
        self.counts.probes["answered" if answered else "silent"] += 1
        self.changed()

    def render(self) -> bytes:
        """The text. Raises NotSupported where the library is missing."""
        helper = self._helper()
        return render(
            chain(
                _now(self._service),
                _of_helper(helper) if helper is not None else (),
                _since_start(self.counts, self._workers_hung()),
            )
        )

    def _on_event(self, event: Event) -> None:
        counts = self.counts
        match event:
            case VMExited():
                counts.exits[event.exit.reason.value] += 1
            case VMReleased():
                self._on_released(event)
            case LayerBlocked():
                counts.blocked += 1
            case VMNew(vm=vm):
                self._attempts[vm.pod_uid] = 0
            case VMChanged(vm=vm):
                # Whatever it was: one that fails as the one before leaves the layer as it was told.
                self._on_attempts(vm)
            case VMRemoved(vm=vm):
                self._attempts.pop(vm.pod_uid, None)
        self.changed()

    def _on_released(self, event: VMReleased) -> None:
        self.counts.released += 1
        self.counts.layers_released += event.layers
        # Of a death that nobody saw it is not known how long it took.
        if event.elapsed_usec > 0:
            seconds = event.elapsed_usec / 1e6
            self.counts.cleanups[bisect.bisect_left(BUCKETS, seconds)] += 1
            self.counts.cleanup_seconds += seconds

    def _on_attempts(self, vm: VM) -> None:
        now = sum(layer.attempts for layer in vm.layers.values())
        # Of a VM that is not new, those until now were an earlier hostd's.
        self.counts.retries += max(now - self._attempts.get(vm.pod_uid, now), 0)
        self._attempts[vm.pod_uid] = now


class Textfile:
    """Keeps a file for node_exporter: written after each change, whole or not at all, gone when hostd ends.

    `on_trouble` is told why the file is not what it should be, and "" when it is again.
    """

    def __init__(
        self,
        path: bytes,
        metrics: Metrics,
        *,
        settle: float = SETTLE,
        on_trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._path = path
        self._metrics = metrics
        self._settle = settle
        self._on_trouble = on_trouble
        self._timer: asyncio.TimerHandle | None = None
        #: Why it is not; empty where it is.
        self.trouble = ""

    def start(self) -> None:
        """Writes it, and again whenever something changed."""
        try:
            render([])
        except NotSupported as error:
            self._tell(str(error))
            return
        self._metrics.changed = self._soon
        self.write()

    def close(self) -> None:
        """No longer; what nobody keeps up to date is taken away."""
        self._metrics.changed = lambda: None
        if self._timer is not None:
            self._timer.cancel()
        with contextlib.suppress(OSError):  # it was never written, or is out of reach by now
            os.unlink(self._path)

    def write(self) -> None:
        """Writes it now."""
        self._timer = None
        try:
            write_whole(self._path, self._metrics.render())
        except OSError as error:
            shown = os.fsdecode(self._path)
            self._tell(f"{shown!a} cannot be written: {error.strerror}; metrics.textfile in hostd.toml(5) names it")
        else:
            self._tell("")

    def _tell(self, trouble: str) -> None:
        """Once a spell."""
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble:
            log.warning("no metrics: %s", trouble)
        self._on_trouble(trouble)

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settle, self.write)


def write_whole(path: bytes, data: bytes) -> None:
    """A file that others read while it is replaced: a new one under a name that collectors pass over, then a rename."""
    directory = os.path.dirname(path)
    fd, temporary = tempfile.mkstemp(prefix=b".hostd-", suffix=b".tmp", dir=directory)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, _MODE)
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def render(families: Iterable[Any]) -> bytes:
    """The text of metric families, which are made here and not before. Raises NotSupported without the library."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise NotSupported("metrics need the prometheus_client library: install python3-prometheus-client") from None

    class _Given:
        """A collector of what is there already."""

        def collect(self) -> Iterable[Any]:
            return families

    families = list(families)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given())
    return bytes(generate_latest(registry))


def _now(service: VMService) -> Iterator[Any]:
    yield _gauge("hostd_info", "hostd itself, always 1.", ((__version__, service.mode), 1), labels=("version", "mode"))
    vms = list(service.vms())
    states = Counter(vm.state for vm in vms)
    by_state = [((state.value,), states[state]) for state in State]
    yield _gauge("hostd_vms", "VMs (launcher pods) by state.", *by_state, labels=("state",))
    yield from _layers([layer for vm in vms for layer in vm.layers.values()])
    if blocked := [vm.exited_usec for vm in vms if vm.state is State.BLOCKED and vm.exited_usec]:
        doc = "Death of the VM that is blocked the longest."
        yield _gauge("hostd_blocked_since_timestamp_seconds", doc, ((), min(blocked) / 1e6))
    parts = [((part,), 1) for part in sorted(service.health)]
    yield _gauge("hostd_unhealthy", "1 for each part of hostd that is not well.", *parts, labels=("part",))


def _layers(layers: Sequence[Layer]) -> Iterator[Any]:
    number = Counter((layer.target.kind, layer.state) for layer in layers)
    each = [((kind.value, state.value), number[kind, state]) for kind in Kind for state in LayerState]
    yield _gauge("hostd_layers", "Layers by kind and state.", *each, labels=("kind", "state"))
    failed = sum(layer.attempts for layer in layers if layer.state is not LayerState.GONE)
    yield _gauge("hostd_layer_attempts", "Failed umounts of layers that are not gone yet.", ((), failed))


def _of_helper(helper: Helper) -> Iterator[Any]:
    yield _gauge("hostd_pr_helper_enabled", "Whether qemu-pr-helper is switched on.", ((), int(helper.enabled)))
    yield _gauge("hostd_pr_helper_state", "1 for the state it is in.", ((helper.state,), 1), labels=("state",))
    yield _gauge("hostd_pr_helper_clients", "QEMUs that are connected to it.", ((), helper.clients))
    yield _counter("hostd_pr_helper_restarts", "How often it was started again by itself.", ((), helper.restarts))


def _since_start(counts: Counts, workers_hung: int) -> Iterator[Any]:
    exits = [((reason.value,), counts.exits[reason.value]) for reason in ExitReason]
    yield _counter("hostd_vm_exits", "VMs that ended, by reason.", *exits, labels=("reason",))
    yield _counter("hostd_vms_released", "VMs whose layers were all released.", ((), counts.released))
    yield _counter("hostd_layers_released", "Layers that were released.", ((), counts.layers_released))
    yield _counter("hostd_layers_blocked", "Spells in which a layer did not go.", ((), counts.blocked))
    yield _counter("hostd_umount_retries", "Umounts that failed.", ((), counts.retries))
    yield _gauge("hostd_workers_hung", "Workers that hang in an umount.", ((), workers_hung))
    yield _counter("hostd_bus_connections", "How often hostd got its name on the bus.", ((), counts.bus_connections))
    probes = [((word,), counts.probes[word]) for word in ("answered", "silent")]
    yield _counter("hostd_pr_helper_probes", "Questions to qemu-pr-helper, by outcome.", *probes, labels=("result",))
    yield _histogram(counts)


#: The values of the labels, and the metric's.
_Sample = tuple[tuple[str, ...], float]


def _gauge(name: str, doc: str, *samples: _Sample, labels: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - as below
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, doc, labels=labels), samples)


def _counter(name: str, doc: str, *samples: _Sample, labels: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - as below
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, doc, labels=labels), samples)


def _filled(family: Any, samples: Iterable[_Sample]) -> Any:  # noqa: ANN401 - of a library that may be absent
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(counts: Counts) -> Any:  # noqa: ANN401 - of a library that may be absent
    from prometheus_client.core import HistogramMetricFamily

    total, buckets = 0, []
    for bound, number in zip([*map(str, BUCKETS), "+Inf"], counts.cleanups, strict=True):
        total += number
        buckets.append((bound, total))
    doc = "From a VM's death to its last layer gone, in seconds."
    return HistogramMetricFamily("hostd_cleanup_seconds", doc, buckets=buckets, sum_value=counts.cleanup_seconds)

"""What is counted and how it is written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from hostd import __version__, metrics
from hostd.core.model import Exit, ExitReason, Holder
from hostd.core.service import VMChanged, VMNew
from hostd.errors import NotSupported
from hostd.metrics import BUCKETS, Metrics, Textfile, write_whole
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

ONE, TWO = pod_uid(1), pod_uid(2)


def samples(text: bytes) -> dict[str, float]:
    """Name with labels → value, as a Prometheus reads it."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_a_life_is_counted() -> None:
    service = FakeService(vm(1), vm(2, layers=3))
    counted = Metrics(service, workers_hung=lambda: 2)
    end = counted.listen()
    service.die(TWO, Exit(0, -1, ExitReason.POWEROFF))
    service.block(TWO, "busy", Holder(42, "cat", "open", ""))
    found = samples(counted.render())
    assert found["hostd_vms,state=blocked"] == 1
    assert found["hostd_vms,state=pending"] == 0
    assert found["hostd_layers,kind=containerdisk,state=busy"] == 1
    assert found["hostd_blocked_since_timestamp_seconds"] == 1_700_000_001
    assert found["hostd_layers_blocked_total"] == 1
    assert found["hostd_vm_exits_total,reason=poweroff"] == 1
    assert found["hostd_vm_exits_total,reason=oom"] == 0
    assert found["hostd_workers_hung"] == 2
    service.finish(TWO, 30_000)
    service.finish(ONE, 0)
    found = samples(counted.render())
    assert found["hostd_vms_released_total"] == 2
    assert found["hostd_layers_released_total"] == 4
    assert "hostd_blocked_since_timestamp_seconds" not in found
    assert found["hostd_cleanup_seconds_bucket,le=0.025"] == 0
    assert found["hostd_cleanup_seconds_bucket,le=0.05"] == 1
    assert found["hostd_cleanup_seconds_bucket,le=+Inf"] == 1
    assert found["hostd_cleanup_seconds_sum"] == pytest.approx(0.03)
    end()
    service.add(vm(3))
    service.finish(pod_uid(3))
    assert counted.counts.released == 2


def test_a_cleanup_on_a_bound_is_within_it() -> None:
    service = FakeService(vm(1))
    counted = Metrics(service)
    counted.listen()
    for bound in (*BUCKETS, BUCKETS[-1] + 1):
        service.finish(ONE, int(bound * 1e6))
    assert counted.counts.cleanups == [1] * (len(BUCKETS) + 1)


def test_retries_add_up_over_vms_and_over_what_is_forgotten() -> None:
    service = FakeService(vm(1), vm(2))
    counted = Metrics(service)
    counted.listen()

    def tried(uid: str, attempts: int) -> None:
        next(iter(service.known[uid].layers.values())).attempts = attempts
        # What fails again as it did before does not change what is told of the layer.
        service.tell(VMChanged(service.known[uid], frozenset({"state"})))

    service.tell(VMNew(service.known[ONE]))
    # The other one is of an earlier hostd, which tried twice.
    for uid, attempts in ((ONE, 1), (ONE, 3), (TWO, 2), (TWO, 4), (ONE, 3), (ONE, 0)):
        tried(uid, attempts)
    assert counted.counts.retries == 5
    assert samples(counted.render())["hostd_layer_attempts"] == 4
    service.remove(ONE)
    assert counted.counts.retries == 5
    assert set(counted._attempts) == {TWO}


def test_the_helper_health_and_the_bus() -> None:
    from hostd.client.model import Helper

    service = FakeService()
    service.health["workers"] = "1 hangs"
    counted = Metrics(service, helper=lambda: Helper(True, "ready", restarts=3, clients=2))
    counted.bus_connected()
    counted.probed(answered=True)
    counted.probed(answered=False)
    found = samples(counted.render())
    assert found["hostd_unhealthy,part=workers"] == 1
    assert found["hostd_pr_helper_enabled"] == 1
    assert found["hostd_pr_helper_state,state=ready"] == 1
    assert found["hostd_pr_helper_restarts_total"] == 3
    assert found["hostd_bus_connections_total"] == 1
    assert found["hostd_pr_helper_probes_total,result=silent"] == 1
    assert found["hostd_info,mode=enforce,version=" + __version__] == 1
    without = samples(Metrics(service).render())
    assert not [name for name in without if name.startswith("hostd_pr_helper_state")]


async def test_the_textfile_follows_changes_and_goes(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "hostd.prom")
    service = FakeService(vm(1))
    counted = Metrics(service)
    counted.listen()
    textfile = Textfile(path, counted, settle=0.01)
    textfile.start()
    assert samples(Path(os.fsdecode(path)).read_bytes())["hostd_vms,state=running"] == 1
    assert os.stat(path).st_mode & 0o777 == 0o644
    first = os.stat(path).st_ino
    for number in range(2, 30):
        service.add(vm(number))
    await eventually(lambda: samples(Path(os.fsdecode(path)).read_bytes())["hostd_vms,state=running"] == 29)
    assert os.stat(path).st_ino != first
    textfile.close()
    service.add(vm(99))
    await asyncio.sleep(0.05)
    assert os.listdir(tmp_path) == []


async def test_many_changes_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(metrics, "write_whole", lambda _, data: written.append(data))
    service = FakeService()
    counted = Metrics(service)
    counted.listen()
    textfile = Textfile(b"/nowhere", counted, settle=0.01)
    textfile.start()
    for number in range(1, 100):
        service.add(vm(number))
    await eventually(lambda: len(written) == 2)
    await asyncio.sleep(0.05)
    assert len(written) == 2
    textfile.close()


async def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "later"
    told: list[str] = []
    textfile = Textfile(os.fsencode(directory / "hostd.prom"), Metrics(FakeService()), on_trouble=told.append)
    textfile.start()
    textfile.write()
    assert len(told) == len(caplog.records) == 1
    assert "metrics.textfile" in told[0]
    directory.mkdir()
    textfile.write()
    assert told[1:] == [""]
    textfile.close()
    assert os.listdir(directory) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "hostd.prom").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(os.fsencode(tmp_path / "hostd.prom"), b"x")
    assert os.listdir(tmp_path) == ["hostd.prom"]


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    real = builtins.__import__

    def missing(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(NotSupported, match="python3-prometheus-client"):
        Metrics(FakeService()).render()
    told: list[str] = []
    counted = Metrics(FakeService())
    Textfile(b"/x", counted, on_trouble=told.append).start()
    counted.bus_connected()
    assert len(told) == 1
    assert "python3-prometheus-client" in told[0]

"""Who lives in a pod, by real processes in real cgroups."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from hostd.core.model import VM
from hostd.core.qemus import Qemus, pods_of, qemu_pids_by_pod
from hostd.kubevirt.pod_cgroup import PodCgroups as Found
from hostd.linux.cgroup import Population
from hostd.linux.pidfd import Process, identify
from tests.support.cgroups import V2_SYSTEMD, PodCgroups
from tests.support.core import OTHER, POD
from tests.support.qemu import FakeQemu, Launcher, Place
from tests.support.wait import eventually, until

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def cgroups() -> Iterator[PodCgroups]:
    with PodCgroups(V2_SYSTEMD) as made:
        yield made


class Seen:
    """A Qemus and what it told."""

    def __init__(self, cgroups: PodCgroups) -> None:
        self.deaths: list[tuple[str, int, object]] = []
        self.quiet: list[str] = []
        self.qemus = Qemus(Found(os.fsencode(cgroups.root)), self.died, self.quiet.append)

    def died(self, pod_uid: str, process: Process) -> None:
        self.deaths.append((pod_uid, process.identity.pid, process.end()))
        process.close()

    def look(self, vm: VM) -> tuple[bool, str, Population | None, list[int]]:
        facts, candidates = self.qemus.look(vm)
        pids = [process.identity.pid for process in candidates]
        for process in candidates:
            process.close()
        return facts.qemu, facts.doubt, facts.cgroup, pids


@pytest.fixture
async def seen(cgroups: PodCgroups) -> Seen:
    return Seen(cgroups)


@pytest.fixture
def place(cgroups: PodCgroups) -> Place:
    return Place(tuple(cgroups.add(POD)))


async def test_a_qemu_is_a_doubt_until_it_is_known_and_then_the_pod_lives(seen: Seen, place: Place) -> None:
    with FakeQemu(place=place) as qemu:
        alive, doubt, _, pids = seen.look(VM(POD))
        assert (alive, pids) == (False, [qemu.pid])
        assert str(qemu.pid) in doubt
        assert seen.qemus.follow(POD, Process.open(qemu.pid))
        assert seen.look(VM(POD)) == (True, "", None, [])
        assert not seen.qemus.follow(POD, Process.open(qemu.pid)), "it is followed already"
        seen.qemus.close()


async def test_its_death_is_told_once_and_what_is_seen_then_is_an_empty_pod(seen: Seen, place: Place) -> None:
    with FakeQemu(place=place) as qemu:
        seen.qemus.follow(POD, Process.open(qemu.pid))
        qemu.kill(reap=False)
        assert seen.look(VM(POD, had_qemu=True))[0] is False, "dead is dead, told or not, reaped or not"
        await eventually(lambda: seen.deaths)
        assert [(pod, pid) for pod, pid, _ in seen.deaths] == [(POD, qemu.pid)]
        assert seen.qemus.followed(POD) == []
        until(lambda: seen.look(VM(POD, had_qemu=True))[2] is Population.EMPTY)


async def test_a_probe_is_no_doubt_any_more_once_it_was_asked(seen: Seen, place: Place) -> None:
    with FakeQemu(place=place) as probe:
        seen.qemus.is_other(POD, identify(probe.pid))
        assert seen.look(VM(POD)) == (False, "", Population.POPULATED, [])


async def test_a_qemu_of_another_pod_is_none_of_this_one(seen: Seen, place: Place, cgroups: PodCgroups) -> None:
    with FakeQemu(place=Place(tuple(cgroups.add(OTHER)))):
        assert seen.look(VM(POD)) == (False, "", Population.EMPTY, [])


async def test_a_pid_that_is_another_pods_by_now_is_none_of_this_one(
    seen: Seen, place: Place, cgroups: PodCgroups
) -> None:
    """A look at all processes is remembered for a second, and pids are used again."""
    cgroups.add(OTHER)
    with FakeQemu(place=place) as qemu:
        assert seen.qemus.unidentified(OTHER, [qemu.pid]) == []
        [found] = seen.qemus.unidentified(POD, [qemu.pid])
        found.close()


async def test_a_pod_without_a_cgroup_is_gone_only_if_it_was_seen(seen: Seen) -> None:
    assert seen.look(VM(POD))[2] is None
    assert seen.look(VM(POD, cgroup_seen=True))[2] is Population.GONE


async def test_a_launcher_is_found_by_its_name(seen: Seen, place: Place) -> None:
    with Launcher("vm", "uid", "default", place) as launcher:
        assert launcher.pid in seen.qemus.launchers(POD)
        assert seen.qemus.launchers(OTHER) == []


async def test_a_cgroup_that_cannot_be_read_is_a_doubt(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[int]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(seen.qemus.cgroups, "processes", fail)
    monkeypatch.setattr(seen.qemus.cgroups, "census", fail)
    alive, doubt, _, _ = seen.look(VM(POD))
    assert not alive
    assert "cannot be looked at" in doubt
    assert seen.qemus.launchers(POD) == []


async def test_a_pod_that_becomes_quiet_is_told(seen: Seen, place: Place) -> None:
    with FakeQemu(place=place) as qemu:
        seen.qemus.watch(POD)
        seen.qemus.watch(POD)
        qemu.kill()
        await eventually(lambda: POD in seen.quiet)
    seen.qemus.unwatch(POD)
    seen.qemus.unwatch(POD)


async def test_what_only_makes_things_quicker_is_given_back_once(seen: Seen, place: Place) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with FakeQemu(place=place) as qemu:
        own = len(os.listdir("/proc/self/fd")) - before
        seen.qemus.follow(POD, Process.open(qemu.pid))
        seen.qemus.watch(POD)
        assert not seen.qemus.relieve(OSError(errno.ENOSPC, "it is not for want of descriptors"))
        assert seen.qemus.relieve(OSError(errno.EMFILE, "too many open files"))
        assert len(os.listdir("/proc/self/fd")) == before + own + 1, "its pidfd is left"
        assert not seen.qemus.relieve(OSError(errno.ENFILE, "there is nothing more to give"))
        seen.qemus.close()


async def test_all_qemus_of_the_host_are_found_by_their_cgroups(seen: Seen, place: Place) -> None:
    with FakeQemu(place=place) as qemu:
        assert pods_of(qemu.pid) == {POD}
        assert qemu_pids_by_pod().get(POD) == [qemu.pid]
    assert pods_of(qemu.pid) == set()


async def test_without_a_descriptor_left_those_that_were_had_are_given_back(
    seen: Seen, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hostd would take each one that becomes free, and never come back from there."""
    with FakeQemu(place=place), FakeQemu(place=place):
        before = os.listdir("/proc/self/fd")
        whole = Process.open
        had: list[int] = []

        def open_one(pid: int) -> Process:
            if had:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            had.append(pid)
            return whole(pid)

        monkeypatch.setattr(Process, "open", open_one)
        alive, doubt, _, pids = seen.look(VM(POD))
        assert (alive, pids) == (False, [])
        assert "Too many open files" in doubt
        assert os.listdir("/proc/self/fd") == before


async def test_watches_of_ended_pods_give_way_when_no_descriptor_is_left(
    seen: Seen, cgroups: PodCgroups, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only make things quicker: else the pods that ended would keep hostd from seeing that others do."""
    cgroups.add(OTHER)
    seen.qemus.watch(OTHER)
    seen.qemus.cgroups.remember(OTHER)
    before = len(os.listdir("/proc/self/fd"))
    whole = Found.census

    def census(found: Found, pod_uid: str) -> tuple[Population | None, list[int]]:
        if len(os.listdir("/proc/self/fd")) > before - 3:  # the watch has two, the memory one
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return whole(found, pod_uid)

    with FakeQemu(place=place) as qemu:
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(Found, "census", census)
        assert seen.look(VM(POD))[3] == [qemu.pid]
    assert seen.qemus.cgroups.census(OTHER) == (Population.EMPTY, [])


async def test_a_second_qemu_is_found_though_nobody_knows_where_the_pods_cgroup_is(
    cgroups: PodCgroups, place: Place
) -> None:
    """Its cgroup names the pod, in a place where hostd does not look for pods; the first QEMU, followed, has died."""
    with PodCgroups(V2_SYSTEMD) as elsewhere, FakeQemu(place=place) as second:
        strange = Seen(elsewhere)
        alive, doubt, _, pids = strange.look(VM(POD, had_qemu=True))
        assert (alive, pids) == (False, [second.pid])
        assert str(second.pid) in doubt
        strange.qemus.is_other(POD, identify(second.pid))
        assert strange.look(VM(POD, had_qemu=True)) == (False, "", Population.POPULATED, []), "somebody lives there"


async def test_no_descriptor_is_left_over(seen: Seen, place: Place) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with FakeQemu(place=place) as qemu:
        own = len(os.listdir("/proc/self/fd")) - before
        for _ in range(3):
            seen.look(VM(POD))
            seen.qemus.follow(POD, Process.open(qemu.pid))
            seen.qemus.watch(POD)
        seen.qemus.forget(POD)
        assert len(os.listdir("/proc/self/fd")) - before == own
        seen.qemus.cgroups.remember(POD)
        seen.qemus.cgroups.remember(POD)
        seen.qemus.close()
        assert len(os.listdir("/proc/self/fd")) - before == own

"""Pods are found when their first container comes, in real cgroup directories, and nothing is polled."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest

from hostd.core import discovery as discovery_module
from hostd.core.discovery import Discovery
from hostd.kubevirt.pod_cgroup import PodCgroups as Found
from hostd.linux import libc
from tests.support.cgroups import V2_CGROUPFS, V2_GUARANTEED, V2_NESTED, V2_SYSTEMD, Layout, PodCgroups, Unavailable
from tests.support.core import OTHER, POD
from tests.support.wait import eventually

pytestmark = pytest.mark.usefixtures("root")


@contextlib.contextmanager
def watching(cgroups: PodCgroups) -> Iterator[tuple[Discovery, Counter[str]]]:
    found: Counter[str] = Counter()
    root = os.fsencode(cgroups.root)
    discovery = Discovery(Found(root), root, lambda uid: found.update([uid]))
    discovery.start()
    try:
        yield discovery, found
    finally:
        discovery.close()


@pytest.fixture(params=[V2_SYSTEMD, V2_CGROUPFS, V2_GUARANTEED, V2_NESTED], ids=lambda layout: layout.label)
def cgroups(request: pytest.FixtureRequest) -> Iterator[PodCgroups]:
    layout: Layout = request.param
    try:
        made = PodCgroups(layout)
    except Unavailable as error:
        pytest.skip(str(error))
    with made:
        yield made


async def test_a_new_pod_is_found_with_its_first_container(cgroups: PodCgroups) -> None:
    with watching(cgroups) as (discovery, found):
        cgroups.add(POD)
        await eventually(lambda: found[POD])
        cgroups.add(OTHER)
        await eventually(lambda: found[OTHER])
        assert discovery.error == ""


async def test_a_pod_without_containers_is_not_told_yet(cgroups: PodCgroups) -> None:
    with watching(cgroups) as (_, found):
        [container] = cgroups.add(POD)
        await eventually(lambda: found[POD])
        empty = os.path.join(os.path.dirname(os.path.dirname(container)), cgroups.layout.pod(OTHER))
        os.mkdir(empty)
        cgroups._pods[OTHER] = [empty]
        third = POD.replace("1", "2")
        cgroups.add(third)
        await eventually(lambda: found[third])
        assert not found[OTHER]
        os.mkdir(os.path.join(empty, cgroups.layout.container()))
        await eventually(lambda: found[OTHER])


async def test_more_containers_are_no_news(cgroups: PodCgroups) -> None:
    with watching(cgroups) as (_, found):
        cgroups.add(POD)
        await eventually(lambda: found[POD])
        told = found[POD]
        for _ in range(5):
            cgroups.add(POD)
        cgroups.add(OTHER)
        await eventually(lambda: found[OTHER])
        assert found[POD] - told <= 1


async def test_a_pod_that_comes_again_is_found_again(cgroups: PodCgroups) -> None:
    with watching(cgroups) as (_, found):
        for times in range(1, 4):
            cgroups.add(POD)
            await eventually(lambda times=times: found[POD] >= times)  # type: ignore[misc]
            cgroups.remove(POD)


async def test_pods_leave_no_watch_behind(cgroups: PodCgroups) -> None:
    """Of a cgroup that is removed the kernel tells its parent's watch alone: a pod's own would stay for ever."""
    with watching(cgroups) as (discovery, found):
        [container] = cgroups.add(POD)
        await eventually(lambda: found[POD])
        parent = os.path.dirname(os.path.dirname(container))
        before = watches(discovery)
        empty = [os.path.join(parent, cgroups.layout.pod(POD.replace("1", digit))) for digit in "345"]
        for path in empty:
            os.mkdir(path)
        cgroups.add(OTHER)
        await eventually(lambda: found[OTHER])
        for path in empty:
            os.rmdir(path)
        cgroups.remove(OTHER)
        await eventually(lambda: watches(discovery) == before, why=lambda: f"{watches(discovery)}, not {before}")


def watches(discovery: Discovery) -> tuple[int, int]:
    """How many there are, by the kernel's word and by ours."""
    assert discovery._inotify is not None
    with open(f"/proc/self/fdinfo/{discovery._inotify.fileno()}") as file:
        return sum(line.startswith("inotify wd") for line in file), len(discovery._watched)


async def test_a_kubelet_that_comes_after_hostd_is_found() -> None:
    with PodCgroups(V2_SYSTEMD) as cgroups:
        os.rmdir(os.path.join(cgroups.root, *V2_SYSTEMD.parents()))
        os.rmdir(os.path.join(cgroups.root, "kubepods.slice"))
        with watching(cgroups) as (_, found):
            cgroups.add(POD)
            await eventually(lambda: found[POD])


async def test_a_burst_of_pods_loses_none(cgroups: PodCgroups) -> None:
    uids = [f"{number:08}-2222-4333-8444-555555555555" for number in range(60)]
    with watching(cgroups) as (_, found):
        for uid in uids:
            cgroups.add(uid)
        await eventually(lambda: set(uids) <= set(found), why=lambda: str(set(uids) - set(found)))


async def test_without_inotify_hostd_goes_on_and_says_so(
    cgroups: PodCgroups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of root's programs on a node share `fs.inotify.max_user_instances`."""

    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(libc, "inotify_init1", none_left)
    with watching(cgroups) as (discovery, _):
        cgroups.add(POD)
        discovery.look()
        assert "max_user_instances" in discovery.error
    assert len(caplog.records) == 1


async def test_what_was_told_while_nothing_could_be_looked_at_is_found_later(
    cgroups: PodCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notice is taken from the queue, and does not come again."""
    monkeypatch.setattr(discovery_module, "_LATER_SECONDS", 0.05)
    with watching(cgroups) as (discovery, found):
        whole = discovery._on_directory
        broken = mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
        monkeypatch.setattr(discovery, "_on_directory", broken)
        cgroups.add(POD)
        await eventually(lambda: broken.called)
        monkeypatch.setattr(discovery, "_on_directory", whole)
        await eventually(lambda: found[POD])

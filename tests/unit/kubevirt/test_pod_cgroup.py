from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.kubevirt import pod_cgroup
from hostd.kubevirt.pod_cgroup import PodCgroups, pod_uid, pod_uids
from hostd.kubevirt.targets import is_pod_uid
from hostd.linux.cgroup import Hierarchy, Population
from tests.support import cgroups as support
from tests.support.wait import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OTHER = "ffffffff-1111-2222-3333-444444444444"
STATIC = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"
SLICED = UID.replace("-", "_")
ID = "c0ffee" * 10 + "abcd"
SLICES = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICED}.slice"
KUBELET = "/kubelet.slice/kubelet-kubepods.slice"


@pytest.mark.parametrize(
    "path",
    [
        SLICES,
        f"{SLICES}/cri-containerd-{ID}.scope",
        f"{SLICES}/crio-{ID}.scope",
        f"{SLICES}/crio-{ID}.scope/container",
        f"{SLICES}/crio-conmon-{ID}.scope",
        f"{SLICES}/docker-{ID}.scope",
        f"{SLICES}/cri-containerd-{ID}.scope/housekeeping",
        f"{SLICES}/cri-containerd-{ID}.scope/machine/qemu-1-default_vm.libvirt-qemu/vcpu0",
        f"/kubepods.slice/kubepods-pod{SLICED}.slice/crio-{ID}.scope",
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICED}.slice/crio-{ID}.scope",
        f"/kubepods/burstable/pod{UID}/{ID}",
        f"/kubepods/besteffort/pod{UID}/{ID}/housekeeping",
        f"/kubepods/pod{UID}/{ID}",
        f"/kubepods/pod{UID}",
        # kind, minikube, k3s, a kubelet with --cgroup-root
        f"{KUBELET}/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{SLICED}.slice/cri-containerd-{ID}.scope",
        f"/docker/{ID}/kubelet/kubepods/burstable/pod{UID}/{ID}",
        f"/system.slice/docker-{ID}.scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SLICED}.slice/x",
        f"/machine.slice/libpod-{ID}.scope/container{KUBELET}/kubelet-kubepods-pod{SLICED}.slice/crio-{ID}.scope",
        f"/k3s/kubepods/besteffort/pod{UID}/{ID}",
        f"/actions_job/kubepods/pod{UID}/{ID}",
        # a runtime that knows no slices below a kubelet that does
        f"/system.slice/containerd.service/kubepods-burstable-pod{SLICED}.slice:cri-containerd:{ID}",
        f"/kubepods-besteffort-pod{SLICED}.slice:docker:{ID}",
        # as seen from a cgroup namespace
        f"/../../kubepods-burstable-pod{SLICED}.slice/cri-containerd-{ID}.scope",
        f"/../../../kubepods.slice/kubepods-pod{SLICED}.slice/crio-{ID}.scope",
        f"/../../kubepods/burstable/pod{UID}/{ID}",
        f"../..{SLICES}/cri-containerd-{ID}.scope",
        # the outermost pod is the one that cannot be forged
        f"{SLICES}/cri-containerd-{ID}.scope/kubepods/pod{OTHER}/x",
        f"/kubepods/pod{UID}/{ID}/kubepods.slice/kubepods-pod{OTHER.replace('-', '_')}.slice",
    ],
)
def test_every_known_layout_names_its_pod(path: str) -> None:
    assert pod_uid(path.encode()) == UID


def test_static_pods() -> None:
    assert (
        pod_uid(f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/x".encode()) == STATIC
    )
    assert pod_uid(f"/kubepods/burstable/pod{STATIC}/{ID}".encode()) == STATIC


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/..",
        "/user.slice/user-podman.slice",
        "/user.slice/user-1000.slice/session-3.scope",
        f"/machine.slice/libpod-{ID}.scope",
        f"/machine.slice/libpod-{ID}.scope/container",
        f"/machine.slice/libpod-{STATIC}.scope",
        f"/pod{UID}/{ID}",
        f"/machine.slice/machine-libpod_pod_{ID}.slice",
        f"/system.slice/pod{UID}/kubepods",
        "/kubepods.slice",
        "/kubepods.slice/kubepods-burstable.slice",
        "/kubepods/burstable",
        f"/kubepods/burstable/{ID}",
        f"/kubepods/burstable/pod{UID.upper()}/{ID}",
        f"/kubepods/burstable/pod{UID}x/{ID}",
        f"/kubepods/burstable/xpod{UID}/{ID}",
        f"/kubepods/burstable/pod{UID[:-1]}/{ID}",
        f"/kubepods/pod{UID}.scope/{ID}",
        "/kubepods/podinfo/x",
    ],
)
def test_false_friends(path: str) -> None:
    assert pod_uid(path.encode()) is None


def test_the_paths_of_one_process() -> None:
    assert pod_uids([b"/", f"/kubepods/pod{UID}/x".encode(), f"{SLICES}/y".encode(), b"/user.slice"]) == {UID}
    assert pod_uids([]) == set()


@given(
    st.lists(
        st.binary(max_size=8) | st.sampled_from([b"..", b"kubepods", b"kubepods.slice", b"pod" + UID.encode()]),
        max_size=8,
    )
)
def test_any_path_gives_a_canonical_uid_or_none(parts: list[bytes]) -> None:
    found = pod_uid(b"/".join(parts))
    assert found is None or (is_pod_uid(found) and any(b"kubepods" in part for part in parts))


# The directories, in a tree of plain ones: `population` is told by files that are laid there.


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PodCgroups]:
    """Makes directories (`path` or `path=events`) in one hierarchy or more, and looks at them."""

    def make(*directories: str, names: tuple[str, ...] = ("unified",)) -> PodCgroups:
        for name in names:
            (tmp_path / name).mkdir(exist_ok=True)
            for each in directories:
                path, _, populated = each.partition("=")
                (tmp_path / name / path).mkdir(parents=True, exist_ok=True)
                if populated:
                    (tmp_path / name / path / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
        found = [Hierarchy(os.fsencode(tmp_path / name), True, "") for name in names]
        monkeypatch.setattr(pod_cgroup, "hierarchies", lambda _: found)
        return PodCgroups(os.fsencode(tmp_path))

    return make


def below(tmp_path: Path, *paths: str) -> list[bytes]:
    return [os.fsencode(tmp_path / "unified" / path) for path in paths]


S = "kubepods.slice"
B = S + "/kubepods-burstable.slice"
E = S + "/kubepods-besteffort.slice"


def test_the_systemd_driver(tree: Callable[..., PodCgroups], tmp_path: Path) -> None:
    pod = f"{B}/kubepods-burstable-pod{SLICED}.slice"
    static = f"{S}/kubepods-pod{STATIC}.slice"
    found = tree(E, f"{pod}/crio-{ID}.scope", static, "system.slice/sshd.service", "init.scope")
    assert found.parents() == below(tmp_path, S, B, E)
    assert found.paths(UID) == below(tmp_path, pod)
    assert found.paths(STATIC) == below(tmp_path, static)
    assert found.paths(OTHER) == []
    assert found.pods() == {UID: below(tmp_path, pod), STATIC: below(tmp_path, static)}
    assert found.understood


def test_the_cgroupfs_driver_in_several_hierarchies(tree: Callable[..., PodCgroups], tmp_path: Path) -> None:
    names = ("cpu,cpuacct", "memory", "systemd")
    found = tree(f"kubepods/besteffort/pod{UID}/{ID}", "kubepods/burstable", f"kubepods/pod{OTHER}", names=names)
    assert found.paths(UID) == [os.fsencode(tmp_path / name / "kubepods/besteffort" / f"pod{UID}") for name in names]
    assert len(found.parents()) == 9
    assert found.pods().keys() == {UID, OTHER}


@pytest.mark.parametrize(
    "prefix",
    [
        "kubelet.slice/kubelet-",
        f"docker/{ID}/kubelet.slice/kubelet-",
        f"system.slice/docker-{ID}.scope/kubelet.slice/kubelet-",
        f"machine.slice/libpod-{ID}.scope/container/kubelet.slice/kubelet-",
    ],
)
def test_nodes_in_containers(tree: Callable[..., PodCgroups], tmp_path: Path, prefix: str) -> None:
    stem = os.path.basename(prefix)
    pod = f"{prefix}kubepods.slice/{stem}kubepods-burstable.slice/{stem}kubepods-burstable-pod{SLICED}.slice"
    found = tree(pod)
    assert found.paths(UID) == below(tmp_path, pod)
    assert found.understood


def test_pods_below_pods_and_in_user_sessions_are_not_looked_for(tree: Callable[..., PodCgroups]) -> None:
    found = tree(
        f"kubepods/pod{UID}/{ID}/kubepods/pod{OTHER}",
        f"user.slice/user-1000.slice/user@1000.service/kubepods/pod{STATIC}",
    )
    assert found.pods().keys() == {UID}


def test_loose_pods_of_a_runtime_without_slices(tree: Callable[..., PodCgroups], tmp_path: Path) -> None:
    own = f"{B}/kubepods-burstable-pod{SLICED}.slice"
    loose = f"system.slice/containerd.service/kubepods-burstable-pod{SLICED}.slice:cri-containerd:{ID}"
    found = tree(f"{own}=0", f"{loose}=1", "system.slice/containerd.service/other")
    assert found.paths(UID) == below(tmp_path, own, loose)
    assert found.parents() == below(tmp_path, S, B, "system.slice/containerd.service")
    assert found.population(UID) is Population.POPULATED
    assert found.understood


def test_that_a_pod_is_absent_is_believed_only_after_a_fresh_look(
    tree: Callable[..., PodCgroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr(pod_cgroup, "boottime_usec", lambda: now[0])
    found = tree(f"{B}/another.slice=0")
    assert found.population(UID) is None
    tree(f"system.slice/containerd.service/kubepods-burstable-pod{SLICED}.slice:cri-containerd:{ID}=1")
    now[0] += 5_000_000
    assert found.population(UID) is Population.POPULATED


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (("1", "0"), Population.POPULATED),
        (("0", "1"), Population.POPULATED),
        (("0", "0"), Population.EMPTY),
        (("x", "0"), Population.UNREADABLE),
        (("x", "1"), Population.POPULATED),
    ],
)
def test_one_hierarchy_that_is_populated_decides(
    tree: Callable[..., PodCgroups], events: tuple[str, str], expected: Population
) -> None:
    for name, populated in zip(("pids", "systemd"), events, strict=True):
        found = tree(f"kubepods/pod{UID}={populated}", names=(name,))
    found = tree(names=("pids", "systemd"))
    assert found.population(UID) is expected
    assert found.population(OTHER) is None


def test_a_host_without_kubepods_is_not_understood(tree: Callable[..., PodCgroups], tmp_path: Path) -> None:
    found = tree("system.slice/sshd.service", "user.slice/user-podman.slice")
    assert (found.understood, found.parents(), found.pods(), found.population(UID)) == (False, [], {}, None)
    # kubelet starts after hostd
    tree(f"{B}/kubepods-burstable-pod{SLICED}.slice=1")
    until(lambda: found.understood)
    assert found.population(UID) is Population.POPULATED


def test_qos_classes_that_appear_later_are_seen_without_a_walk(tree: Callable[..., PodCgroups]) -> None:
    found = tree(S)
    assert found.understood
    tree(f"{E}/kubepods-besteffort-pod{SLICED}.slice")
    assert found.pods().keys() == {UID}


def test_names_that_are_not_known_are_not_understood(tree: Callable[..., PodCgroups]) -> None:
    assert not tree("kubepods/burstable/sandbox-1234").understood
    # A stray directory among pods is no reason to doubt.
    assert tree(f"kubepods/burstable/pod{UID}").understood


def test_an_incomplete_look_is_not_understood(tree: Callable[..., PodCgroups], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_cgroup, "_BOUND", 3)
    found = tree(f"kubepods/pod{UID}", *(f"a/{number}" for number in range(9)))
    assert found.paths(UID)
    assert not found.understood
    assert "not all were looked at" in found.trouble


def test_a_root_that_cannot_be_read_is_trouble_and_no_error(tmp_path: Path) -> None:
    found = PodCgroups(os.fsencode(tmp_path / "nothing"))
    assert not found.understood
    assert "cannot be read: No such file or directory" in found.trouble
    assert found.population(UID) is Population.UNREADABLE


def test_a_look_that_fails_does_not_lose_what_was_known(
    tree: Callable[..., PodCgroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    loose = f"system.slice/containerd.service/kubepods-pod{SLICED}.slice:cri-containerd:{ID}"
    found = tree(f"kubepods/pod{OTHER}=0", f"{loose}=1")
    known = found.parents()

    def full(*_: object) -> list[Hierarchy]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(pod_cgroup, "hierarchies", full)
    found.look()
    assert "Too many open files" in found.trouble
    assert found.parents() == known
    assert [found.population(uid) for uid in (UID, OTHER, STATIC)] == ["populated", "empty", "unreadable"]
    tree()
    found.look()
    assert (found.trouble, found.population(STATIC)) == ("", None)


def test_a_pod_that_cannot_be_seen_does_not_pass_for_one_that_ended(
    tree: Callable[..., PodCgroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tree(f"kubepods/pod{UID}=0")

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "scandir", full)
    with pytest.raises(OSError, match="Too many open files"):
        found.pods()
    found.look()
    assert "Too many open files" in found.trouble


# Real cgroups.

VERSION_2 = [layout for layout in support.LAYOUTS if not layout.hierarchies]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def join(directory: str, process: subprocess.Popen[bytes]) -> None:
    Path(directory, "cgroup.procs").write_text(str(process.pid))


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("layout", VERSION_2, ids=lambda layout: layout.label)
def test_a_real_pod_on_version_2(layout: support.Layout, sleeper: subprocess.Popen[bytes]) -> None:
    try:
        made = support.PodCgroups(layout)
    except support.Unavailable as error:
        pytest.skip(str(error))
    with made:
        found = PodCgroups(made.root.encode())
        assert found.population(UID) is None
        [container] = made.add(UID)
        assert found.population(UID) is Population.EMPTY
        join(container, sleeper)
        assert (found.population(UID), found.processes(UID)) == (Population.POPULATED, [sleeper.pid])
        assert found.census(UID) == (Population.POPULATED, [sleeper.pid])
        found.remember(UID)
        found.remember(UID)
        assert found.census(UID) == (Population.POPULATED, [sleeper.pid])
        assert pod_uids([Path(f"/proc/{sleeper.pid}/cgroup").read_bytes().rpartition(b"::")[2].strip()]) == {UID}
        sleeper.kill()
        sleeper.wait()
        assert (found.population(UID), found.processes(UID)) == (Population.EMPTY, [])
        assert found.census(UID) == (Population.EMPTY, [])
        made.remove(UID)
        assert found.population(UID) is None
        assert found.census(UID) == (Population.GONE, []), "what is remembered was there"
        found.forget(UID)
        assert found.census(UID) == (None, [])
        assert not found.close(), "nothing is open"
        assert found.understood


@pytest.mark.usefixtures("root")
def test_a_real_pod_on_version_1(monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]) -> None:
    mounts = [
        path for path in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup/systemd") if os.path.exists(path + "/cgroup.procs")
    ]
    if not mounts:
        pytest.skip("no cgroup hierarchy of version 1 is mounted here")
    tops = [f"{mount}/hostd-test-{os.getpid()}" for mount in mounts]
    hierarchies = [Hierarchy(top.encode(), False, "") for top in tops]
    monkeypatch.setattr(pod_cgroup, "hierarchies", lambda _: hierarchies)
    inner = ["", "kubepods", "kubepods/burstable", f"kubepods/burstable/pod{UID}", f"kubepods/burstable/pod{UID}/{ID}"]
    directories = [f"{top}/{path}" for top in tops for path in inner]
    for directory in directories:
        os.mkdir(directory)
    try:
        found = PodCgroups(b"/sys/fs/cgroup")
        assert len(found.paths(UID)) == len(tops)
        assert found.population(UID) is Population.EMPTY
        join(directories[-1], sleeper)
        assert (found.population(UID), found.processes(UID)) == (Population.POPULATED, [sleeper.pid])
    finally:
        sleeper.kill()
        sleeper.wait()
        for directory in reversed(directories):
            os.rmdir(directory)
    assert found.population(UID) is None


def test_where_there_is_no_kubepods_it_is_not_looked_for_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question about each pod would cost a walk through all cgroups of the host."""
    found = PodCgroups(os.fsencode(tmp_path))
    looks = []
    whole = PodCgroups.look

    def look(self: PodCgroups) -> None:
        looks.append(1)
        whole(self)
        self._not_before += 60_000_000

    monkeypatch.setattr(PodCgroups, "look", look)
    for _ in range(5):
        assert found.paths(UID) == []
    assert len(looks) <= 1

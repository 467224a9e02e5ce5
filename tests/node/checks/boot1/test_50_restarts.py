"""Whatever happens to hostd, to systemd and to the bus: VMs that live keep their layers, those that die lose them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.node.checks.documents import follow
from tests.node.checks.hostd import inhibit, reaches, released
from tests.node.checks.node import PACKAGES, UNIT, get, main_pid, prop, run, until, versions
from tests.node.checks.pods import Pod, Qemu, Volume

#: Of the message catalog.
_VM_EXITED = "eda9e34bc70a44eb972b304983834da7"


class Trio:
    """Three VMs, one of which dies while something happens."""

    def __init__(self) -> None:
        self.volume = Volume(f"trio-{os.urandom(2).hex()}")
        self.pods = [Pod(f"vm{number}") for number in range(3)]
        self.qemus: list[Qemu] = []
        for pod in self.pods:
            pod.hotplug_file("data", self.volume.file)
            self.qemus.append(pod.fake_qemu())
        for pod in self.pods:
            reaches(pod, "running")

    def check(self) -> None:
        """The second one is released, the others are as they were."""
        released(self.pods[1])
        for number in (0, 2):
            reaches(self.pods[number], "running")
            assert self.pods[number].mounted == ["data.img"]
            path = f"/io/kubevirt/hostd1/vm/{_escaped(self.pods[number].uid)}"
            assert get("Leader", path, "io.kubevirt.hostd1.VM") == self.qemus[number].pid

    def end(self) -> None:
        """The others die too, and nothing is left."""
        for qemu in self.qemus:
            qemu.kill()
        for pod in self.pods:
            released(pod)
        self.volume.discard()
        until(lambda: self.volume.free, f"{self.volume.device} is free")


def _escaped(label: str) -> str:
    """As sd_bus_path_encode does."""
    return "".join(
        c if c.isalpha() or (c.isdigit() and position) else f"_{ord(c):02x}" for position, c in enumerate(label)
    )


@pytest.fixture
def trio() -> Iterator[Trio]:
    made = Trio()
    yield made
    made.end()


def _kill9() -> None:
    os.kill(main_pid(), signal.SIGKILL)


def _action(*command: str) -> Callable[[], None]:
    return lambda: (run(*command), None)[1]


@pytest.mark.parametrize(
    ("happens", "same_process"),
    [
        pytest.param(lambda: follow("docs/operating.md", "Upgrade, restart"), False, id="restart"),
        pytest.param(_kill9, False, id="kill -9"),
        pytest.param(_action("systemctl", "daemon-reload"), True, id="daemon-reload"),
        pytest.param(_action("systemctl", "daemon-reexec"), True, id="daemon-reexec"),
        pytest.param(_action("systemctl", "restart", "dbus.service"), True, id="restart of dbus"),
        pytest.param(_action("systemctl", "reload", UNIT), True, id="reload"),
    ],
)
def test_living_vms_keep_their_layers(trio: Trio, happens: Callable[[], object], same_process: bool) -> None:
    pid, ended = main_pid(), _ended()
    happens()
    until(lambda: prop("ActiveState") == "active" and main_pid(), "hostd is active")
    assert _ended() == ended, "none before the kill"
    trio.qemus[1].kill()
    trio.check()
    until(lambda: _ended() > ended, "it is told")
    assert _ended() == ended + 1, "and no more than that one"
    assert (main_pid() == pid) is same_process


@pytest.mark.parametrize("step", ["+60 minutes", "-2 hours", "+1 hour"], ids=["on", "back", "restored"])
def test_a_step_of_the_clock_is_nobodys_death(trio: Trio, step: str) -> None:
    """Start times that were turned into wall-clock time made a living process look like another."""
    run("systemctl", "stop", UNIT)
    run("date", "--set", step)
    run("systemctl", "start", UNIT)
    for pod in trio.pods:
        reaches(pod, "running")
        assert pod.mounted == ["data.img"]
    trio.qemus[1].kill()
    trio.check()


def _ended() -> int:
    """How many VMs' ends hostd has told of in this boot."""
    told = run("journalctl", "--no-pager", "--quiet", "--boot", "--output=cat", f"MESSAGE_ID={_VM_EXITED}").stdout
    return len(told.splitlines())


def test_a_vm_that_dies_while_hostd_is_away_is_cleaned_up_later(trio: Trio) -> None:
    run("systemctl", "stop", UNIT)
    trio.qemus[1].kill()
    assert trio.pods[1].mounted == ["data.img"]
    run("systemctl", "start", UNIT)
    trio.check()


def test_an_upgrade_loses_no_layer_and_no_handle(trio: Trio) -> None:
    """The inhibitor that an agent holds is still good for the next version."""
    older, newer = versions()
    assert get("Version") == older
    handle = inhibit(trio.pods[1], "node", "upgrade")
    trio.qemus[1].kill()
    reaches(trio.pods[1], "held")
    follow("docs/install.md", "Debian and its kin", directory=PACKAGES)
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    until(lambda: get("Version") == newer, f"hostd is {newer}")
    reaches(trio.pods[1], "held")
    assert trio.pods[1].mounted == ["data.img"]
    os.close(handle)
    trio.check()
    assert prop("NRestarts") == "0", "an upgrade is one restart, and no crash"

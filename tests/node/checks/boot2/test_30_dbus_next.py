"""With python3-dbus-next as the only bus library: the package's other choice."""

from __future__ import annotations

import os
from pathlib import Path

from tests.node.checks.hostd import inhibit, reaches, released
from tests.node.checks.node import MANAGER, NAME, UNIT, call, main_pid, prop, run, until
from tests.node.checks.pods import Pod, Volume


def test_hostd_can_do_without_dbus_fast() -> None:
    """apt takes the one away and leaves hostd, whose dependency the other meets."""
    run("apt-get", "remove", "--yes", "python3-dbus-fast", timeout=300)
    assert not Path("/usr/lib/python3/dist-packages/dbus_fast").exists()
    assert run("dpkg-query", "-W", "-f", "${db:Status-Abbrev}", "hostd").stdout.strip() == "ii"
    run("systemctl", "restart", UNIT)
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    call("ListVMs")
    assert "ListVMs" in run("busctl", "--timeout=30", "introspect", NAME, MANAGER).stdout


def test_a_members_change_is_polkits_question() -> None:
    done = call("Sweep", "t", "0", user="member", check=False)
    assert "denied" in done.stderr.lower() or "authori" in done.stderr.lower(), done.stderr


def test_a_vms_whole_story() -> None:
    """With a descriptor over the bus, which holds the clean-up over a restart of hostd."""
    volume, pod = Volume("next"), Pod("next")
    pod.hotplug_file("data", volume.file)
    qemu = pod.fake_qemu()
    reaches(pod, "running")
    handle = inhibit(pod, "node", "dbus-next")
    qemu.kill()
    reaches(pod, "held")
    pid = main_pid()
    run("systemctl", "restart", UNIT)
    reaches(pod, "held")
    assert main_pid() != pid
    os.close(handle)
    released(pod)
    volume.discard()
    until(lambda: volume.free, f"{volume.device} is free")
    run("hostctl", "list")

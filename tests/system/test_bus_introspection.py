"""Every object, walked by busctl and gdbus: no error, no warning, and what is shown is the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hostd.bus import contract, names
from tests.support.bus import adapter_on, busctl, gdbus, staged
from tests.support.fake_service import pod_uid, vm

OBJECTS = {
    names.ROOT: names.MANAGER,
    names.vm_path(pod_uid(1)): names.VM,
    names.HELPER_PATH: names.HELPER,
    names.LOG_CONTROL_PATH: names.LOG_CONTROL,
}


@pytest.fixture(autouse=True)
def bus_library(dbus_library: str) -> Iterator[str]:
    with adapter_on(dbus_library) as name:
        yield name


async def test_busctl_introspect() -> None:
    async with staged(vm(1)) as (bus, _):
        for path, interface in OBJECTS.items():
            done = await busctl(bus, "introspect", names.BUS_NAME, path, interface)
            assert (done.code, done.error) == (0, "")
            shown = {line.split()[0].lstrip(".") for line in done.out.splitlines()[1:] if line.startswith(".")}
            wanted = contract.contract()[interface]
            assert shown == {*wanted.methods, *wanted.properties, *wanted.signals}


async def test_busctl_shows_what_changes() -> None:
    async with staged(vm(1)) as (bus, _):
        done = await busctl(bus, "introspect", names.BUS_NAME, names.ROOT, names.MANAGER)
        flags = {line.split()[0]: line.split()[-1] for line in done.out.splitlines() if " property " in line}
        assert (flags[".Version"], flags[".Health"], flags[".NVMs"]) == ("const", "emits-change", "-")


async def test_trees_are_clean() -> None:
    async with staged(vm(1), vm(2)) as (bus, _):
        done = await busctl(bus, "tree", names.BUS_NAME)
        assert (done.code, done.error) == (0, "")
        for path in (*OBJECTS, names.vm_path(pod_uid(2))):
            assert path in done.out
        done = await gdbus(bus, "introspect", "--recurse", "--dest", names.BUS_NAME, "--object-path", "/")
        assert (done.code, done.error) == (0, "")
        assert done.out.count("interface io.kubevirt.hostd1.VM {") == 2


async def test_vms_that_go_while_the_tree_is_walked() -> None:
    async with staged(*(vm(number, layers=0) for number in range(1, 200))) as (bus, service):
        walking = asyncio.create_task(
            gdbus(bus, "introspect", "--recurse", "--dest", names.BUS_NAME, "--object-path", names.VM_PREFIX)
        )
        for number in range(1, 200, 2):
            service.remove(pod_uid(number))
            await asyncio.sleep(0.002)
        done = await walking
        # gdbus stops at a vanished object, by its right name.
        assert done.error == "" or "UnknownObject" in done.error


async def test_signals_as_busctl_sees_them() -> None:
    async with staged(vm(1)) as (bus, service):
        monitor = await asyncio.create_subprocess_exec(
            "busctl", f"--address={bus.address}", "monitor", "--json=short", names.BUS_NAME,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert monitor.stdout is not None
        assert monitor.stderr is not None
        await asyncio.wait_for(monitor.stderr.readline(), 20)
        service.change(pod_uid(1), name="seen")
        line = b""
        while b"PropertiesChanged" not in line:
            line = await asyncio.wait_for(monitor.stdout.readline(), 20)
            assert line, "busctl monitor ended"
        assert b"seen" in line
        assert names.vm_path(pod_uid(1)).encode() in line
        monitor.terminate()
        await monitor.communicate()

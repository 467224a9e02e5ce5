"""The demo's story; see the package. Exit status 0 only if every claim on the page was true."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

from tests.demo.page import Page
from tests.demo.watch import Machine, Timeline, Witness, start_time
from tests.support.node import MANAGER, NAME, VM_INTERFACE, Node
from tests.support.pod import Pod
from tests.support.qemu import PROGRAM, Launcher, RealQemu
from tests.support.wait import TimedOut, until

_SIGNAL = int(signal.SIGKILL)


def main() -> int:
    """Tells the story."""
    page = Page()
    if os.geteuid() != 0:
        print("make demo needs root: it makes mounts and cgroups (in namespaces of its own)", file=sys.stderr)
        return 2
    # Asked to end in the middle, it takes everything away as at its end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    page.title("hostd: a VM dies while no agent is there, and its layers go")
    before = Machine.look()
    with Node(settings={"cleanup": {"grace": "2s", "settle": "10s"}}) as node:
        try:
            during = tell(page, node)
        except AssertionError as error:
            page.check(False, f"the story went on to its end: {error}")
            during = Machine.look()
    leave(page, node, before, during)
    return page.verdict("All of that was true, and nothing is left of it.")


def tell(page: Page, node: Node) -> Machine:
    """The story on one node; the machine as it was in the middle of it."""
    start(page, node)
    pod = lay_out(page, node)
    launcher, qemu = boot(page, node, pod)
    show_running(page, node, pod, qemu)
    during = Machine.look()
    kill(page, node, pod, launcher, qemu)
    show_released(page, node, pod)
    page.check(node.hostd.stop() == 0, "hostd stops when it is asked to")
    return during


def start(page: Page, node: Node) -> None:
    """hostd on an empty node."""
    page.step(
        "A node, and hostd on it",
        "A private mount namespace stands for PID 1's, a tmpfs for /var/lib/kubelet, a cgroup for kubepods, and a"
        " dbus-daemon of its own for the system bus. hostd gets a configuration file and a bus address, no more.",
    )
    began = time.monotonic()
    node.hostd.start()
    took = (time.monotonic() - began) * 1000
    page.command("hostd --config hostd.toml", f"READY=1 after {took:.0f} ms   STATUS={node.hostd.status}")
    page.check(node.call("ListVMs") == [], "hostd knows no VM")


def lay_out(page: Page, node: Node) -> Pod:
    """The pod as kubelet and virt-handler leave it."""
    pod = node.pod(name="fedora", namespace="demo")
    page.step(
        "A launcher pod, as kubelet and virt-handler would make it",
        "A containerDisk and kernel-boot files out of a container's overlay, a hotplugged disk and a whole"
        " hotplugged volume from PVCs, and virt-handler's own records of them. Nobody tells hostd.",
    )
    pod.containerdisk(0)
    pod.kernel_boot()
    pod.hotplug_file("data", pvc="ext4" if os.path.exists("/dev/loop-control") else "tmpfs")
    pod.hotplug_directory("dump")
    pod.write_records()
    page.say(f"The mount table below {node.kubelet.decode()}/pods:")
    page.table(rows(node, pod))
    page.check(len(pod.mounted()) == 5, "five layers are mounted for the pod")
    return pod


def rows(node: Node, pod: Pod) -> list[list[str]]:
    """The pod's rows of the mount table, the long common part of the paths cut out."""
    found = []
    for row in node.rows(pod.directory + b"/"):
        fields, _, tail = row.partition(" - ")
        number, _, device, root, target = fields.split()[:5]
        short = f"…/pods/{pod.uid[:8]}…/{'/'.join(target.rsplit('kubernetes.io~empty-dir/', 1)[1:])}"
        found.append([number, short, "←", f"{tail.split()[0]} {device}", root])
    return found


def boot(page: Page, node: Node, pod: Pod) -> tuple[Launcher, RealQemu]:
    """A real QEMU that uses them."""
    page.step(
        "A VM",
        "QEMU in software emulation, paused, in the pod's cgroup and a slave of the node's mounts; beside it a"
        " process that looks like virt-launcher.",
    )
    launcher = pod.launcher()
    qemu = pod.qemu(RealQemu)
    short = f"{PROGRAM} -name guest=demo_fedora,debug-threads=on -kernel …/vmlinuz -blockdev …/disk_0.img …"
    page.command(short, f"pid {qemu.pid}, comm {qemu.name}, launcher {launcher.pid}")
    with open(f"/proc/{qemu.pid}/cgroup") as file:
        page.lines(sorted({line.strip() for line in file if "kubepods" in line}))
    return launcher, qemu


def show_running(page: Page, node: Node, pod: Pod, qemu: RealQemu) -> None:
    """What the bus says of a VM that nobody registered."""
    page.step("hostd has found it by itself", "From the mount table and the cgroup; names from the command line.")
    try:
        until(lambda: node.states() == {pod.uid: "running"} and len(node.layers(pod)) == 5)
    except TimedOut:
        page.lines(node.hostd.log().splitlines()[-20:])
    [row] = node.call("ListVMs") or [[""] * 7]
    busctl(page, node, pod, "call", NAME, MANAGER, NAME + ".Manager", "ListVMs")
    busctl(page, node, pod, "call", NAME, MANAGER, NAME + ".Manager", "ListLayers", "a{sv}", "0")
    page.check(row[:1] + row[2:6] == [pod.uid, "demo", "fedora", "running", qemu.pid], "the bus lists it as running")
    layers = node.layers(pod)
    page.check(
        set(layers) == {os.fsdecode(target) for target in pod.targets} and set(layers.values()) == {"mounted"},
        "and all five layers as mounted",
    )


def busctl(page: Page, node: Node, pod: Pod, *arguments: str) -> None:
    """A busctl command and its output: a line for each row, the long common part of the paths cut out."""
    output = node.busctl(*arguments).stdout
    output = output.replace(f' "{pod.uid}" ', f'\n  "{pod.uid[:8]}…" ')
    output = re.sub(r'"/[^ "]*kubernetes\.io~empty-dir/', '"…/', output)
    page.command("busctl " + " ".join(arguments), output)


def kill(page: Page, node: Node, pod: Pod, launcher: Launcher, qemu: RealQemu) -> None:
    """The death, and what the witness saw."""
    page.step(
        "QEMU is killed, and there is no virt-handler to clean up",
        "As when a node evicts: the launcher first. With nothing left in the pod's cgroup, hostd waits for no grace.",
        "A witness watches QEMU's pidfd and the mount table; it does not ask hostd.",
    )
    launcher.kill()
    with Witness(node.namespace.mountinfo, pod.directory + b"/") as witness:
        timeline = witness.kill(qemu.pidfd)
    qemu.reap()
    page.command(f"kill -KILL {launcher.pid}; kill -KILL {qemu.pid}", "")
    page.table([[f"{timeline.died or 0:8.2f} ms", "QEMU is dead"], *events(timeline)])
    took = f"{timeline.took - (timeline.died or 0):.2f} ms after the death"
    page.check(not timeline.left, f"all layers are gone{'' if timeline.left else f', {took}'}")
    if timeline.left:
        page.lines(node.hostd.log().splitlines()[-20:])


def events(timeline: Timeline) -> list[list[str]]:
    """The witness's notes, in order."""
    return [
        [f"{when:8.2f} ms", f"gone: {os.fsdecode(target).rpartition('kubernetes.io~empty-dir/')[2]}"]
        for target, when in sorted(timeline.gone.items(), key=lambda item: item[1])
    ]


def show_released(page: Page, node: Node, pod: Pod) -> None:
    """What the bus, the journal and the node's own mount table say afterwards."""
    page.step("Afterwards")
    until(lambda: node.states().get(pod.uid) == "released", deadline=5, why="the bus says: released")
    path = node.vm(pod)
    output = node.busctl("introspect", NAME, path, VM_INTERFACE).stdout
    shown = (".State ", ".VMIUID ", ".Exit", ".ReleasedUSec ", ".Error ")
    lines = [line[: line.rfind("  ")].rstrip() for line in output.splitlines() if line.startswith(shown)]
    page.command(f"busctl introspect {NAME} {path} {VM_INTERFACE}", "\n".join([*lines, "…"]))
    page.say("hostd's lines, as they would be in the journal:")
    page.lines(line for line in node.hostd.log().splitlines() if pod.uid in line)
    page.say(f"The mount table below {node.kubelet.decode()}/pods:")
    page.table(rows(node, pod) or [["(nothing)"]])
    page.check(not pod.mounted(), "the mount table has no layer of the pod any more")
    page.check(node.get("State", path) == "released" and not node.get("Error", path), "the bus says: released")
    reason, number = node.get("ExitReason", path), node.get("ExitSignal", path)
    # Kernels before 6.15 do not tell how a process ended that somebody else has reaped.
    page.check((reason, number) in [("signal", _SIGNAL), ("unknown", -1)], f"and why it ended: {reason} {number}")
    page.check(not os.listdir(node.outside(pod.hotplug_disks)), "the empty mountpoints are removed")
    kernel_boot = node.outside(pod.container_disks + b"/kernel-boot")
    page.check(os.path.isdir(kernel_boot), "kernel-boot/ stays, as KubeVirt needs")
    page.check(node.hostd.said(pod.uid, "released"), "the journal tells of it")


def leave(page: Page, node: Node, before: Machine, during: Machine) -> None:
    """The machine is as it was."""
    page.step("The machine")
    after = Machine.look()
    page.check(after.mount_table == before.mount_table, "/proc/1/mountinfo is as it was, byte for byte")
    ours = during.processes - before.processes
    left = [str(pid) for pid, started in ours if start_time(pid) == started]
    page.check(not left, f"none of its {len(ours)} processes is left {' '.join(left)}".rstrip())
    page.check(not os.path.exists(node.cgroups.root), "the cgroup is removed")
    base = os.fsdecode(node.namespace.base)
    page.check(not any(base in loop for loop in after.loop_devices), "no loop device is left")
    page.check(not os.path.exists(base) and not os.path.exists(node.directory), "no file is left")


if __name__ == "__main__":
    sys.exit(main())

"""The demo's witness sees what happens, and only that."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable

import pytest

from tests.demo.page import Page
from tests.demo.watch import Machine, Witness
from tests.support.mountns import Child, enter, umount
from tests.support.node import Node
from tests.support.qemu import FakeQemu
from tests.support.wait import until


def unmounted(target: bytes) -> bool:
    """Whether it could be unmounted now."""
    try:
        umount(target)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


@pytest.mark.usefixtures("root")
def test_the_witness_notes_the_death_and_then_each_layer() -> None:
    with Node() as node:
        pod = node.pod()
        first, second = pod.containerdisk(), pod.hotplug_file("data")
        qemu = pod.qemu(FakeQemu)

        def clean(tell: Callable[[object], None]) -> None:
            enter(node.namespace.path)
            pidfd = os.pidfd_open(qemu.pid)
            tell("watching")
            select.select([pidfd], [], [])
            for target in (first, second):
                # Somebody who looks through all of /proc may have it in hand for a moment.
                until(lambda target=target: unmounted(target))  # type: ignore[misc]

        with Child(clean) as cleaner, Witness(node.namespace.mountinfo, pod.directory + b"/") as witness:
            cleaner.hear()
            assert witness.there() == {first, second}
            timeline = witness.kill(qemu.pidfd)
        assert not timeline.left
        assert timeline.died is not None
        assert 0 < timeline.died <= timeline.gone[first] <= timeline.gone[second] == timeline.took


@pytest.mark.usefixtures("root")
def test_a_machine_is_described_by_its_table_and_our_processes() -> None:
    before = Machine.look()
    with FakeQemu(children=1) as qemu:
        new = {pid for pid, _ in Machine.look().processes - before.processes}
        assert new == {qemu.pid, *qemu.children}


def test_one_claim_that_is_not_true_fails_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page()
    page.check(1, "water is wet")
    assert page.verdict("fine") == 0
    page.check([], "the moon is cheese")
    assert page.verdict("fine") == 1
    said = capsys.readouterr().out
    assert "✔ water is wet" in said
    assert "NOT TRUE: the moon is cheese" in said
    assert said.rstrip().endswith("The demo failed: the moon is cheese")

"""hostd(8)'s exit statuses, each by a daemon that ends with it."""

from __future__ import annotations

import os

from tests.support.man import ManPage
from tests.support.node import Node


def documented() -> set[int]:
    return {int(tag) for tag, _ in ManPage("hostd.8").section("EXIT STATUS").tagged()}


def test_told_to_stop_it_is_0(node: Node) -> None:
    node.hostd.start()
    assert node.hostd.stop() == 0
    assert 0 in documented()


def test_without_a_directory_to_run_in_it_is_1_with_a_reason(node: Node) -> None:
    node.configure({"host": {"runtime-dir": os.path.join(node.configuration, "below-a-file")}})
    assert node.hostd.run_to_its_end() == 1
    assert node.hostd.said("hostd cannot run", "below-a-file")
    assert 1 in documented()


def test_beside_another_one_in_its_directory_it_is_75(node: Node) -> None:
    node.hostd.start()
    second = node.daemon()
    assert second.run_to_its_end() == 75, second.log()
    assert second.said("runs already", str(node.hostd.pid)), second.log()
    assert 75 in documented()


def test_beside_another_one_on_its_bus_it_is_75(node: Node) -> None:
    node.hostd.start()
    node.configure({"host": {"runtime-dir": os.path.join(node.directory, "run2")}})
    second = node.daemon()
    assert second.run_to_its_end() == 75
    assert second.said("another hostd runs on this bus")


def test_with_a_configuration_that_cannot_be_used_it_is_78(node: Node) -> None:
    node.configure({"cleanup": {"grace": "soon"}})
    assert node.hostd.run_to_its_end() == 78
    assert node.hostd.said(node.configuration, "cleanup.grace")
    assert 78 in documented()

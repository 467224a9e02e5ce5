"""Which VM is meant, and that a doubt is told."""

from __future__ import annotations

import pytest

from hostd.client.model import VM, Layer
from hostd.ctl.names import Ambiguous, completions, find_layer, find_vm, find_vms
from hostd.errors import HostdError, NoSuchVM
from tests.support.fake_service import pod_uid

DB = VM("6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77", "11111111-aaaa-4b6e-9d53-2f1f0d3c1a77", "shop", "db", "running")
OLD = VM("6f1d9999-0c5a-4b6e-9d53-2f1f0d3c1a77", "11111111-aaaa-4b6e-9d53-2f1f0d3c1a77", "shop", "web", "released")
NEW = VM("abcd0000-0c5a-4b6e-9d53-2f1f0d3c1a77", "22222222-aaaa-4b6e-9d53-2f1f0d3c1a77", "shop", "web", "running")
TEST = VM("abcd1111-0c5a-4b6e-9d53-2f1f0d3c1a77", "", "test", "db", "running")
NAMELESS = VM(pod_uid(1))
ALL = [DB, OLD, NEW, TEST, NAMELESS]


@pytest.mark.parametrize(
    ("given", "vm"),
    [
        (DB.pod_uid, DB),
        (DB.pod_uid.upper(), DB),
        ("shop/db", DB),
        ("test/db", TEST),
        ("6f1d8", DB),
        ("6F1D9", OLD),
        (NEW.vmi_uid, NEW),
        (pod_uid(1), NAMELESS),
    ],
)
def test_one_is_meant(given: str, vm: VM) -> None:
    assert find_vm(ALL, given) is vm


@pytest.mark.parametrize(
    ("given", "candidates"),
    [("db", [DB, TEST]), ("shop/web", [OLD, NEW]), ("6f1d", [DB, OLD]), ("abcd", [NEW, TEST]), (DB.vmi_uid, [DB, OLD])],
)
def test_several_could_be_meant(given: str, candidates: list[VM]) -> None:
    with pytest.raises(Ambiguous) as raised:
        find_vm(ALL, given)
    for vm in candidates:
        assert vm.pod_uid in str(raised.value)
        assert vm.state in str(raised.value)


@pytest.mark.parametrize("given", ["", "6f", "shop/", "/", "nobody", "shop/nobody", "*"])
def test_none_is_meant(given: str) -> None:
    with pytest.raises(NoSuchVM, match="hostctl list"):
        find_vm(ALL, given)


@pytest.mark.parametrize("given", ["shop/wab", "webb", "hop", "shop/we"])
def test_what_looks_alike_is_hinted_at(given: str) -> None:
    with pytest.raises(NoSuchVM, match=r"perhaps .*shop/web"):
        find_vm(ALL, given)


def test_a_slip_gets_a_hint() -> None:
    with pytest.raises(NoSuchVM, match="perhaps shop/db, test/db"):
        find_vm(ALL, "default/db2")


def test_each_once() -> None:
    assert find_vms(ALL, ["shop/db", DB.pod_uid, "test/db"]) == [DB, TEST]


def layer(volume: str, target: str) -> Layer:
    return Layer("7", target, "hotplug-file", volume, "busy", "")


def test_a_layer_by_volume_target_or_its_end() -> None:
    data, kernel = layer("data", "/k/hotplug-disks/data.img"), layer("vmlinuz", "/k/kernel-boot/vmlinuz")
    assert find_layer([data, kernel], "data") is data
    assert find_layer([data, kernel], "data.img") is data
    assert find_layer([data, kernel], kernel.target) is kernel
    with pytest.raises(HostdError, match="data, vmlinuz"):
        find_layer([data, kernel], "none")
    with pytest.raises(Ambiguous):
        find_layer([data, layer("data", "/k/container-disks/data.img")], "data")


def test_completions_offer_names_and_pod_uids() -> None:
    assert completions(ALL)[:3] == ["shop/db", "shop/web", "test/db"]
    assert set(completions(ALL)[3:]) == {vm.pod_uid for vm in ALL}

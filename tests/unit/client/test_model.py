"""Values of the bus as typed ones, and as JSON."""

from __future__ import annotations

import json
from dataclasses import fields

from hostd.bus import library, names
from hostd.bus.contract import contract
from hostd.client import model
from hostd.client.model import VM, Device, Helper, Holder, Inhibitor, Layer, Status


def test_every_property_of_the_contract_has_its_field() -> None:
    for interface, known, kind in (
        (names.VM, model.VM_FIELDS, VM),
        (names.MANAGER, model.STATUS_FIELDS, Status),
        (names.HELPER, model.HELPER_FIELDS, Helper),
    ):
        assert set(contract()[interface].properties) - {"PodUID"} == set(known)
        assert set(known.values()) == {field.name for field in fields(kind)} - {"pod_uid"}


def test_a_vm_is_read() -> None:
    vm = model.vm_of(
        "7",
        {
            "State": library.variant("s", "blocked"),
            "GraceUSec": library.variant("t", 2**64 - 1),
            "Layers": library.variant("a(sssss)", [["/a\\x0ab", "containerdisk", "a", "busy", "no"]]),
            "Inhibitors": library.variant("a(ss)", [["me", "why"]]),
            "Devices": library.variant("as", ["usb/1-2"]),
            "FromTheFuture": library.variant("s", "x"),
        },
    )
    assert vm.grace_usec is None
    assert vm.layers == (Layer("7", "/a\\x0ab", "containerdisk", "a", "busy", "no"),)
    assert vm.layers[0].path == b"/a\nb"
    assert vm.unreleased == vm.layers
    assert vm.inhibitors == (Inhibitor("me", "why"),)
    assert vm.devices == ("usb/1-2",)


def test_a_vm_is_called_by_its_name_where_it_has_one() -> None:
    assert str(VM("7", namespace="shop", name="db")) == "shop/db (7)"
    assert str(VM("7")) == "7"
    assert VM("7").full_name == ""


def test_a_holder_in_words() -> None:
    assert str(Holder(42, "cat", "open", "7")) == "cat[42] of pod 7 (open)"
    assert str(Holder(0, "loop0", "loop", "")) == "loop0 (loop)"


def test_plain_is_what_json_holds() -> None:
    vm = VM("7", layers=(Layer("7", "/t", "containerdisk", "a", "busy", ""),), devices=("pci/x", "usb/1-2"))
    data = json.loads(json.dumps(model.plain(vm)))
    assert data["layers"][0]["target"] == "/t"
    assert data["devices"] == ["pci/x", "usb/1-2"]
    assert data["grace_usec"] is None
    assert data["inhibitors"] == []
    assert model.plain([Device("usb/1-2", "usb", "", "", "free", "")])[0]["device"] == "usb/1-2"


def test_health_is_an_object_in_json_also_when_it_is_empty() -> None:
    assert model.plain(Status(health=(("state", "cannot be saved"),)))["health"] == {"state": "cannot be saved"}
    assert model.plain(Status())["health"] == {}

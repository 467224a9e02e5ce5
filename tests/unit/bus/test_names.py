"""Object paths, held to systemd's own encoding."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.bus import names
from hostd.errors import UnknownObject


@pytest.mark.parametrize(
    ("label", "escaped"),
    [
        ("", "_"),
        ("_", "_5f"),
        ("abc", "abc"),
        ("1abc", "_31abc"),
        ("a1", "a1"),
        ("a-b", "a_2db"),
        ("ä", "_c3_a4"),
        ("0000", "_30000"),
        ("a/b", "a_2fb"),
    ],
)
def test_as_sd_bus_path_encode(label: str, escaped: str) -> None:
    assert names.escape_label(label) == escaped
    assert names.unescape_label(escaped) == label


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_every_label_comes_back(label: str) -> None:
    assert names.unescape_label(names.escape_label(label)) == label


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_systemd_says_the_same(label: str) -> None:
    systemd = ctypes.CDLL(ctypes.util.find_library("systemd") or pytest.skip("no libsystemd"))
    path = ctypes.c_char_p()
    assert systemd.sd_bus_path_encode(b"/p", label.encode(), ctypes.byref(path)) >= 0
    assert path.value is not None
    assert path.value.decode() == f"/p/{names.escape_label(label)}"


@pytest.mark.parametrize("label", ["1a", "a_2", "a_2D", "a-b", "_61", "a__", "ä", "_ff"])
def test_a_label_that_nobody_made(label: str) -> None:
    with pytest.raises(UnknownObject):
        names.unescape_label(label)


@pytest.mark.parametrize("path", ["/", names.ROOT, names.VM_PREFIX, names.VM_PREFIX + "/", names.VM_PREFIX + "/a/b"])
def test_no_vm_lives_there(path: str) -> None:
    with pytest.raises(UnknownObject):
        names.pod_uid_of(path)


def test_a_vms_path() -> None:
    uid = "6f1d8f2e-0c5a-4b6e-9d53-2f1f0d3c1a77"
    assert names.vm_path(uid) == "/io/kubevirt/hostd1/vm/_36f1d8f2e_2d0c5a_2d4b6e_2d9d53_2d2f1f0d3c1a77"
    assert names.pod_uid_of(names.vm_path(uid)) == uid

"""Names of devices."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.devices.device import device_name, order
from hostd.errors import InvalidArgs

GOOD = [
    "pci/0000:3b:00.0",
    "pci/10000:01:00.7",
    "mdev/a297db4a-f4c2-11e6-90f6-d3b88d6c9525",
    "usb/1-2",
    "usb/2-1.4.3",
]


@pytest.mark.parametrize("name", GOOD)
def test_good_names(name: str) -> None:
    assert device_name(name) == name


def test_letters_may_be_capital() -> None:
    assert device_name("PCI/0000:3B:00.0") == "pci/0000:3b:00.0"


@pytest.mark.parametrize(
    "name",
    [
        *("", "pci", "pci/", "pci/..", "pci/0000:3b:00.0/..", "pci/0000:3b:00.8", "pci/3b:00.0", "pci/0000:3b:00.0 "),
        *("usb/usb1", "usb/1-2:1.0", "usb/1-2\n", "usb/1-2\0", "usb/\u0661-\u0662"),
        *("mdev/../../x", "mdev/a297db4a", "nvme/0", "\u0130/"),
    ],
)
def test_what_is_no_name_leads_nowhere(name: str) -> None:
    with pytest.raises(InvalidArgs, match="no device's name"):
        device_name(name)


@given(st.text(max_size=40))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    try:
        name = device_name(text)
    except InvalidArgs:
        return
    assert device_name(name) == name
    assert ".." not in name


def test_the_order_is_that_of_people() -> None:
    names = ["pci/0000:02:00.0", "pci/0000:10:00.0", "usb/1-2", "usb/1-2.1", "usb/1-2.10", "usb/1-10", "usb/10-1"]
    shuffled = random.Random(1).sample(names, len(names))
    assert sorted(shuffled, key=order) == names

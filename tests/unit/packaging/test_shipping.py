"""What packages, units and the bus say of each other fits together."""

from __future__ import annotations

import re
from configparser import RawConfigParser
from pathlib import Path

import pytest

from hostd.bus.names import BUS_NAME

ROOT = Path(__file__).parents[3]
UNITS = sorted(path for path in (ROOT / "systemd").rglob("*") if path.suffix in {".service", ".socket", ".conf"})


def _words(path: Path, section: str, key: str) -> list[str]:
    parser = RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
    parser.read(path, "utf-8")
    return parser.get(section, key).split()


def test_the_bus_activates_only_what_is_enabled() -> None:
    """It names an alias, which `systemctl enable` makes and `disable` takes away."""
    activation = ROOT / "dbus" / f"{BUS_NAME}.service"
    (unit,) = _words(activation, "D-BUS Service", "SystemdService")
    assert unit == f"dbus-{BUS_NAME}.service"
    assert unit in _words(ROOT / "systemd" / "hostd.service", "Install", "Alias")
    assert _words(activation, "D-BUS Service", "Name") == [BUS_NAME]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_no_unit_names_a_user_that_a_host_may_not_have(unit: Path) -> None:
    """SocketUser=107 ends with 217/USER where nobody has this number: hostd changes the owner itself."""
    assert not re.search(r"^Socket(User|Group)=", unit.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("listing", ["debian/hostd.docs", "rpm/hostd.spec"])
def test_every_page_ships(listing: str) -> None:
    text = (ROOT / "packaging" / listing).read_text("utf-8")
    patterns = re.findall(r"(?<!\S)docs/\S+", text)
    shipped = {path for pattern in patterns for path in ROOT.glob(pattern)}
    assert set((ROOT / "docs").iterdir()) == shipped

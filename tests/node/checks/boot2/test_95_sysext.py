"""On an image-based host: hostd carried by a system extension, as docs/install.md says."""

from __future__ import annotations

from tests.node.checks.documents import follow
from tests.node.checks.node import PACKAGES, get, prop, run, until, versions


def test_an_extension_carries_it() -> None:
    newer = versions()[1]
    follow("docs/install.md", "Image-based hosts", directory=PACKAGES)
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    assert get("Version") == newer
    run("systemctl", "disable", "--now", "hostd")
    run("systemd-sysext", "unmerge")

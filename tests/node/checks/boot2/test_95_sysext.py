"""On an image-based host: hostd carried by a system extension, as docs/install.md says."""

from __future__ import annotations

from tests.node.checks.node import PACKAGES, get, prop, run, until, versions

_MERGE = r"""
cd "$(mktemp -d)"
mkdir -p /var/lib/extensions/hostd/usr/lib/extension-release.d
dpkg-deb -x "$1" x && cp -a x/usr /var/lib/extensions/hostd/
mkdir -p /var/lib/extensions/hostd/usr/lib/systemd/system
cp x/lib/systemd/system/* /var/lib/extensions/hostd/usr/lib/systemd/system/
. /etc/os-release
printf 'ID=%s\nVERSION_ID=%s\n' "$ID" "$VERSION_ID" \
    >/var/lib/extensions/hostd/usr/lib/extension-release.d/extension-release.hostd
systemd-sysext merge
systemd-sysusers hostd.conf && systemd-tmpfiles --create hostd.conf && journalctl --update-catalog
systemctl daemon-reload && systemctl reload dbus && systemctl enable --now hostd
"""


def test_an_extension_carries_it() -> None:
    newer = versions()[1]
    run("sh", "-exc", _MERGE, "merge", str(PACKAGES / f"hostd_{newer}_all.deb"))
    until(lambda: prop("ActiveState") == "active", "hostd is active")
    assert get("Version") == newer
    run("systemctl", "disable", "--now", "hostd")
    run("systemd-sysext", "unmerge")

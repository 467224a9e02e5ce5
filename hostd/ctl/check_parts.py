"""doctor's look at what hostd stands on: configuration, systemd, libraries, qemu-pr-helper, metrics."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from hostd import config as configuration
from hostd.bus import library
from hostd.ctl.findings import Finding, bad, good, note, warning
from hostd.errors import ConfigError
from hostd.prhelper import preflight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hostd.config import Config

_UNIT = "hostd.service"
_ASKED = ("LoadState", "ActiveState", "Result", "NRestarts", "FileDescriptorStoreMax", "WatchdogUSec", "UnitFileState")
#: For a service manager that does not answer (s).
_PATIENCE = 5.0


def configured(file: str | None, running: Sequence[str] | None = None) -> tuple[Config, Finding]:
    """The configuration, or the defaults where it cannot be used.

    `file`: what somebody named; `running`: the files that hostd has read, None where it does not tell.
    """
    area = "configuration"
    try:
        found = configuration.load(file or _of_its_own(running))
    except ConfigError as error:
        return configuration.Config(), bad(area, str(error), "hostd(8) does not start with it; mend the file")
    if running is not None and tuple(running) != found.sources:
        return found, warning(
            area,
            f"hostd runs with {_listed(running)}, and would read {_listed(found.sources)} now",
            "systemctl reload hostd (or restart it, where it was started with --config)",
        )
    return found, good(area, _listed(found.sources))


def _of_its_own(running: Sequence[str] | None) -> str | None:
    """The file of a hostd that was started with --config: the only one, and in none of the usual places."""
    usual = configuration.PLACES
    if running and len(running) == 1 and running[0] not in usual and os.path.dirname(running[0]) not in usual:
        return running[0]
    return None


def _listed(files: Sequence[str]) -> str:
    return ", ".join(files) or "no file: everything has its default"


def check(settings: Config) -> Iterator[Finding]:
    """Everything here."""
    if settings.cleanup.mode == configuration.Mode.OBSERVE:
        yield note(
            "configuration", "observe mode: hostd only says what it would do", 'cleanup.mode = "enforce" lets it act'
        )
    yield from libraries()
    yield from systemd(os.path.isdir("/run/systemd/system"), unit_properties)
    yield from pr_helper(enabled=settings.pr_helper.enabled)
    yield from metrics(settings.metrics.textfile)


def libraries() -> Iterator[Finding]:
    """Which D-Bus library is taken."""
    if library.NAME == "dbus_fast":
        yield good("libraries", "dbus-fast")
    else:
        yield note(
            "libraries", "dbus-next, which is no longer maintained", "install python3-dbus-fast: it is taken then"
        )


def unit_properties() -> Mapping[str, str]:
    """What systemd says of hostd's unit; empty where it does not answer."""
    if shutil.which("systemctl") is None:
        return {}
    command = ["systemctl", "show", _UNIT, "--property", ",".join(_ASKED)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def systemd(booted: bool, ask: object) -> Iterator[Finding]:
    """The unit, and whether descriptors are kept over a restart."""
    area = "systemd"
    if not booted:
        yield note(
            area,
            "systemd does not run here: descriptors are not kept over a restart of hostd (processes are identified "
            "again), and nobody starts it again",
            "let something supervise hostd",
        )
        return
    unit: Mapping[str, str] = ask()  # type: ignore[operator]
    if unit.get("LoadState") != "loaded":
        yield warning(
            area, f"{_UNIT} is not installed ({unit.get('LoadState') or 'no answer'})", "install hostd's package"
        )
        return
    yield _activity(unit)
    if unit.get("UnitFileState") not in ("enabled", "static", "linked", "enabled-runtime"):
        yield warning(
            area, f"{_UNIT} is not started at boot ({unit.get('UnitFileState')})", f"systemctl enable {_UNIT}"
        )
    if int(unit.get("FileDescriptorStoreMax", "0") or 0) > 0:
        yield good(area, "descriptors are kept over a restart (fd store)")
    else:
        yield warning(
            area,
            "no fd store: a VM that ends while hostd restarts is found by looking, and how it ended is not known",
            f"systemctl edit {_UNIT}: [Service] FileDescriptorStoreMax=4096",
        )


def _activity(unit: Mapping[str, str]) -> Finding:
    state, restarts = unit.get("ActiveState", "unknown"), unit.get("NRestarts", "0")
    if state != "active":
        return bad(
            "systemd", f"{_UNIT} is {state} ({unit.get('Result', '')})", f"journalctl -u hostd; systemctl start {_UNIT}"
        )
    if restarts not in ("", "0"):
        return note(
            "systemd", f"{_UNIT} is active, restarted {restarts} times by itself", "journalctl -u hostd tells why"
        )
    return good("systemd", f"{_UNIT} is active")


def pr_helper(*, enabled: bool, places: preflight.Places | None = None) -> Iterator[Finding]:
    """Whether qemu-pr-helper could run here."""
    places = places or preflight.Places()
    found = preflight.Preflight(places).look(places.program, preflight.own_capabilities())
    verdict = preflight.judge(found)
    trouble = verdict.refusal or verdict.failure
    if not trouble:
        yield good("pr-helper", f"{os.fsdecode(found.program)} can run here (multipath: {verdict.multipath})")
    elif enabled:
        yield bad("pr-helper", trouble, "or switch it off: `hostctl pr-helper disable`")
    else:
        yield note(
            "pr-helper", f"switched off; it could not run here: {trouble}", "nothing, unless VMs need reservations"
        )


def metrics(textfile: bytes | None) -> Iterator[Finding]:
    """Whether the textfile can be written."""
    if textfile is None:
        return
    directory = os.path.dirname(textfile)
    if importlib.util.find_spec("prometheus_client") is None:
        yield bad(
            "metrics", "metrics.textfile is set, and prometheus_client is missing", "install python3-prometheus-client"
        )
    elif not os.path.isdir(directory):
        yield bad("metrics", f"{os.fsdecode(directory)} is no directory", "make it, or change metrics.textfile")
    else:
        yield good("metrics", f"written to {os.fsdecode(textfile)}")

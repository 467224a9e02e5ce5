"""The program: sentences and exit codes, whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from hostd.ctl import main as program
from tests.support.bus import Program, private_bus, run, staged
from tests.support.daemon import TREE
from tests.support.fake_service import pod_uid, vm
from tests.support.wait import DEADLINE, eventually

COMMAND = (sys.executable, "-P", "-m", "hostd.ctl.main")


async def hostctl(address: str, *words: str) -> Program:
    return await run(*COMMAND, *words, environment={"DBUS_SYSTEM_BUS_ADDRESS": address, "PYTHONPATH": TREE})


async def test_it_runs(dbus_library: str) -> None:
    async with staged(vm(1)) as (bus, _):
        done = await hostctl(bus.address, "list", "--json")
        assert (done.code, done.error) == (0, "")
        assert json.loads(done.out)[0]["pod_uid"] == pod_uid(1)
        other = await hostctl("unix:path=/nowhere", "--bus", bus.address, "status")
        assert other.code == 0
        assert "\x1b" not in other.out


async def test_errors_are_one_sentence(tmp_path: Path) -> None:
    async with staged(vm(1), vm(2)) as (bus, service):
        for words, code, said in (
            (["show", "nobody"], 1, "no VM nobody"),
            (["show", "0000"], 1, "could be 2 VMs"),
            (["release", "vm1", "--bogus"], 2, "usage"),
            (["release"], 2, "--all"),
            (["hold"], 2, "--all"),
            (["hold", "--all", "--keep"], 2, "--keep"),
            (["devices", "claim", "x", "y"], 1, "hostctl: "),
            (["list", "--bus", f"unix:path={tmp_path}/none"], 1, f"directory: unix:path={tmp_path}/none)"),
            (["list", "--bus", "gibberish"], 1, "the bus cannot be reached"),
        ):
            done = await hostctl(bus.address, *words)
            assert (done.code, done.out) == (code, ""), done
            assert said in done.error
            assert "Traceback" not in done.error
        service.failing["sweep"] = RuntimeError("a slip")
        done = await hostctl(bus.address, "sweep")
        assert done.code == 1
        assert "Traceback" not in done.error


async def test_a_hostd_that_is_not_there_is_told_with_what_to_do() -> None:
    async with private_bus() as bus:
        done = await hostctl(bus.address, "status")
        assert (done.code, done.out) == (1, "")
        assert "systemctl status hostd" in done.error


async def test_doctor_works_without_hostd_and_without_a_bus(tmp_path: Path) -> None:
    done = await hostctl(f"unix:path={tmp_path}/none", "doctor", "--json")
    assert done.code == 3
    findings = json.loads(done.out)
    assert {"mounts", "cgroups", "kernel", "bus", "configuration", "pr-helper"} <= {each["area"] for each in findings}
    assert all(each["to_do"] for each in findings if each["level"] in ("bad", "warning"))
    (bus,) = [each for each in findings if each["area"] == "bus"]
    assert bus["level"] == "bad"


async def test_a_slip_of_ours_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(_: object) -> int:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(program, "_run", broken)
    code = await asyncio.to_thread(program.main, ["list"])
    assert code == 1
    assert "please report" in capsys.readouterr().err


async def test_the_reader_goes() -> None:
    async with staged(*(vm(number) for number in range(1, 400))) as (bus, _):
        words = " ".join([*COMMAND, "list", "--bus", bus.address])
        done = await run("bash", "-c", f"{words} | head -n 1", environment={"PYTHONPATH": TREE})
        assert (done.code, done.error) == (0, "")
        assert done.out.startswith("VM")


@pytest.mark.parametrize("command", ["monitor", "hold vm1", "hold --all --json"])
async def test_an_interrupt_ends_it(command: str) -> None:
    async with staged(vm(1)) as (bus, service):
        words = command.split()
        process = await asyncio.create_subprocess_exec(
            *COMMAND, *words, "--bus", bus.address,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": TREE},
        )  # fmt: skip
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), DEADLINE)
        if "--json" in words:
            assert json.loads(first) == {"pod_uid": "", "why": "asked for with hostctl hold"}
        process.send_signal(signal.SIGINT)
        _, error = await asyncio.wait_for(process.communicate(), DEADLINE)
        assert process.returncode == (130 if command == "monitor" else 0)
        assert error == b""
        service.close()


async def on_terminal(address: str, *words: str, **environment: str) -> str:
    """What it shows on a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, stdout=theirs, stdin=theirs,
        env={**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": address, "PYTHONPATH": TREE, "COLUMNS": "60", **environment},
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    seen = b""

    def read() -> bool:
        nonlocal seen
        try:
            seen += os.read(ours, 65536)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    await eventually(read)
    os.close(ours)
    await process.wait()
    return seen.decode().replace("\r\n", "\n")


async def test_on_a_terminal_there_is_colour_and_it_fits() -> None:
    async with staged(vm(1)) as (bus, _):
        shown = await on_terminal(bus.address, "list", TERM="xterm", NO_COLOR="")
        assert "\x1b[32mrunning\x1b[0m" in shown
        plain = await on_terminal(bus.address, "list", TERM="xterm", NO_COLOR="1")
        assert "\x1b" not in plain
        # As much of the UID as names it.
        assert pod_uid(1)[:8] in plain.split()
        assert all(len(line) <= 60 for line in plain.splitlines())
        assert "\x1b" not in await on_terminal(bus.address, "list", TERM="dumb", NO_COLOR="")

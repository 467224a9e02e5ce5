"""Builds what the node needs, boots it, and tells what came of it: `tests/node/run`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.node import image, machine

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".cache" / "node"
#: The version that the node starts with, older than any that is released: the real one is then an upgrade.
OLDER = "0.0.1"


def main() -> int:
    """Returns the checks' exit code."""
    options = _options()
    results = Path(options.results)
    shutil.rmtree(results, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="hostd-node-") as scratch:
        began = time.monotonic()
        node = image.get(CACHE, HERE / "guest")
        print(f"image: {time.monotonic() - began:.0f} s", flush=True)
        inputs = _inputs(Path(scratch), options.select)
        print(f"packages: {time.monotonic() - began:.0f} s", flush=True)
        code = machine.boot(
            node, inputs, results, seconds=options.seconds - (time.monotonic() - began), scratch=Path(scratch)
        )
        print(f"node: {time.monotonic() - began:.0f} s", flush=True)
    return _report(code, results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/node/run", description=__doc__)
    parser.add_argument("--results", default=str(CACHE / "results"), help="where journal, console and results go")
    parser.add_argument("--seconds", type=float, default=1500, help="give up after this time, all included")
    parser.add_argument("--select", default="", metavar="EXPRESSION", help="only these checks (pytest's -k)")
    return parser.parse_args()


def _inputs(scratch: Path, select: str) -> Path:
    """The archive that goes in: packages, checks, and the helpers that they share with the other tests."""
    packages = scratch / "packages"
    for options in (("--lint",), ("--version", OLDER)):
        subprocess.run([ROOT / "packaging" / "build-deb", "--output", packages, *options], check=True,
                       stdout=sys.stderr)  # fmt: skip
    configuration = scratch / "pytest.ini"
    select_line = f"addopts = -k '{select}'\n" if select else ""
    configuration.write_text(f"[pytest]\nxfail_strict = true\npythonpath = .\n{select_line}")
    archive = scratch / "inputs.tar"
    machine.pack(archive, {
        "start": HERE / "start", "pytest.ini": configuration, "packages": packages,
        "tests/node/checks": HERE / "checks", "tests/support": ROOT / "tests" / "support",
        "docs": ROOT / "docs", "README.md": ROOT / "README.md",
    })  # fmt: skip
    return archive


def _report(code: int, results: Path) -> int:
    for log in sorted(results.glob("boot-*.txt")):
        print(f"--- {log.name}\n{log.read_text()}")
    if code == 124:
        print(f"the node did not finish in time; its console is in {results / 'console.log'}")
    print(f"node test: {'passed' if code == 0 else f'failed ({code})'}; journal and results are in {results}")
    return code


if __name__ == "__main__":
    sys.exit(main())

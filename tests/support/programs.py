"""hostd and hostctl as an installation has them on PATH, of the tree that the tests lie in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MODULES = {"hostd": "hostd.app", "hostctl": "hostd.ctl.main"}


def with_programs(directory: Path, configuration: str = "") -> str:
    """A PATH that begins with `directory`, where the programs are from now on. `configuration`: hostd's."""
    for name, module in _MODULES.items():
        command = [sys.executable, "-P", "-c", f"'import sys; from {module} import main; sys.exit(main())'"]
        if name == "hostd" and configuration:
            command += ["--config", configuration]
        program = directory / name
        program.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        program.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"

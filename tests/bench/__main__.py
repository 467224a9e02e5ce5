"""`make bench`: all figures, as a table and as build/bench.json."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator

from tests.bench import bus, death, pr_helper, reading, scale, standing
from tests.bench.figures import Figure, machine_readable, table

SCENES: dict[str, Callable[[], Iterator[Figure]]] = {
    "death": death.one_vm,
    "scale": scale.crowds,
    "start": standing.starting,
    "idle": standing.idle,
    "detection": standing.detection,
    "table": reading.rows,
    "pr-helper": pr_helper.kills,
    "bus": bus.answers,
}


def main(names: list[str]) -> int:
    """Runs the scenes that are named, or all."""
    unknown = set(names) - SCENES.keys()
    if unknown:
        print(f"no scene {', '.join(sorted(unknown))}; there are: {', '.join(SCENES)}", file=sys.stderr)
        return 2
    # A thousand VMs' pipes and pidfds are this process's.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    figures = [figure for name in names or SCENES for figure in SCENES[name]()]
    print(table(figures))
    os.makedirs("build", exist_ok=True)
    with open("build/bench.json", "w") as file:
        file.write(machine_readable(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

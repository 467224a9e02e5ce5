"""Reads the node's serial console from stdin: all of it goes to a file, and the checks' own lines to stdout."""

from __future__ import annotations

import re
import sys

#: How the console shows what the checks print: systemd puts the program's name before each line.
_LINE = re.compile(rb"(?:^|\])\s*checks\[\d+\]: (.*)$")


def main(path: str) -> None:
    """Copies until the console closes."""
    with open(path, "wb") as log:
        for line in sys.stdin.buffer:
            log.write(line)
            log.flush()
            if found := _LINE.search(line.rstrip(b"\r\n")):
                sys.stdout.buffer.write(b"  " + found[1] + b"\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

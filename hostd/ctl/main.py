"""The program `hostctl`. Whatever goes wrong is a sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import hostd.client
from hostd.ctl import parser
from hostd.ctl.screen import Screen
from hostd.ctl.session import FAILED, USAGE, Session, WrongUsage
from hostd.errors import HostdError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

#: As shells say it of a program that was interrupted.
_INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code. argparse ends wrong usage with 2."""
    options = parser.parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code = asyncio.run(_run(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except WrongUsage as error:
        return _fail(str(error), USAGE)
    except HostdError as error:
        return _fail(str(error))
    except Exception as error:  # noqa: BLE001 - the edge of the program: people get a sentence
        return _fail(f"this should not happen ({type(error).__name__}: {error}); please report it")
    return code


async def _run(options: Namespace) -> int:
    screen = Screen.of_process(as_json=getattr(options, "json", False))
    address = getattr(options, "bus", None)
    if options.run is None:
        return int(await options.run_local(screen, address, options))
    async with hostd.client.connect(address, interactive=screen.asks) as node:
        return int(await options.run(Session(node, screen), options))


def _fail(message: str, code: int = FAILED) -> int:
    print(f"hostctl: {message}", file=sys.stderr)
    return code


def _reader_gone() -> int:
    """`hostctl … | head` is no failure of anybody's; what is left in the buffer must not be tried again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


if __name__ == "__main__":
    sys.exit(main())

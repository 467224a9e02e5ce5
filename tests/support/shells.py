"""The shells' completions, by the shells themselves: what each offers at the end of a line.

    offered("zsh", "hostctl show sh", directory, environment)       # {"shop/db", "shop/web"}

bash and zsh run on a terminal and are asked, by a key, to put all that they would offer into the line, which is then
handed to printf; fish has a command for it.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import termios
from collections.abc import Mapping
from pathlib import Path

from tests.support.daemon import TREE
from tests.support.wait import until

COMPLETIONS = Path(TREE, "packaging/completion")
SHELLS = ("bash", "zsh", "fish")

_PROMPT = "ask me> "
#: M-* is readline's insert-completions.
_BASHRC = f"PS1='{_PROMPT}'; . {COMPLETIONS}/hostctl.bash"
_ZSHRC = f"""
PS1='{_PROMPT}'
fpath=({COMPLETIONS} $fpath)
autoload -Uz compinit && compinit -u -D
all-matches() {{ _main_complete; compstate[insert]=all; compstate[list]= }}
zle -C all-matches complete-word all-matches
bindkey -e '\\e*' all-matches
"""
_TO_START, _TO_END, _COMPLETE = "\x01", "\x05", "\x1b*"


def offered(shell: str, line: str, directory: Path, environment: Mapping[str, str]) -> set[str]:
    """What a shell would offer for the last word of `line`, which holds nothing that a shell would expand."""
    given = {"PATH": os.environ["PATH"], "HOME": str(directory), "TERM": "vt100", "LC_ALL": "C.UTF-8", **environment}
    if shell == "fish":
        return _fish(line, given)
    (directory / ".zshrc").write_text(_ZSHRC)
    (directory / "bashrc").write_text(_BASHRC)
    command = {"bash": ["bash", "--noprofile", "--rcfile", str(directory / "bashrc"), "-i"], "zsh": ["zsh", "-d", "-i"]}
    words = _typed(command[shell], line, directory / "offered", given)
    kept = line.rpartition(" ")[0].split()
    assert words[: len(kept)] == kept
    # Where nothing is offered, what was typed stays as it is.
    return set(words[len(kept) :]) - {line.rpartition(" ")[2]}


def _fish(line: str, environment: Mapping[str, str]) -> set[str]:
    script = f"set fish_complete_path {COMPLETIONS}; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    return {said.partition("\t")[0] for said in done.stdout.splitlines()}


def _typed(command: list[str], line: str, out: Path, environment: Mapping[str, str]) -> list[str]:
    """The words of the line once the shell has completed it."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 400))
    with contextlib.ExitStack() as end:
        end.callback(os.close, ours)
        shell = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        end.callback(shell.wait)
        end.callback(shell.kill)
        os.close(theirs)
        os.set_blocking(ours, False)
        seen = bytearray()

        def read() -> bytes:
            # EIO: the shell has closed its end.
            with contextlib.suppress(BlockingIOError, OSError):
                while data := os.read(ours, 65536):
                    seen.extend(data)
            return bytes(seen)

        until(lambda: _PROMPT.encode() in read(), why=lambda: f"{command[0]}'s prompt; seen: {bytes(seen)!r}")
        os.write(ours, f"{line}{_COMPLETE}{_TO_START}printf '%s\\n' {_TO_END} >{out}; exit\r".encode())
        until(lambda: read() and shell.poll() is not None, why=lambda: f"{command[0]} ends; seen: {bytes(seen)!r}")
    return out.read_text().split()

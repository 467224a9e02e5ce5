"""A kernel without mount events, played by a filter of system calls: what the program asks of it is not implemented.

    python -P tests/support/older_kernel.py hostd --config …       # runs the program with this filter, under this pid

statmount(2) is the call that goes: what hostd tries first, and what the filter of a unit on an older systemd refuses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

COMMAND = (sys.executable, "-P", os.path.abspath(__file__))

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_SECCOMP_RET_ALLOW, _SECCOMP_RET_ERRNO = 0x7FFF_0000, 0x0005_0000
_BPF_LOAD_WORD, _BPF_JUMP_IF_EQUAL, _BPF_RETURN = 0x20, 0x15, 0x06
_STATMOUNT = 457


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def become_older() -> None:
    """From now on this process, and what it starts, has no statmount(2). Needs root."""
    steps = (
        (_BPF_LOAD_WORD, 0, 0, 0),
        (_BPF_JUMP_IF_EQUAL, 0, 1, _STATMOUNT),
        (_BPF_RETURN, 0, 0, _SECCOMP_RET_ERRNO | errno.ENOSYS),
        (_BPF_RETURN, 0, 0, _SECCOMP_RET_ALLOW),
    )
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(steps), code)
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    become_older()
    os.execvp(sys.argv[1], sys.argv[1:])

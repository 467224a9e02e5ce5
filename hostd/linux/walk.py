"""Walking below the kubelet's root, where an unprivileged process may swap any component at any time.

Nothing here follows a symlink or leaves the directory that it starts from: openat2(2) promises that within one call.
Where a seccomp filter hides openat2, the components are opened one by one, each without following.
"""

from __future__ import annotations

import errno
import os
import stat

from hostd.linux import libc

_RULES = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS
#: openat2 answers EAGAIN when a rename or mount elsewhere ran beside it; it then says nothing about the path.
_TRIES = 16


def _components(relative: bytes) -> list[bytes]:
    parts = [part for part in relative.split(b"/") if part not in (b"", b".")]
    if relative.startswith(b"/") or b".." in parts:
        raise OSError(errno.EXDEV, "the path leaves the directory that it starts from", relative)
    if b"\0" in relative:
        raise OSError(errno.EINVAL, "a path cannot hold a NUL byte", relative)
    return parts


def split(relative: bytes) -> tuple[bytes, bytes]:
    """The parent ("." for a single component) and the name of a relative path.

    Raises OSError EXDEV for an absolute path or one with "..", EINVAL for one that has no name ("", ".") or holds NUL.
    """
    parts = _components(relative)
    if not parts:
        raise OSError(errno.EINVAL, "the path names nothing below the directory that it starts from", relative)
    return b"/".join(parts[:-1]) or b".", parts[-1]


def open_beneath(root_fd: int, relative: bytes, flags: int) -> int:
    """A close-on-exec fd of `relative` below `root_fd`, no symlink followed on the way nor at its end.

    Raises OSError: ELOOP (or ENOTDIR) where a symlink stands, EXDEV for a path that would leave, ENOENT, ….
    """
    path = b"/".join(_components(relative)) or b"."
    for _ in range(_TRIES):
        try:
            return libc.openat2(root_fd, path, flags, _RULES)
        except OSError as error:
            if error.errno == errno.ENOSYS:
                return _open_by_steps(root_fd, path, flags)
            if error.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, f"renames ran beside each of {_TRIES} walks", relative)


def _open_by_steps(root_fd: int, path: bytes, flags: int) -> int:
    *parents, name = path.split(b"/")
    here = os.dup(root_fd)
    try:
        for part in parents:
            above, here = here, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(above)
        return _not_a_link(os.open(name, flags | os.O_NOFOLLOW, dir_fd=here), path)
    finally:
        os.close(here)


def _not_a_link(fd: int, path: bytes) -> int:
    # O_PATH | O_NOFOLLOW opens a symlink itself, and succeeds.
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    return fd

"""Owner, mode and label of socket and directory: made right before the helper is called ready, and kept so."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from hostd.log import plain
from hostd.prhelper import path as paths
from hostd.prhelper.path import Ownership

if TYPE_CHECKING:
    from hostd.config import PRHelper
    from hostd.prhelper.path import Inode

log = logging.getLogger(__name__)


class Upkeep:
    """Of the socket of one configuration. `selinux` is a file that exists where SELinux runs."""

    def __init__(self, config: PRHelper, selinux: str) -> None:
        self._path = config.socket
        self._selinux = selinux
        self._trouble = ""
        self.change(config)

    def change(self, config: PRHelper) -> None:
        """Another owner, mode or label, from the next look on."""
        self._want = Ownership(config.owner, config.mode)
        self._wanted_label = config.selinux_label

    @property
    def _label(self) -> str:
        # Asked each time: a policy may be loaded after hostd was started.
        return self._wanted_label if os.path.exists(self._selinux) else ""

    def prepare(self) -> None:
        """The directory, before anything is put there. Raises OSError."""
        changed = paths.prepare_directory(self._path, self._want, self._label)
        if changed:
            log.info("%s of %s set", ", ".join(changed), plain(os.path.dirname(self._path)))

    def correct(self, inode: Inode | None) -> str:
        """Directory and socket as they are to be; what cannot be made right, in words, when that is news.

        It does not end the service: who could connect can still.
        """
        try:
            self.prepare()
            changed = paths.correct_socket(self._path, inode, self._want, self._label) if inode is not None else []
        except OSError as error:
            trouble = f"{plain(self._path)} cannot be given its owner, mode and label: {error.strerror}"
            news, self._trouble = trouble != self._trouble, trouble
            return f"{trouble}; QEMU may not reach the helper" if news else ""
        self._trouble = ""
        if changed:
            log.info("%s of %s set", ", ".join(changed), plain(self._path))
        return ""

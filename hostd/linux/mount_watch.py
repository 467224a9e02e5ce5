"""Notice of changes of a mount table.

The kernel tells of them by EPOLLPRI on an open mountinfo, while asyncio's `add_reader` waits for EPOLLIN, which a
mountinfo always shows. An epoll around it turns the one into the other: an epoll is readable when it has events.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hostd.linux.mount_table import MountTable


class MountWatch:
    """Readable after a mount, umount or move in the table's namespace. The table stays its owner's.

    The kernel forgets a change as soon as anyone has asked for it, and to begin to wait is to ask. So in this order:

    - first `add_reader`, then the first look at the table: a change from before is told to nobody;
    - on each wake `drain`, then a look: a change after `drain` wakes again;
    - one waiter a watch, and one watch a table: another would take the notices away.
    """

    def __init__(self, table: MountTable) -> None:
        self._epoll = select.epoll()
        try:
            self._epoll.register(table.fileno(), select.EPOLLPRI | select.EPOLLERR)
        except BaseException:
            self._epoll.close()
            raise

    def fileno(self) -> int:
        """For `add_reader`."""
        return self._epoll.fileno()

    def drain(self) -> None:
        """Takes the notice away. Whatever comes after it is told anew."""
        # It was forgotten when the waiter woke, so there is as a rule no event left to be seen here.
        self._epoll.poll(0)

    def close(self) -> None:
        """Ends the watch; a second time does nothing."""
        self._epoll.close()

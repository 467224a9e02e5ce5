"""When a helper that died may be started again.

A helper that worked, or that was killed, is replaced at once: its death says nothing of the next one, and every
millisecond without one is a QEMU that waits. There is a bound to that, for a crash that each helper runs into. One that
dies before it was ready gets one more try at once, and then a pause that doubles up to half a minute.
"""

from __future__ import annotations

from typing import Final

_SECOND: Final = 1_000_000
FIRST_USEC: Final = _SECOND // 2
LONGEST_USEC: Final = 30 * _SECOND
#: A helper that was ready this long was well.
_STEADY_USEC: Final = 10 * _SECOND
#: Deaths of ready helpers that are forgiven at once, and how fast the credit comes back.
CREDIT: Final = 100
_CREDIT_USEC: Final = _SECOND


class Backoff:
    """Counts failures; times are CLOCK_BOOTTIME µs."""

    def __init__(self) -> None:
        self.retry_at = 0
        self._dying = False
        self._failures = 0
        self._credit = float(CREDIT)
        self._credit_at = 0

    def waits(self, now: int) -> bool:
        """Whether it is too early still."""
        return now < self.retry_at

    def ends(self, now: int) -> bool:
        """Whether helpers die so fast that one which somebody else started meanwhile is to be ended, too."""
        return self._dying and self.waits(now)

    def died(self, now: int, ready_usec: int | None, *, killed: bool = False, again: bool = False) -> None:
        """A helper died, ready for that long (None = it never was); `killed`: of no fault of its own; `again`: so did
        the next one."""
        if ready_usec is not None and ready_usec >= _STEADY_USEC:
            self._failures = 0
        well = not again and (killed or ready_usec is not None)
        self._dying = not (well and self._forgive(now))
        if self._dying:
            self.failed(now, immediately=0 if well or again else 1)

    def failed(self, now: int, *, immediately: int = 0) -> None:
        """A start failed; the first `immediately` of a row are tried again without a pause.

        During a pause nothing more is counted: a service goes on until it is told to stop, and those are one failure.
        """
        if self.waits(now):
            return
        pause = self._failures - immediately
        self._failures += 1
        self.retry_at = now if pause < 0 else now + min(FIRST_USEC << min(pause, 16), LONGEST_USEC)

    def _forgive(self, now: int) -> bool:
        earned = (now - self._credit_at) / _CREDIT_USEC
        self._credit, self._credit_at = min(self._credit + earned, CREDIT), now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def reset(self) -> None:
        """Somebody says that it is time to try."""
        self.retry_at, self._dying, self._failures, self._credit = 0, False, 0, float(CREDIT)

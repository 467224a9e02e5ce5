"""Clocks: durations on CLOCK_BOOTTIME, which no clock step moves; wall-clock time only to be shown."""

from __future__ import annotations

import functools
import time


def boottime_usec() -> int:
    """CLOCK_BOOTTIME in µs: since boot, suspend included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def realtime_usec() -> int:
    """CLOCK_REALTIME in µs since 1970. Never computed with: it may jump either way."""
    return time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot, a UUID; read once, for it cannot change under a running process."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()

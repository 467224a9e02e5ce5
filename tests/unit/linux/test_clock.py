from __future__ import annotations

import time
import uuid
from pathlib import Path

from hostd.linux import clock


def test_boottime_is_that_of_the_kernel() -> None:
    before, now, after = time.clock_gettime_ns(7), clock.boottime_usec(), time.clock_gettime_ns(7)
    assert before // 1000 <= now <= after // 1000


def test_realtime_is_that_of_the_wall() -> None:
    before, now, after = time.time_ns(), clock.realtime_usec(), time.time_ns()
    assert before // 1000 <= now <= after // 1000


def test_boot_id_is_the_kernel_s_and_a_uuid() -> None:
    assert str(uuid.UUID(clock.boot_id())) == clock.boot_id()
    assert clock.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()

"""What a failed check has to say is on the console at once, not only at the end of the run."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints the lines in which pytest says what was wrong."""
    if report.failed:
        said = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print("\n" + "\n".join(said[:12]), flush=True)

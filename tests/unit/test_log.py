"""The log: fields for the journal, lines for people."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping

import pytest

from hostd import log
from hostd.log import JournalHandler, Message, event, journal_fields, plain, setup, stderr_is_journal


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger is the test runner's: it gets back what it had."""
    root, ours = logging.getLogger(), logging.getLogger("hostd")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])
    root.setLevel(before[1])


def record(level: int = logging.INFO, extra: Mapping[str, object] | None = None) -> logging.LogRecord:
    return logging.getLogger("hostd.test").makeRecord("hostd.test", level, "f.py", 1, "m", (), None, "func", extra)


def test_every_message_has_an_id_of_its_own() -> None:
    ids = [message.value for message in Message]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-f]{32}", identifier) for identifier in ids)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"/a b", "/a b"),
        (b"/\xff\xfe", r"/\xff\xfe"),
        (b"/\xc3\xa4", "/ä"),
        (b"/a\nCRITICAL: all is lost", r"/a\nCRITICAL: all is lost"),
        ("tab\t", r"tab\t"),
        ("\x1b[31m", r"\x1b[31m"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_any_value_is_one_readable_line(value: object, text: str) -> None:
    assert plain(value) == text


def test_an_event_has_its_id_and_its_fields() -> None:
    fields = journal_fields(record(extra=event(Message.VM_EXITED, pod_uid="u", target=b"/\xff", signal=9)), "it ended")
    assert fields == {
        "MESSAGE": "it ended",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "hostd",
        "CODE_FUNC": "func",
        "MESSAGE_ID": Message.VM_EXITED.value,
        "HOSTD_POD_UID": "u",
        "HOSTD_TARGET": r"/\xff",
        "HOSTD_SIGNAL": "9",
    }


@pytest.mark.parametrize(
    ("level", "priority"),
    [(logging.DEBUG, "7"), (logging.INFO, "6"), (logging.WARNING, "4"), (logging.ERROR, "3"), (logging.CRITICAL, "2")],
)
def test_levels_are_the_journals_priorities(level: int, priority: str) -> None:
    fields = journal_fields(record(level), "m")
    assert fields["PRIORITY"] == priority
    assert "MESSAGE_ID" not in fields


def test_a_journal_that_fails_costs_no_more_than_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(**_: object) -> None:
        raise OSError("no journal")

    JournalHandler(fail).handle(record())
    assert "no journal" in capsys.readouterr().err


def test_the_journal_gets_what_is_logged() -> None:
    sent: list[dict[str, object]] = []
    JournalHandler(lambda **fields: sent.append(fields)).handle(record(extra=event(Message.STARTED, version="1")))
    assert [(entry["MESSAGE"], entry["HOSTD_VERSION"]) for entry in sent] == [("m", "1")]


def test_stderr_is_the_journal_only_if_it_is_that_very_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert stderr_is_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert not stderr_is_journal()
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not stderr_is_journal()


@pytest.mark.parametrize(("level", "lines"), [(logging.INFO, 2), (logging.DEBUG, 3), (logging.WARNING, 1)])
def test_lines_on_stderr_bear_their_severity(monkeypatch: pytest.MonkeyPatch, level: int, lines: int) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    setup(level)
    logger = logging.getLogger("hostd.core.test")
    logger.debug("details")
    logger.info("news")
    logger.warning("trouble")
    logging.getLogger("somebody.else").info("chatter")
    found = stream.getvalue().splitlines()
    assert len(found) == lines
    assert "WARNING: trouble" in found


def test_without_the_journals_library_lines_go_to_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "stderr_is_journal", lambda: True)
    monkeypatch.setitem(sys.modules, "pystemd.journal", None)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    setup()
    logging.getLogger("hostd").info("still heard")
    assert "still heard" in stream.getvalue()

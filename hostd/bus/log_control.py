"""org.freedesktop.LogControl1 over Python's logging, so that `systemctl service-log-level hostd debug` works."""

from __future__ import annotations

import logging

from hostd.bus import names
from hostd.bus.interface import Exported, getter, setter
from hostd.errors import InvalidArgs, NotSupported

#: syslog's words and the level below which each of them silences; Python has no notice between warning and info.
LEVELS = {
    "emerg": logging.CRITICAL,
    "alert": logging.CRITICAL,
    "crit": logging.CRITICAL,
    "err": logging.ERROR,
    "warning": logging.WARNING,
    "notice": logging.WARNING - 1,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
TARGETS = ("auto", "journal", "console", "null")


class LogControl(Exported, interface=names.LOG_CONTROL):
    """The level and target of one logger. `target` is where it writes now, in LogControl1's words."""

    def __init__(self, logger: str = "hostd", identifier: str = "hostd", target: str = "auto") -> None:
        self._logger = logging.getLogger(logger)
        self._identifier = identifier
        self._home = self._target = target

    @getter("LogLevel")
    def level(self) -> str:
        """The word of the level in effect."""
        effective = self._logger.getEffectiveLevel()
        return next((word for word, level in reversed(LEVELS.items()) if level >= effective), "emerg")

    @setter("LogLevel")
    def set_level(self, value: str) -> None:
        """Any of syslog's words."""
        if value not in LEVELS:
            raise InvalidArgs(f"LogLevel {value[:64]!r} is not known; it is one of: {', '.join(LEVELS)}")
        self._logger.setLevel(LEVELS[value])

    @getter("LogTarget")
    def target(self) -> str:
        """Where the log goes."""
        return self._target

    @setter("LogTarget")
    def set_target(self, value: str) -> None:
        """`null` silences; `auto`, or the word of where it went before, brings it back."""
        if value not in TARGETS:
            raise InvalidArgs(f"LogTarget {value[:64]!r} is not known; it is one of: {', '.join(TARGETS)}")
        if value not in ("null", "auto", self._home):
            raise NotSupported(
                f"the log goes to {self._home} or null here; start hostd otherwise to have it on {value}"
            )
        self._target = "null" if value == "null" else self._home
        self._logger.disabled = False
        self._silence(on=value == "null")

    def _silence(self, *, on: bool) -> None:
        """A filter on a logger does not hold its children back, so the way to the handlers is cut instead."""
        self._logger.propagate = not on
        self._logger.handlers[:] = [logging.NullHandler()] if on else []

    @getter("SyslogIdentifier")
    def syslog_identifier(self) -> str:
        """As in the journal."""
        return self._identifier

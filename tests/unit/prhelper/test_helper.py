"""One helper's process, a stand-in for it: its end, and those that wait for their clients' end."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from unittest import mock

import pytest

from hostd.linux.pidfd import Process
from hostd.prhelper import retired
from hostd.prhelper.helper import Helper
from hostd.prhelper.retired import Retired
from tests.support.wait import eventually


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


async def test_a_death_of_which_nothing_can_be_told_is_a_death(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    died = mock.Mock()
    monkeypatch.setattr(Process, "end", mock.Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    helper = Helper.find(child.pid, died)
    child.kill()
    await eventually(lambda: died.called)
    died.assert_called_once_with(helper)
    assert helper.over.is_set()
    assert helper.end.killed, "which says nothing of the next one"


async def test_one_of_whose_clients_nobody_knows_stays(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = Helper.find(child.pid, mock.Mock())
    those = Retired([], mock.Mock())
    those.add(helper, 1)
    asked = []
    for known in (None, 0):
        monkeypatch.setattr(retired, "clients", lambda _, known=known: known)
        those.dismiss()
        asked.append(helper.asked)
    assert asked == [False, True]
    helper.release()

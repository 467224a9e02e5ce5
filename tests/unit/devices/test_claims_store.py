"""Claims on disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.config import OnExit
from hostd.devices.claim import Claim, Stage
from hostd.devices.claims_store import LARGEST, ClaimsStore
from tests.support.damage import damaged, json_values

CLAIMS = [
    Claim("usb/1-2", "ns/a", "p1", "u1", "046d:c52b", "S1", "a stick", Stage.HELD, True, True, "p1", OnExit.HOLD),
    Claim("pci/0000:3b:00.0", "", "p2", stage=Stage.IN_USE, used_by="p2"),
]


@pytest.fixture
def store(tmp_path: Path) -> ClaimsStore:
    return ClaimsStore(str(tmp_path / "state"))


def test_what_was_saved_is_loaded(store: ClaimsStore) -> None:
    store.save(CLAIMS)
    assert store.load() == ({claim.device: claim for claim in CLAIMS}, None)


def test_no_file_no_claims(store: ClaimsStore) -> None:
    assert store.load() == ({}, None)


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    good = ClaimsStore(str(tmp_path))
    good.save(CLAIMS)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            good.save([])
    assert len(good.load()[0]) == 2
    assert os.listdir(tmp_path) == ["claims.json"]


GOOD = {
    "device": "usb/1-2", "vm": "ns/a", "pod_uid": "", "vmi_uid": "", "identity": "", "serial": "", "description": "",
    "stage": "held", "asked": False, "renewed": False, "used_by": "", "on_exit": None,
}  # fmt: skip


def whole(*rows: object, version: object = 1) -> bytes:
    return json.dumps({"version": version, "claims": rows}).encode()


BAD = {
    "empty": b"",
    "NULs": b"\0" * 4096,
    "truncated": whole(GOOD)[:-5],
    "null": b"null",
    "list": b"[]",
    "garbage behind": whole(GOOD) + b"x",
    "other version": whole(GOOD, version=2),
    "no version": b'{"claims": []}',
    "claims no list": b'{"version": 1, "claims": 7}',
    "a claim no object": whole(7),
    "a key missing": whole({key: value for key, value in GOOD.items() if key != "vm"}),
    "half of a surrogate pair": whole({**GOOD, "vm": "\ud800"}),
    "a number for a text": whole({**GOOD, "vm": 7}),
    "a number for a flag": whole({**GOOD, "asked": 1}),
    "an unknown stage": whole({**GOOD, "stage": "lost"}),
    "a name that leads elsewhere": whole({**GOOD, "device": "pci/../../x"}),
    "twice": whole(GOOD, GOOD),
    "deep": b"[" * 100_000,
    "no UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_set_aside_and_named(store: ClaimsStore, name: str) -> None:
    store.save([])
    Path(store.path).write_bytes(BAD[name])
    claims, bad = store.load()
    assert claims == {}
    assert bad is not None
    assert bad.why
    assert Path(bad.kept_as).read_bytes() == BAD[name]
    assert store.load() == ({}, None)
    store.save(CLAIMS)
    assert len(store.load()[0]) == 2


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_what_is_no_file_is_set_aside(store: ClaimsStore, kind: str, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "state")
    {
        "directory": lambda: os.mkdir(store.path),
        "fifo": lambda: os.mkfifo(store.path),
        "link": lambda: os.symlink("nowhere", store.path),
    }[kind]()
    assert store.load()[1] is not None
    store.save(CLAIMS)
    assert len(store.load()[0]) == 2


def test_a_file_that_is_too_large(store: ClaimsStore) -> None:
    store.save([])
    os.truncate(store.path, LARGEST + 1)
    _, bad = store.load()
    assert bad is not None
    assert "larger" in bad.why


def test_one_bad_file_does_not_cover_another(store: ClaimsStore) -> None:
    store.save([])
    kept = []
    for content in (b"one", b"two", b"three"):
        Path(store.path).write_bytes(content)
        _, bad = store.load()
        assert bad is not None
        kept.append(Path(bad.kept_as))
    assert [path.read_bytes() for path in kept] == [b"one", b"two", b"three"]


def test_keys_of_a_later_hostd_are_passed_over(store: ClaimsStore) -> None:
    store.save([])
    Path(store.path).write_bytes(whole({**GOOD, "colour": "red"}))
    assert list(store.load()[0]) == ["usb/1-2"]


@given(damaged(json.loads(whole(GOOD))) | json_values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_claims_or_a_named_fault(store: ClaimsStore, plain: Any) -> None:
    store.save([])
    Path(store.path).write_text(json.dumps(plain))
    claims, bad = store.load()
    if bad is None:
        store.save(claims.values())
        assert store.load() == (claims, None)
        for claim in claims.values():
            assert type(claim.asked) is type(claim.renewed) is bool
            os.fsencode(f"{claim.vm}{claim.pod_uid}{claim.description}{claim.used_by}")
    else:
        assert claims == {}
        assert bad.why
        os.unlink(bad.kept_as)


@given(st.binary(max_size=300))
def test_any_bytes_are_claims_or_a_named_fault(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    store = ClaimsStore(str(tmp_path_factory.mktemp("state")))
    Path(store.path).write_bytes(data)
    claims, bad = store.load()
    assert claims == {}
    assert bad is not None

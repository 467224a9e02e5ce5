from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.kubevirt.records import LARGEST, MOST_TARGETS, BadRecord, Ghost, MountRecord, ghost_record, mount_record
from tests.support.damage import damaged

BELOW = "/pods/0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0/volumes/kubernetes.io~empty-dir/"
DISK = f"/var/lib/kubelet{BELOW}container-disks/disk_0.img"
KERNEL = f"/state/var/lib/kubelet{BELOW}container-disks/kernel-boot"
VOLUME = f"/proc/1/root/var/lib/kubelet{BELOW}hotplug-disks/data.img"


def record(*targets: str, **more: object) -> bytes:
    entries = [{"targetFile": target, "socketFile": f"{BELOW}container-disks/disk_0.sock"} for target in targets]
    return json.dumps({"mountTargetEntries": entries, **more}, separators=(",", ":")).encode()


def test_records_as_the_agent_writes_them() -> None:
    assert mount_record(record(DISK, KERNEL, usesSafePaths=True)) == MountRecord((DISK.encode(), KERNEL.encode()), True)
    hotplug = b'{"mountTargetEntries":[{"targetFile":"%s"}],"usesSafePaths":true}' % VOLUME.encode()
    assert mount_record(hotplug) == MountRecord((VOLUME.encode(),), True)


def test_old_records_do_not_say_whether_paths_are_safe() -> None:
    assert mount_record(record(DISK)) == MountRecord((DISK.encode(),), False)


@pytest.mark.parametrize("entries", [b"null", b"[]"])
def test_a_record_without_entries(entries: bytes) -> None:
    assert mount_record(b'{"mountTargetEntries":%s,"usesSafePaths":true}' % entries) == MountRecord((), True)


def test_a_target_that_stands_there_ten_thousand_times_is_one() -> None:
    data = b'{"mountTargetEntries":[%s]}' % b",".join([b'{"targetFile":"/a"}', b'{"targetFile":"/b"}'] * 5_000)
    assert mount_record(data).targets == (b"/a", b"/b")


def test_keys_of_later_releases_are_no_error() -> None:
    assert mount_record(record(DISK, usesSafePaths=True, checksum={"a": 1})).safe_paths


def test_names_that_are_not_ascii() -> None:
    assert mount_record(record("/größe \\ \t<&>")).targets == ("/größe \\ \t<&>".encode(),)


GOOD = record(DISK, usesSafePaths=True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\0" * 4096, "4096 NUL bytes"),
        (GOOD[: len(GOOD) // 2], "torn"),
        (GOOD[:-1], "torn"),
        (GOOD + b"x", "torn.*Extra data"),
        (GOOD + GOOD, "torn.*Extra data"),
        (GOOD + b"\0\0", "torn"),
        (b"\0" + GOOD[1:], "torn"),
        (b"   ", "torn"),
        (b"null", "it is null, not an object"),
        (b"[]", "it is a list"),
        (b'"x"', "it is a string"),
        (b"17", "it is a number"),
        (b"true", "it is true"),
        (b"{}", "mountTargetEntries must be a list, and is missing"),
        (b'{"mountTargetEntries":{}}', "must be a list, and is an object"),
        (b'{"mountTargetEntries":"/a"}', "must be a list, and is a string"),
        (b'{"mountTargetEntries":[null]}', "entry 0 of mountTargetEntries is null"),
        (b'{"mountTargetEntries":[{"targetFile":"/a"},"/b"]}', "entry 1 of mountTargetEntries is a string"),
        (b'{"mountTargetEntries":[{}]}', r"targetFile must be .* missing \(entry 0"),
        (b'{"mountTargetEntries":[{"targetFile":7}]}', "targetFile must be .* a number"),
        (b'{"mountTargetEntries":[{"targetFile":""}]}', "targetFile must be .* an empty string"),
        (b'{"mountTargetEntries":[{"targetFile":["/a"]}]}', "targetFile must be .* a list"),
        (b'{"mountTargetEntries":[{"targetFile":"/a\\u0000b"}]}', "targetFile contains a NUL byte"),
        (b'{"mountTargetEntries":[{"targetFile":"/a\\udcff"}]}', "half of a surrogate pair"),
        (b'{"mountTargetEntries":[],"usesSafePaths":null}', "usesSafePaths must be true or false, and is null"),
        (b'{"mountTargetEntries":[],"usesSafePaths":1}', "usesSafePaths must be true or false, and is a number"),
        (b'{"mountTargetEntries":[],"mountTargetEntries":[]}', "'mountTargetEntries' stands in it more than once"),
        (b'{"mountTargetEntries":[{"targetFile":"/a","targetFile":"/b"}]}', "'targetFile' stands in it more than once"),
        (b'{"mountTargetEntries":[{"targetFile":"/\xff"}]}', "not UTF-8: byte 39 is 0xff"),
        (b"\xef\xbb\xbf" + GOOD, "torn"),
        (b"[" * 100_000, "nested too deeply|torn"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"mountTargetEntries":NaN}', "NaN, which is no JSON"),
        (b'{"a":-Infinity}', "-Infinity, which is no JSON"),
        (b'{"a":' + b"9" * 100_000 + b"}", "cannot be read"),
        (b" " * (LARGEST + 1), "larger than 1 MiB"),
        (
            b'{"mountTargetEntries":[%s]}'
            % b",".join(b'{"targetFile":"/%d"}' % number for number in range(MOST_TARGETS + 1)),
            "4097 targets, more than 4096",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_record_says_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(BadRecord, match=words) as caught:
        mount_record(data)
    assert len(str(caught.value)) < 300


GHOST = {"name": "fedora", "namespace": "default", "socketFile": f"{BELOW}sockets/launcher-sock", "uid": "2b1c7a0e"}


def test_a_ghost_record() -> None:
    socket = f"{BELOW}sockets/launcher-sock".encode()
    assert ghost_record(json.dumps(GHOST).encode()) == Ghost("fedora", "default", "2b1c7a0e", socket)


def test_a_ghost_record_without_a_socket() -> None:
    assert ghost_record(json.dumps({**GHOST, "socketFile": ""}).encode()).socket == b""
    assert ghost_record(json.dumps({key: GHOST[key] for key in ("name", "namespace", "uid")}).encode()).socket == b""


@pytest.mark.parametrize("key", ["name", "namespace", "uid"])
@pytest.mark.parametrize("value", [None, 7, "", [], True, {"a": 1}, "a\0b", "\ud800"])
def test_a_ghost_record_needs_its_names(key: str, value: object) -> None:
    with pytest.raises(BadRecord, match=key):
        ghost_record(json.dumps({**GHOST, key: value}).encode())
    with pytest.raises(BadRecord, match=f"{key} must be .* missing"):
        ghost_record(json.dumps({other: GHOST[other] for other in GHOST if other != key}).encode())


@pytest.mark.parametrize("value", [None, 7, [], "a\0b"])
def test_a_ghost_records_socket_is_a_path(value: object) -> None:
    with pytest.raises(BadRecord, match="socketFile"):
        ghost_record(json.dumps({**GHOST, "socketFile": value}).encode())


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["mountTargetEntries", "targetFile", "usesSafePaths", "name", "uid"]), inner)
    ),
    max_leaves=12,
)


AS_WRITTEN = [json.loads(GOOD), {**GHOST, "uid": "ü"}, {"mountTargetEntries": [{"targetFile": "/a"}] * 2}]


@given(
    st.binary(max_size=60)
    | (values | st.sampled_from(AS_WRITTEN).flatmap(damaged)).map(lambda value: json.dumps(value).encode())
)
def test_any_bytes_are_a_record_or_a_bad_one(data: bytes) -> None:
    with contextlib.suppress(BadRecord):
        found = mount_record(data)
        assert type(found.safe_paths) is bool
        assert all(type(target) is bytes and target and b"\0" not in target for target in found.targets)
    with contextlib.suppress(BadRecord):
        ghost = ghost_record(data)
        assert all((ghost.name, ghost.namespace, ghost.uid))
        assert "\0" not in f"{ghost.name}{ghost.namespace}{ghost.uid}{os.fsdecode(ghost.socket)}"


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=3))
def test_a_torn_record_is_never_taken_for_another(at: int, instead: bytes) -> None:
    try:
        found = mount_record(GOOD[:at] + instead)
    except BadRecord:
        return
    assert found == mount_record(GOOD)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)), st.booleans())
def test_what_is_written_is_read(targets: list[str], safe: bool) -> None:
    expected = tuple(dict.fromkeys(target.encode() for target in targets))
    assert mount_record(record(*targets, usesSafePaths=safe)) == MountRecord(expected, safe)

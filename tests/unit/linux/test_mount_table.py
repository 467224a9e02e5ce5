from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.linux.mount_table import Mount, MountTable, escape, parse, rows_below, unescape
from tests.support.mountns import MountNamespace

PREFIX = b"/var/lib/kubelet"


def row(
    target: bytes, *, root: bytes = b"/", optional: bytes = b"", source: bytes = b"/dev/sda1", number: int = 40
) -> bytes:
    between = optional + b" " if optional else b""
    return b"%d 30 8:1 %s %s rw,relatime %s- ext4 %s rw\n" % (number, root, target, between, source)


def targets(table: bytes, prefix: bytes = PREFIX) -> list[bytes]:
    return [mount.target for mount in rows_below(table, prefix)]


def test_a_row() -> None:
    line = b"36 35 98:0 /mnt1 /mnt2 rw,noatime shared:7 master:1 propagate_from:2 - fuse.s3 /dev/root rw,x=y\n"
    assert parse(line) == [Mount(36, 35, "98:0", b"/mnt1", b"/mnt2", b"fuse.s3", b"/dev/root", 7, 1)]


@pytest.mark.parametrize(
    ("optional", "peer_group", "master"),
    [
        (b"", 0, 0),
        (b"shared:12", 12, 0),
        (b"master:3", 0, 3),
        (b"shared:12 master:3", 12, 3),
        (b"master:3 propagate_from:4", 0, 3),
        (b"unbindable", 0, 0),
        (b"later:1 shared:2", 2, 0),
    ],
)
def test_optional_fields(optional: bytes, peer_group: int, master: int) -> None:
    for found in (parse, lambda table: rows_below(table, b"/")):
        (mount,) = found(row(b"/a", optional=optional))
        assert (mount.peer_group, mount.master, mount.fstype) == (peer_group, master, b"ext4")


def test_an_empty_source_moves_no_field() -> None:
    (mount,) = parse(row(b"/a", source=b""))
    assert (mount.fstype, mount.source) == (b"ext4", b"")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (rb"a\040b", b"a b"),
        (rb"\011\012\134\043", b"\t\n\\#"),
        (rb"\134040", rb"\040"),
        (rb"\134134", rb"\134"),
        (rb"\377\200", b"\xff\x80"),
        (b"\xff\xfe", b"\xff\xfe"),
        (rb"\04", rb"\04"),
        (rb"\888\400", rb"\888\400"),
        (b"a\\", b"a\\"),
        (b"", b""),
    ],
)
def test_unescape(written: bytes, name: bytes) -> None:
    assert unescape(written) == name


def test_escape_is_the_kernel_s_for_paths() -> None:
    assert escape(b"a b\tc\nd\\e#f\xff\r\x0b") == rb"a\040b\011c\012d\134e#f" + b"\xff\r\x0b"


def test_rows_strictly_below() -> None:
    table = b"".join(
        map(row, [b"/", b"/var/lib/kubelet", b"/var/lib/kubelet2/x", b"/var/lib/kubelet/x", b"/x/var/lib/kubelet/y"])
    )
    assert targets(table) == [b"/var/lib/kubelet/x"]
    assert targets(table, b"/var/lib/kubelet/") == [b"/var/lib/kubelet/x"]
    assert targets(table, b"/") == [mount.target for mount in parse(table)][1:]
    assert targets(table, b"") == targets(table, b"/")


def test_a_root_below_the_prefix_is_no_target() -> None:
    table = row(b"/mnt", root=b"/var/lib/kubelet/x") + row(b"/var/lib/kubelet/y", root=b"/var/lib/kubelet/z")
    assert targets(table) == [b"/var/lib/kubelet/y"]


def test_a_source_or_option_below_the_prefix_is_no_target() -> None:
    table = (
        row(b"/mnt", source=b"/var/lib/kubelet/x") + b"1 2 0:1 / /m rw - overlay o rw,lowerdir= /var/lib/kubelet/x\n"
    )
    assert targets(table) == []


def test_the_prefix_is_compared_as_the_kernel_writes_it() -> None:
    table = row(rb"/data\040a/b\134040c") + row(b"/data a/b")
    assert targets(table, b"/data a") == [rb"/data a/b\040c"]


def test_names_of_any_bytes() -> None:
    table = row(b"/var/lib/kubelet/\xff\xfe\r\x0b\x85") + row(b"/var/lib/kubelet/\xd0\xb6")
    assert targets(table) == [b"/var/lib/kubelet/\xff\xfe\r\x0b\x85", b"/var/lib/kubelet/\xd0\xb6"]


def test_deleted_is_kept_as_it_is() -> None:
    (mount,) = rows_below(row(b"/var/lib/kubelet/x//deleted", root=b"/img//deleted"), PREFIX)
    assert (mount.root, mount.target) == (b"/img//deleted", b"/var/lib/kubelet/x//deleted")


def test_stacked_mounts_are_one_row_each_in_order() -> None:
    table = row(b"/var/lib/kubelet/x", number=1) + row(b"/y") + row(b"/var/lib/kubelet/x", number=2)
    assert [mount.mount_id for mount in rows_below(table, PREFIX)] == [1, 2]


@pytest.mark.parametrize(
    "broken",
    [
        b"\n",
        b"nonsense\n",
        b"1 2 0:1 / /var/lib/kubelet/b rw\n",
        b"1 2 0:1 / /var/lib/kubelet/b rw -\n",
        b"1 2 0:1 / /var/lib/kubelet/b rw - ext4\n",
        b"x 2 0:1 / /var/lib/kubelet/b rw - ext4 s rw\n",
        b"1 2 0:1 / /var/lib/kubelet/b rw shared:x - ext4 s rw\n",
        b"1 2 \xff:1 / /var/lib/kubelet/b rw - ext4 s rw\n",
        b" /var/lib/kubelet/b\n",
        b"   /var/lib/kubelet/b",
    ],
)
def test_broken_rows_are_passed_over(broken: bytes) -> None:
    table = row(b"/var/lib/kubelet/a") + broken
    assert targets(table) == [b"/var/lib/kubelet/a"]
    assert len(parse(table)) == 1


def test_a_last_row_without_newline() -> None:
    assert targets(row(b"/var/lib/kubelet/a")[:-1]) == [b"/var/lib/kubelet/a"]
    assert targets(b"") == []


def test_other_rows_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    from hostd.linux import mount_table

    parsed: list[bytes] = []
    real = mount_table._parse_row

    def counted(line: bytes) -> Mount | None:
        parsed.append(line)
        return real(line)

    monkeypatch.setattr(mount_table, "_parse_row", counted)
    table = b"".join(row(b"/mnt/%d" % number, root=b"/var/lib/kubelet/%d" % number) for number in range(100))
    assert targets(table + row(b"/var/lib/kubelet/a")) == [b"/var/lib/kubelet/a"]
    assert len(parsed) == 1


# What comes up in random paths often enough to meet a prefix.
NAMES = st.one_of(
    st.sampled_from([b"var", b"lib", b"kubelet", b"kubelet2", b"a b", rb"\040", b"-", b"x//deleted", b"\n", b"#"]),
    st.binary(min_size=1, max_size=4).map(lambda name: name.translate(None, b"\0/")),
)
PATHS = st.lists(NAMES, max_size=4).map(lambda names: b"/" + b"/".join(filter(None, names)))
OPTIONAL = st.sampled_from([b"", b"shared:1", b"master:2", b"shared:3 master:4 propagate_from:5", b"unbindable"])
ROWS = st.builds(
    lambda root, target, optional, source: row(
        escape(target), root=escape(root), optional=optional, source=escape(source)
    ),
    PATHS,
    PATHS,
    OPTIONAL,
    PATHS,
)
GARBAGE = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"\n", b" /var/lib/kubelet/x ", b"   /var/x/y", b"1 2 3 4 "])
)


def strictly_below(mount: Mount, prefix: bytes) -> bool:
    stem = prefix.rstrip(b"/") + b"/"
    return mount.target.startswith(stem) and mount.target != stem


@given(st.lists(ROWS).map(b"".join), PATHS)
def test_rows_below_is_parse_and_filter(table: bytes, prefix: bytes) -> None:
    assert rows_below(table, prefix) == [mount for mount in parse(table) if strictly_below(mount, prefix)]


@given(st.lists(ROWS, min_size=1), st.integers(0, 10), st.integers(0, 3))
def test_rows_below_the_paths_of_the_table(rows: list[bytes], which: int, depth: int) -> None:
    table = b"".join(rows)
    target = parse(rows[which % len(rows)])[0].target
    prefix = b"/".join(target.split(b"/")[: depth + 1])
    assert rows_below(table, prefix) == [mount for mount in parse(table) if strictly_below(mount, prefix)]


@given(st.lists(st.one_of(ROWS, GARBAGE)).map(b"".join), st.one_of(PATHS, st.binary()), st.integers(0, 40))
def test_rows_below_never_raises_and_never_invents(table: bytes, prefix: bytes, missing: int) -> None:
    table = table[: len(table) - missing]
    found = rows_below(table, prefix)
    everything = parse(table)
    assert all(mount in everything for mount in found)


@given(st.binary())
def test_escape_round_trip(name: bytes) -> None:
    assert unescape(escape(name)) == name
    assert not set(escape(name)) & set(b" \t\n")


@given(st.one_of(st.binary(), st.text("\\01234567 ", max_size=20).map(str.encode)))
def test_unescape_takes_anything(field: bytes) -> None:
    assert len(unescape(field)) <= len(field)


NASTY = [
    b"a b",
    b"tab\there",
    b"new\nline",
    rb"\040",
    b"back\\",
    b"#hash",
    b"\xff\xfe",
    "ж".encode(),
    b"x//y",
    b"-",
    b" - ",
]


def test_the_kernel_s_own_rows() -> None:
    with MountNamespace() as host, MountTable(host.mountinfo) as table:
        for name in NASTY:
            host.bind(host.write(host.base + b"/source/" + name), host.write(host.base + b"/pods/" + name))
        found = rows_below(table.read(), host.base + b"/pods")
        assert [mount.target for mount in found] == [os.path.normpath(host.base + b"/pods/" + name) for name in NASTY]
        assert [mount.root for mount in found] == [os.path.normpath(b"/source/" + name) for name in NASTY]
        assert {mount.fstype for mount in found} == {b"tmpfs"}
        # As the kernel writes them, so that a prefix can be searched for.
        assert all(b" " + escape(mount.root) + b" " + escape(mount.target) + b" " in table.read() for mount in found)
        host.call(os.unlink, host.base + b"/source/a b")
        assert rows_below(table.read(), host.base + b"/pods")[0].root == b"/source/a b//deleted"
        assert parse(table.read()) == parse(host.table())
        assert len(parse(table.read())) == host.table().count(b"\n")


def test_propagation_as_the_kernel_tells_it() -> None:
    with MountNamespace("shared") as host, host.copy("slave") as pod:
        target = host.tmpfs(host.base + b"/t")
        with MountTable(host.mountinfo) as mine, MountTable(pod.mountinfo) as its:
            (master,), (slave,) = rows_below(mine.read(), host.base), rows_below(its.read(), host.base)
        assert master.target == slave.target == target
        assert master.peer_group == slave.master > 0
        assert (master.master, slave.peer_group) == (0, 0)
        assert master.device == slave.device


def test_a_table_outlives_its_process_and_is_read_anew() -> None:
    with MountNamespace() as host:
        keeper = host.hold()
        with MountTable(f"/proc/{keeper.pid}/mountinfo") as table:
            assert not os.get_inheritable(table.fileno())
            keeper.end()
            assert rows_below(table.read(), host.base) == []
            target = host.tmpfs(host.base + b"/t")
            assert [mount.target for mount in rows_below(table.read(), host.base)] == [target]
            host.umount(target)
            assert rows_below(table.read(), host.base) == []
            table.close()
            assert table.fileno() == -1


def test_a_large_table_is_read_whole() -> None:
    with MountNamespace() as host, MountTable(host.mountinfo) as table:
        source = host.write(host.base + b"/source")
        names = [host.base + b"/pods/%04d" % number for number in range(400)]

        def bind_all() -> None:
            from tests.support.mountns import MS_BIND, mount

            os.mkdir(host.base + b"/pods")
            for name in names:
                os.close(os.open(name, os.O_CREAT))
                mount(source, name, flags=MS_BIND)

        host.call(bind_all)
        data = table.read()
        assert len(data) > 3 * 4096
        assert [mount.target for mount in rows_below(data, host.base + b"/pods")] == names

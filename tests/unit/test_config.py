from __future__ import annotations

import os
import tomllib
from dataclasses import FrozenInstanceError, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd import config
from hostd.config import KEYS, Backend, Cleanup, Config, LazyAfter, Mode, OnExit, PRHelper, load, parse
from hostd.errors import ConfigError
from hostd.kubevirt.targets import Kind

S = 1_000_000
PACKAGED = Path(__file__).parents[2] / "packaging" / "hostd.toml"

#: The defaults as the design has them.
DESIGN = """
[host]
kubelet-root    = "/var/lib/kubelet"
kubevirt-private = "/var/run/kubevirt-private"
mount-namespace = "/proc/1/ns/mnt"
cgroup-root     = "/sys/fs/cgroup"
runtime-dir     = "/run/hostd"
state-dir       = "/var/lib/hostd"
[cleanup]
mode       = "enforce"
grace      = "2s"
settle     = "10s"
retain     = "10min"
lazy-after = { containerdisk = "30s", hotplug = "never" }
[devices]
on-exit    = "release"
[pr-helper]
enabled    = false
socket     = "/var/run/kubevirt/daemons/pr/pr-helper.sock"
owner      = "107:107"
mode       = "0660"
selinux-label = "system_u:object_r:container_file_t:s0"
backend    = "auto"
[metrics]
textfile   = ""
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[str, str, str]:
    return str(tmp_path / "usr.toml"), str(tmp_path / "etc.toml"), str(tmp_path / "etc.d")


def write(path: str, text: str | bytes) -> str:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def loaded(tmp_path: Path, text: str | bytes) -> Config:
    return load(write(str(tmp_path / "given.toml"), text))


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_without_any_file_all_is_default(places: tuple[str, str, str]) -> None:
    assert load(None, places) == Config()
    assert load(None, places).sources == ()


def test_the_defaults_are_the_designs(tmp_path: Path) -> None:
    assert loaded(tmp_path, DESIGN) == Config()
    assert flat(tomllib.loads(DESIGN)).keys() == KEYS.keys()


def test_the_packaged_file_is_the_defaults() -> None:
    text = PACKAGED.read_text()
    assert flat(tomllib.loads(text)) == flat(tomllib.loads(DESIGN))
    assert load(str(PACKAGED)) == Config()


def test_every_key_of_the_packaged_file_is_explained() -> None:
    lines = PACKAGED.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    assert not [line for before, line in pairwise(lines) if " = " in line and before[:2] != "# "]


def test_every_field_has_a_key() -> None:
    def leaves(value: Any) -> list[str]:
        inner = [getattr(value, each.name) for each in fields(value) if each.name != "sources"]
        names = [each.name for each in fields(value) if each.name != "sources"]
        return [
            leaf
            for name, each in zip(names, inner, strict=True)
            for leaf in (leaves(each) if is_dataclass(each) else [name])
        ]

    assert sorted(leaves(Config())) == sorted(field for field, _ in KEYS.values())


def test_all_values_arrive(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        """
        host = { kubelet-root = "/data//kubelet/", kubevirt-private = "/p", mount-namespace = "/proc/7/ns/mnt" }
        [cleanup]
        mode = "observe"
        grace = "0"
        settle = "1min 30s"
        retain = "1h"
        lazy-after.hotplug = "5min"
        lazy-after.containerdisk = "never"
        [devices]
        on-exit = "hold"
        [pr-helper]
        enabled = true
        socket = "/run/pr.sock"
        owner = "0:7"
        mode = "600"
        selinux-label = ""
        backend = "child"
        [metrics]
        textfile = "/m.prom"
        """,
    )
    assert found.host.kubelet_root == b"/data/kubelet"
    assert (found.host.kubevirt_private, found.host.mount_namespace) == (b"/p", "/proc/7/ns/mnt")
    assert found.cleanup == Cleanup(Mode.OBSERVE, 0, 90 * S, 3600 * S, LazyAfter(None, 300 * S))
    assert found.devices.on_exit is OnExit.HOLD
    assert found.pr_helper == PRHelper(True, b"/run/pr.sock", (0, 7), 0o600, "", Backend.CHILD)
    assert found.metrics.textfile == b"/m.prom"


@pytest.mark.parametrize(
    ("kind", "usec"),
    [
        (Kind.CONTAINERDISK, 30 * S),
        (Kind.KERNEL_BOOT, 30 * S),
        (Kind.HOTPLUG_FILE, None),
        (Kind.HOTPLUG_DIRECTORY, None),
        (Kind.HOTPLUG_BLOCK, None),
    ],
)
def test_when_a_layer_may_be_detached(kind: Kind, usec: int | None) -> None:
    assert Cleanup().lazy_after_usec(kind) == usec


def test_the_last_word_on_each_key_counts(places: tuple[str, str, str]) -> None:
    vendor, administrator, directory = places
    write(vendor, '[cleanup]\ngrace = "1s"\nsettle = "1s"\nretain = "1s"\nlazy-after.hotplug = "1s"\n')
    write(administrator, '[cleanup]\nsettle = "2s"\nretain = "2s"\nlazy-after = { containerdisk = "2s" }\n')
    last = write(f"{directory}/20-b.toml", '[cleanup]\nretain = "4s"\n')
    first = write(f"{directory}/10-z.toml", '[cleanup]\nretain = "3s"\n[metrics]\ntextfile = "/m"\n')
    write(f"{directory}/30-no.conf", "not ours")
    write(f"{directory}/.hidden.toml", "not ours")
    write(f"{directory}/40.toml~", "not ours")
    found = load(None, places)
    assert found.cleanup == Cleanup(Mode.ENFORCE, S, 2 * S, 4 * S, LazyAfter(2 * S, S))
    assert found.metrics.textfile == b"/m"
    assert found.sources == (vendor, administrator, first, last)


def test_drop_ins_are_read_in_the_order_of_their_names(places: tuple[str, str, str]) -> None:
    numbers = [7 * at % 40 for at in range(40)]
    for number in numbers:
        write(f"{places[2]}/{number:02}.toml", f'[cleanup]\ngrace = "{number}s"\n')
    found = load(None, places)
    assert [os.path.basename(path) for path in found.sources] == [f"{number:02}.toml" for number in range(40)]
    assert found.cleanup.grace_usec == 39 * S


def test_a_given_file_replaces_all_places(places: tuple[str, str, str], tmp_path: Path) -> None:
    for path in (places[0], places[1], places[2] + "/x.toml"):
        write(path, "broken")
    given = write(str(tmp_path / "mine.toml"), '[cleanup]\ngrace = "9s"\n')
    found = load(given, places)
    assert (found, found.sources) == (Config(cleanup=Cleanup(grace_usec=9 * S)), (given,))


def test_the_places_are_the_designs() -> None:
    assert config.PLACES == ("/usr/lib/hostd/hostd.toml", "/etc/hostd/hostd.toml", "/etc/hostd/hostd.toml.d")


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().cleanup.grace_usec = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clean]\n", "clean is unknown; allowed here: host, cleanup, devices, pr-helper, metrics$"),
        ("grace = '2s'\n", "grace is unknown; allowed here: host, "),
        (
            "[cleanup]\nGrace = '2s'\n",
            "cleanup.Grace is unknown; allowed here: mode, grace, settle, retain, lazy-after$",
        ),
        ("[host]\nkubelet_root = '/k'\n", "host.kubelet_root is unknown; allowed here: kubelet-root, "),
        ("[host]\nbus = '/k'\n", "host.bus is unknown"),
        (
            "[cleanup.lazy-after]\nhotplug-file = '2s'\n",
            "hotplug-file is unknown; allowed here: containerdisk, hotplug$",
        ),
        ("[cleanup.grace]\nx = 1\n", "cleanup.grace must be a time.*; it is a table$"),
        ("cleanup = 7\n", "cleanup must be a table with mode, grace, settle, retain, lazy-after; it is 7$"),
        ("[[cleanup]]\ngrace = '2s'\n", "cleanup must be a table"),
        ("[cleanup]\nlazy-after = 'never'\n", 'lazy-after must be a table with containerdisk, hotplug; it is "never"$'),
        ("'cleanup.grace' = '2s'\n", "cleanup.grace is unknown"),
        ("[cleanup]\n'lazy-after.hotplug' = '2s'\n", "cleanup.lazy-after.hotplug is unknown"),
        ("'' = 1\n", " is unknown"),
        ("[cleanup]\ngrace = 2\n", 'cleanup.grace must be a time with its unit, such as "500ms".*; it is 2$'),
        ("[cleanup]\ngrace = '-2s'\n", 'cleanup.grace must be a time.*; it is "-2s"$'),
        ("[cleanup]\ngrace = 'never'\n", "cleanup.grace must be a time"),
        ("[cleanup]\nsettle = '99999999d'\n", "cleanup.settle must be .* of at most ten years"),
        ("[cleanup]\nmode = 'dry'\n", 'cleanup.mode must be "enforce" or "observe"; it is "dry"$'),
        ("[cleanup]\nlazy-after.hotplug = 'no'\n", 'lazy-after.hotplug must be a time.*, or "never"; it is "no"$'),
        ("[host]\nkubelet-root = 'var/lib/kubelet'\n", "host.kubelet-root must be an absolute path"),
        ("[host]\nruntime-dir = ''\n", "host.runtime-dir must be an absolute path"),
        ("[devices]\non-exit = true\n", 'devices.on-exit must be "release" or "hold"; it is true$'),
        ("[pr-helper]\nenabled = 'yes'\n", 'pr-helper.enabled must be true or false; it is "yes"$'),
        ("[pr-helper]\nenabled = 1\n", "pr-helper.enabled must be true or false; it is 1$"),
        (
            "[pr-helper]\nmode = 0o660\n",
            'pr-helper.mode must be three octal digits in quotes, such as "0660"; it is 432$',
        ),
        ("[pr-helper]\nowner = 'nobody-at-all:0'\n", "pr-helper.owner must be a user that exists on this host"),
        ("[pr-helper]\nbackend = 'docker'\n", 'backend must be "auto" or "systemd" or "child"'),
        ("[metrics]\ntextfile = 'm.prom'\n", 'metrics.textfile must be an absolute path.*, or "" for none'),
        ("[metrics]\ntextfile = '" + "x" * 9999 + "'\n", r"it is .*x\.\.\.$"),
        ("[cleanup]\ngrace = '2s'\ngrace = '2s'\n", "is not TOML: Cannot overwrite"),
        ("[cleanup\n", "is not TOML: .*line 1"),
        ("grace", "is not TOML"),
        ("\0", "is not TOML"),
        ("a = " + "[" * 20_000, "nested too deeply|is not TOML"),
        ("x = 2026-13-45\n", "is not TOML|is unknown"),
        (b"[cleanup]\n# \xff\n", "is not UTF-8: byte 12 is 0xff"),
        (b"\xff\xfe[\0c\0]\0", "is not UTF-8: byte 0 is 0xff"),
        (b"#" * ((1 << 20) + 1), "is larger than 1 MiB"),
    ],
    ids=lambda value: "" if len(value) > 200 else None,
)
def test_an_error_names_file_key_and_what_is_allowed(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        loaded(tmp_path, text)
    assert caught.value.message.startswith(str(tmp_path / "given.toml"))
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < len(str(tmp_path)) + 400


def test_the_error_names_the_file_that_is_wrong(places: tuple[str, str, str]) -> None:
    write(places[0], DESIGN)
    wrong = write(places[2] + "/50.toml", "[cleanup]\ngrace = 7\n")
    write(places[2] + "/60.toml", "[cleanup]\ngrace = '7s'\n")
    with pytest.raises(ConfigError, match=f"^{wrong}: cleanup.grace must be"):
        load(None, places)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    assert loaded(tmp_path, b"\xef\xbb\xbf[cleanup]\r\ngrace = '7s'\r\n").cleanup.grace_usec == 7 * S


def test_an_empty_file_and_dev_null_are_all_defaults(tmp_path: Path) -> None:
    assert loaded(tmp_path, "") == load("/dev/null") == Config()


def test_a_drop_in_can_be_masked(places: tuple[str, str, str]) -> None:
    os.mkdir(places[2])
    os.symlink("/dev/null", places[2] + "/50.toml")
    assert load(None, places) == Config()


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_cannot_be_read_is_an_error_with_its_name(places: tuple[str, str, str], which: int) -> None:
    path = [*places[:2], places[2] + "/50.toml", places[2] + "/60.toml"][which]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for link, why in (
        ("nowhere", "No such file or directory"),
        ("/dev/zero", "it is not a regular file"),
        ("/", "it is not a regular file"),
        (path, "Too many levels of symbolic links"),
    ):
        os.symlink(link, path)
        with pytest.raises(ConfigError, match=f"^{path} cannot be read: {why}"):
            load(None, places)
        os.unlink(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"^{path} cannot be read: it is not a regular file"):
        load(None, places)


def test_a_drop_in_directory_that_is_none(places: tuple[str, str, str]) -> None:
    write(places[2], "")
    with pytest.raises(ConfigError, match=f"^{places[2]} cannot be read: Not a directory"):
        load(None, places)


def test_a_given_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(str(tmp_path / "nothing.toml"))


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for path in (str(tmp_path), str(tmp_path / "nothing"), "/dev/zero"):
        with pytest.raises(ConfigError):
            load(path)
    assert os.listdir("/proc/self/fd") == before


words = st.sampled_from(
    ["[", "]", "=", "\n", '"', "'", "{", "}", ".", "2s", "true", "7", *" ".join(KEYS).replace(".", " ").split()]
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=40) | st.lists(words, max_size=14).map("".join))
def test_any_text_is_a_configuration_or_a_named_error(text: str) -> None:
    try:
        found = parse(text, "some.toml")
    except ConfigError as error:
        assert error.message.startswith("some.toml")  # noqa: PT017 - not every text is wrong
    else:
        assert found.keys() <= KEYS.keys()

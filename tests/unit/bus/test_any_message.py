"""Whatever callers send, each gets an answer with a name of its own, and the next one is heard."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostd.bus import library, names, registration
from hostd.bus.connection import Connection
from hostd.bus.contract import contract
from hostd.bus.library import Message
from hostd.bus.marshal import split
from hostd.bus.stream import Stream, close_all
from hostd.errors import HostdError
from tests.support.bus import Bare, Client, Failed, PrivateBus, adapter_on, open_fds
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

UID = pod_uid(1)
any_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


# -- bytes


def call(member: str, signature: str = "sa{sv}a(si)bo", n_fds: int = 0) -> bytes:
    details = {"Name": library.variant("s", "näme"), "LeaderPID": library.variant("u", 7)}
    body = [UID, details, [["a", 1], ["b", 2]], True, names.ROOT][: len(split(signature))]
    return library.call(5, names.BUS_NAME, names.ROOT, names.MANAGER, member, signature, body, n_fds=n_fds)


#: A byte of a message and what it is instead; not of the two lengths, without which there is no next message.
DAMAGE = st.dictionaries(
    st.sampled_from([1, 2, 3, *range(8, 12), *range(16, 260)]),
    st.sampled_from([0, 1, 2, 0x61, 0x76, 0x28, 0x7B, 0x7F, 0x80, 0xFF]) | st.integers(0, 255),
    max_size=5,
)


def damaged(message: bytes, damage: dict[int, int]) -> bytes:
    return bytes(damage.get(place, byte) for place, byte in enumerate(message))


@given(DAMAGE, st.sampled_from(["sa{sv}", "sa{sv}a(si)bo"]))
@any_fixture
async def test_whatever_a_bus_lets_through_the_next_is_heard(
    bus: PrivateBus, client: Client, damage: dict[int, int], signature: str
) -> None:
    """What it does not, it takes for the sender's end."""
    bare = Bare(bus)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        bare.sock.sendall(damaged(call("RegisterVM", signature), damage))
    assert await client.manager("ListVMs")
    bare.close()


@given(DAMAGE, st.integers(0, 3))
@any_fixture
async def test_a_message_that_cannot_be_read_ends_nothing_and_leaves_no_descriptor(
    damage: dict[int, int], n_fds: int
) -> None:
    """By dbus-next's reader, which is Python: dbus-fast's trusts that a bus has looked at what it gets."""
    before = open_fds()
    heard: list[str] = []

    def on_call(message: Message, fds: list[int]) -> None:
        close_all(fds)
        heard.append(message.member)

    with adapter_on("dbus-next"), open("/dev/null", "rb") as file:
        connection = Connection(on_call, lambda _: None)
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        ours.setblocking(False)
        connection._stream = Stream(ours, connection._frame, connection._end)
        with theirs:
            socket.send_fds(theirs, [damaged(call("RegisterVM", n_fds=1), damage)], [file.fileno()] * n_fds)
            theirs.send(call("Last"))
            await eventually(lambda: heard[-1:] == ["Last"])
            assert not connection.closed
            connection.close()
    assert open_fds() == before


# -- values

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
BASE = f"/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/container-disks/disk_0.img"
WORDS = st.sampled_from(
    ["", UID, UID.upper(), BASE, "/", "clean", "keep", "shop", r"\xff", "\\", "usb/1-2", "running", names.MANAGER]
)
KEYS = TEXT | st.sampled_from([*registration.KEYS, "PodUID", "State", "Kind"])


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 3) | st.sampled_from([os.getpid(), 2**31 - 1, 2**bits - 1]) | st.integers(0, 2**bits - 1)


OF: dict[str, st.SearchStrategy[Any]] = {
    "s": TEXT | WORDS,
    "o": st.just("/a"),
    "b": st.booleans(),
    "u": numbers(32),
    "t": numbers(64),
    "h": st.integers(0, 2),
    "as": st.lists(TEXT, max_size=2),
    "a(st)": st.lists(st.tuples(TEXT, numbers(64)).map(list), max_size=2),
}
VARIANTS = st.sampled_from(list(OF)).flatmap(lambda kind: st.tuples(st.just(kind), OF[kind]))
OF["v"] = VARIANTS
OF["a{sv}"] = st.dictionaries(KEYS, VARIANTS, max_size=3) | st.sets(
    st.sampled_from(list(registration.KEYS.items()))
).flatmap(lambda keys: st.fixed_dictionaries({key: st.tuples(st.just(kind), OF[kind]) for key, kind in sorted(keys)}))

#: Interface, member, signature, values; a variant is a pair.
CALLS = st.sampled_from(
    [
        (names.ROOT if interface == names.MANAGER else path, interface, method)
        for interface, path in (
            (names.MANAGER, names.ROOT),
            (names.VM, names.vm_path(UID)),
            (names.PROPERTIES, names.ROOT),
            (names.PROPERTIES, names.vm_path(UID)),
        )
        for method in contract()[interface].methods.values()
    ]
).flatmap(
    lambda each: st.tuples(
        st.just(each[0]), st.just(each[1]), st.just(each[2].name), st.just(each[2].in_signature),
        st.tuples(*(OF[kind] for kind in split(each[2].in_signature))),
    )
)  # fmt: skip


def spoken(client: Client, kind: str, value: Any) -> Any:
    if kind == "v":
        return client.variant(*value)
    return {key: client.variant(*each) for key, each in value.items()} if kind == "a{sv}" else value


@given(CALLS)
@any_fixture
async def test_any_values_get_an_answer_that_has_a_name(
    client: Client, service: FakeService, asked: tuple[str, str, str, str, tuple[Any, ...]]
) -> None:
    path, interface, member, signature, values = asked
    if UID not in service.known:
        service.add(vm(1))
    body = [spoken(client, kind, value) for kind, value in zip(split(signature), values, strict=True)]
    try:
        answer = await client.ask(client.message(path, interface, member, signature, *body))
        close_all(answer.unix_fds)
    except Failed as caught:
        failure: Failed | None = caught
    else:
        failure = None
    assert failure is None or (failure.name != HostdError.dbus_name and 0 < len(failure.text) <= 4096), failure
    service.close()
    # What was taken can be told.
    assert await client.manager("ListVMs")
    await client.get_all(names.ROOT, names.MANAGER)

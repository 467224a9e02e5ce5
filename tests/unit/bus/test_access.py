"""Who may call what: other users, the group, polkit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from hostd.bus import access, names, polkit
from tests.support.bus import Client, PrivateBus, busctl, call_manager, gdbus, private_bus, serving
from tests.support.fake_service import FakeService, pod_uid, vm
from tests.support.wait import eventually

UID = pod_uid(1)
PATH = names.vm_path(UID)
NOBODY = 65534
GROUP = 4_242


@pytest.fixture
async def bus(bus_library: str, root: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PrivateBus]:
    """A bus that lets everybody through; the group `hostd` is number GROUP."""
    monkeypatch.setattr(access, "_gid", lambda _: GROUP)
    async with private_bus() as private, serving(private, FakeService(vm(1))) as server:
        private.server = server  # type: ignore[attr-defined]
        yield private


async def ask(bus: PrivateBus, *arguments: str, groups: tuple[int, ...] = ()) -> str:
    """What gdbus says to another user: its output, or the error."""
    path, interface, member, *body = arguments
    asked = ("--dest", names.BUS_NAME, "--object-path", path, "--method", f"{interface}.{member}", *body)
    done = await gdbus(bus, "call", *asked, user=NOBODY, groups=groups)
    return done.out if done.code == 0 else done.error


READS = [
    (names.ROOT, names.MANAGER, "ListVMs"),
    (names.ROOT, names.OBJECT_MANAGER, "GetManagedObjects"),
    (PATH, names.PROPERTIES, "Get", names.VM, "State"),
]
CHANGES = [
    (names.ROOT, names.MANAGER, "Release", UID, "1"),
    (names.ROOT, names.MANAGER, "Inhibit", UID, "a", "b"),
    (PATH, names.VM, "SetPolicy", "keep"),
    (names.HELPER_PATH, names.HELPER, "Enable"),
    (names.LOG_CONTROL_PATH, names.PROPERTIES, "Set", names.LOG_CONTROL, "LogLevel", "<'info'>"),
]


@pytest.mark.parametrize("what", READS)
async def test_reading(bus: PrivateBus, what: tuple[str, ...]) -> None:
    assert "members of the group hostd" in await ask(bus, *what)
    assert "vm1" in (said := await ask(bus, *what, groups=(GROUP,))) or "running" in said


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("groups", [(), (GROUP,)])
async def test_changing_without_polkit(bus: PrivateBus, what: tuple[str, ...], groups: tuple[int, ...]) -> None:
    assert "only root may do this" in await ask(bus, *what, groups=groups)


async def test_what_everybody_may(bus: PrivateBus) -> None:
    for interface, member in ((names.PEER, "Ping"), (names.INTROSPECTABLE, "Introspect")):
        assert (await ask(bus, names.ROOT, interface, member)).startswith("(")
    assert (await busctl(bus, "tree", names.BUS_NAME, user=NOBODY)).code == 0


async def test_the_group_does_not_exist(bus_library: str, root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_gid", lambda _: None)
    async with private_bus() as private, serving(private, FakeService(vm(1))):
        assert "members of the group" in await ask(private, *READS[0], groups=(GROUP,))
        assert (await call_manager(private, "ListVMs")).code == 0


async def test_callers_are_asked_for_once_and_forgotten(bus: PrivateBus) -> None:
    known = bus.server._access._callers  # type: ignore[attr-defined]
    async with await Client.connect(bus.address) as client:
        for _ in range(3):
            await client.manager("ListVMs")
        assert known == {client.unique_name: access.Caller(0, known[client.unique_name].groups)}
        name = client.unique_name
    await eventually(lambda: name not in known)
    assert not bus.server._access._asked  # type: ignore[attr-defined]


async def test_calls_of_one_sender_keep_their_order_while_it_is_asked_for(bus: PrivateBus) -> None:
    async with await Client.connect(bus.address) as client:
        order: list[int] = []

        async def one(number: int) -> None:
            await client.manager("ListVMs")
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(50)))
        assert order == list(range(50))


class Authority:
    """A polkit on the private bus that answers as it is told."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.asked: list[list[Any]] = []
        self.answer: Callable[[list[Any]], list[Any] | None] = lambda _: [True, False, {}]
        client.bus.add_message_handler(self._handle)

    def _handle(self, message: Any) -> Any:
        if message.message_type is not self.client.library.MessageType.METHOD_CALL:
            return False
        self.asked.append([message.member, *message.body])
        if message.member != "CheckAuthorization":
            return self.client.library.Message.new_method_return(message)
        answer = self.answer(message.body)
        if answer is None:
            return True
        return self.client.library.Message.new_method_return(message, "(bba{ss})", [answer])


@pytest.fixture
async def authority(bus: PrivateBus) -> AsyncIterator[Authority]:
    async with await Client.connect(bus.address) as client:
        body = [polkit.POLKIT, 4]
        assert await client.call(names.DBUS_PATH, names.DBUS, "RequestName", "su", *body, destination=names.DBUS) == [1]
        yield Authority(client)


async def test_polkit_says_yes(bus: PrivateBus, authority: Authority) -> None:
    assert await ask(bus, *CHANGES[2]) == "()\n"
    ((member, subject, action, details, flags, cancellation),) = authority.asked
    assert (member, action, details) == ("CheckAuthorization", "io.kubevirt.hostd1.manage-vms", {})
    assert subject[0] == "system-bus-name"
    assert subject[1]["name"].value.startswith(":1.")
    assert flags in (0, 1)
    assert cancellation
    assert "NotSupported" in await ask(bus, *CHANGES[3])
    assert authority.asked[1][2] == "io.kubevirt.hostd1.manage-pr-helper"


async def test_a_person_is_asked_when_the_caller_waits_for_one(bus: PrivateBus, authority: Authority) -> None:
    for more, flags in (((), 1), (("--allow-interactive-authorization=no",), 0)):
        done = await busctl(bus, *more, "call", names.BUS_NAME, PATH, names.VM, "SetPolicy", "s", "keep", user=NOBODY)
        assert done.code == 0
        assert authority.asked[-1][4] == flags


async def test_polkit_says_no(bus: PrivateBus, authority: Authority) -> None:
    authority.answer = lambda _: [False, False, {}]
    assert "polkit rule" in await ask(bus, *CHANGES[2])
    authority.answer = lambda _: [False, True, {}]
    assert "authenticate" in await ask(bus, *CHANGES[2])
    assert len(authority.asked) == 2


async def test_reading_is_no_question(bus: PrivateBus, authority: Authority) -> None:
    await ask(bus, *READS[0])
    await ask(bus, *READS[0], groups=(GROUP,))
    assert "only root" in await ask(bus, *CHANGES[4])
    assert (await call_manager(bus, "Reload")).code == 0
    assert authority.asked == []


async def test_polkit_says_nothing(bus: PrivateBus, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polkit, "TIMEOUT", 0.3)
    authority.answer = lambda _: None
    assert "no answer within" in await ask(bus, *CHANGES[2])
    assert [each[0] for each in authority.asked] == ["CheckAuthorization", "CancelCheckAuthorization"]
    assert authority.asked[1][1] == authority.asked[0][5]


async def test_polkit_goes_while_it_is_asked(bus: PrivateBus, authority: Authority) -> None:
    def gone(_: list[Any]) -> None:
        authority.client.bus.disconnect()

    authority.answer = gone
    assert "could not say" in await ask(bus, *CHANGES[2])


async def test_nobody_else_answers_for_polkit_or_the_bus(bus: PrivateBus, authority: Authority) -> None:
    """A client guesses the serial of a question and says yes in polkit's place."""
    async with await Client.connect(bus.address) as forger:
        connection = bus.server._connection  # type: ignore[attr-defined]
        held: list[Any] = []

        def wait(body: list[Any]) -> None:
            held.append(body)

        authority.answer = wait
        asked = asyncio.create_task(ask(bus, *CHANGES[2]))
        await eventually(lambda: held)
        for serial in list(connection._waiting):
            answer = forger.library.Message(
                destination=names.BUS_NAME,
                message_type=forger.library.MessageType.METHOD_RETURN,
                reply_serial=serial,
                signature="(bba{ss})",
                body=[[True, False, {}]],
            )
            forger.bus.send(answer)
        await asyncio.sleep(0.2)
        assert not asked.done()
        authority.client.bus.disconnect()
        assert "could not say" in await asked

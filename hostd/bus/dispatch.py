"""From a method call to its answer: find the member, check access, run the handler, answer. Never a traceback.

What needs no waiting is answered at once. What does becomes a task, within bounds for each caller, so that one that
asks without end delays no other. Tasks begin one a turn of the loop, which has deaths to look after as well.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from hostd.bus import names, text
from hostd.bus.call import Call
from hostd.bus.standard import Introspectable, ObjectManager, Peer, Properties, only_marshalling
from hostd.errors import AccessDenied, HostdError, LimitExceeded, UnknownInterface, UnknownMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from hostd.bus.access import Access, Caller
    from hostd.bus.connection import Connection
    from hostd.bus.contract import Method
    from hostd.bus.interface import Exported
    from hostd.bus.library import Message, Value
    from hostd.bus.long_answer import LongAnswers
    from hostd.bus.object_tree import ObjectTree

log = logging.getLogger(__name__)

#: Calls under way, of one caller and of all.
MAX_OF_ONE = 256
MAX_OF_ALL = 4096
#: Tasks that have not begun: with more, no further calls are read.
MOST_WAITING = 32
#: Of an error, in characters.
MAX_SENTENCE = 4096


class Dispatcher:
    """Answers the calls of one connection after the other."""

    def __init__(self, tree: ObjectTree, answers: LongAnswers) -> None:
        self._tree = tree
        self._peer = Peer()
        self._introspectable = Introspectable(tree)
        self._properties = Properties(tree)
        self._object_manager = ObjectManager(tree, answers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[_Answer, Method, Coroutine[Any, Any, Value]]] = deque()
        self._held: Connection | None = None
        self._under_way: Counter[str] = Counter()

    def handle(self, connection: Connection, access: Access, message: Message, fds: list[int]) -> None:
        """Takes a call up; its answer goes out on the connection it came from, sooner or later."""
        call = Call(message, fds)
        answer = _Answer(connection, call)
        sender = message.sender
        if self._under_way[sender] >= MAX_OF_ONE or self._under_way.total() >= MAX_OF_ALL:
            answer.fail(LimitExceeded(f"{self._under_way[sender]} of your calls are under way: await their answers"))
            return
        self._under_way[sender] += 1
        answer.on_end = lambda: self._ended(sender)
        if message.interface == names.PEER:
            self._run(answer, self._peer)
            return
        access.with_caller(sender, lambda caller: self._known(answer, access, caller))

    def _ended(self, sender: str) -> None:
        self._under_way[sender] -= 1
        if not self._under_way[sender]:
            del self._under_way[sender]

    def _known(self, answer: _Answer, access: Access, caller: Caller) -> None:
        try:
            exported, method = self._find(answer.call.message)
            action = self._action(answer.call, exported, method)
            if not action:
                if exported is not self._introspectable:
                    access.check_read(caller)
            elif caller.uid != 0:
                self._spawn(answer, method, self._authorized(answer, access, caller, exported, method, action))
                return
        except Exception as reason:  # noqa: BLE001 - the edge of the bus: whatever it is, the caller gets an answer
            answer.fail(reason)
            return
        self._run(answer, exported, method)

    async def _authorized(
        self, answer: _Answer, access: Access, caller: Caller, exported: Exported, method: Method, action: str
    ) -> Value:
        call = answer.call
        await access.check_change(caller, call.sender, action, interactive=call.interactive)
        result = exported.invoke(call, method)
        return await result if inspect.isawaitable(result) else result

    def _run(self, answer: _Answer, exported: Exported, method: Method | None = None) -> None:
        try:
            message = answer.call.message
            method = method or exported.find_method(message.member, message.signature)
            result = exported.invoke(answer.call, method)
            if inspect.iscoroutine(result):
                self._spawn(answer, method, result)
                return
            answer.give(method, result)
        except Exception as reason:  # noqa: BLE001 - the edge of the bus: whatever it is, the caller gets an answer
            answer.fail(reason)

    def _spawn(self, answer: _Answer, method: Method, work: Coroutine[Any, Any, Value]) -> None:
        self._waiting.append((answer, method, work))
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._begin_one)
        if len(self._waiting) >= MOST_WAITING and self._held is None:
            self._held = answer.connection
            self._held.hold()

    def _begin_one(self) -> None:
        if not self._waiting:
            return
        answer, method, work = self._waiting.popleft()
        loop = asyncio.get_running_loop()
        task = loop.create_task(_guarded(answer, method, work), name=f"answer {answer.call.message.member}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._waiting:
            loop.call_soon(self._begin_one)
        elif self._held is not None:
            self._held.go_on()
            self._held = None

    def _find(self, message: Message) -> tuple[Exported, Method]:
        """The handler. Raises UnknownObject, UnknownInterface, UnknownMethod, InvalidArgs."""
        there = self._tree.interfaces(message.path)
        standard: list[Exported] = [self._introspectable]
        if there:
            standard.append(self._properties)
        if message.path == names.ROOT:
            standard.append(self._object_manager)
        candidates = [*there, *standard, self._peer]
        if message.interface is None:
            candidates = [each for each in candidates if message.member in each.contract.methods]
            if not candidates:
                raise UnknownMethod(f"{message.path} has no method {message.member}")
        else:
            candidates = [each for each in candidates if each.contract.name == message.interface]
            if not candidates:
                raise UnknownInterface(f"{message.path} has no interface {message.interface}")
        return candidates[0], candidates[0].find_method(message.member, message.signature)

    def _action(self, call: Call, exported: Exported, method: Method) -> str:
        """What a caller needs for this; empty: only to be a reader."""
        if exported is not self._properties or method.name != "Set":
            return method.access
        interface, name, value = call.message.body
        owner = self._properties.find(call.path, interface, name)
        if owner is None:
            raise UnknownInterface(f"{interface} has no properties")
        return owner.find_writable(name, value.signature).access

    async def close(self) -> None:
        """Ends what is under way: callers are gone with the bus name."""
        while self._waiting:
            answer, _, work = self._waiting.popleft()
            work.close()
            answer.fail(HostdError("hostd is stopping"))
        # A task that is cancelled before its first step could not answer.
        await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class _Answer:
    """Exactly one answer to a call, after which its descriptors are closed."""

    def __init__(self, connection: Connection, call: Call) -> None:
        self.connection = connection
        self.call = call
        self.on_end: Callable[[], None] = lambda: None

    def give(self, method: Method, result: Value) -> None:
        """Answers with a handler's result."""
        body = _body(method, result)
        fds = [value for value, arg in zip(body, method.gives, strict=True) if arg.type == "h"]
        if fds:
            body = [0 if arg.type == "h" else value for value, arg in zip(body, method.gives, strict=True)]
        self._reply(method.out_signature, body, fds)
        self._end()

    def _reply(self, signature: str, body: list[Any], fds: list[int]) -> None:
        message = self.call.message
        try:
            self.connection.reply(message, signature, body, fds)
        except HostdError:
            raise
        except Exception:
            # A source gave a property something that its type cannot hold: the others still go out.
            if message.interface == names.PROPERTIES and signature == "a{sv}":
                self.connection.reply(message, signature, [only_marshalling(body[0])])
            else:
                raise

    def fail(self, reason: BaseException) -> None:
        """Answers with an error; what has no name of its own goes to the log, not to the caller."""
        try:
            self.connection.error(self.call.message, *_named(reason, self.call))
        except Exception:
            # The edge of the bus: an answer that cannot be sent must not end the reading of others.
            log.exception("an error could not be sent to %s", self.call.sender)
        self._end()

    def _end(self) -> None:
        self.call.close()
        self.on_end()


def _body(method: Method, result: Value) -> list[Any]:
    if not method.gives:
        return []
    return [result] if len(method.gives) == 1 else list(result)


def _named(reason: BaseException, call: Call) -> tuple[str, str]:
    """The error's name and sentence."""
    message = call.message
    if isinstance(reason, HostdError):
        if isinstance(reason, AccessDenied):
            log.info("%s may not call %s at %s: %s", call.sender, message.member, message.path, reason)
        return reason.dbus_name, text.sentence(reason.message)[:MAX_SENTENCE]
    log.error("%s at %s failed", message.member, message.path, exc_info=reason)
    return HostdError.dbus_name, f"{message.member} failed inside hostd ({type(reason).__name__}); its log says more"


async def _guarded(answer: _Answer, method: Method, work: Coroutine[Any, Any, Value]) -> None:
    try:
        answer.give(method, await work)
    except asyncio.CancelledError:
        answer.fail(HostdError("hostd is stopping"))
        raise
    except Exception as reason:  # noqa: BLE001 - the edge of a task: whatever it is, the caller gets an answer
        answer.fail(reason)

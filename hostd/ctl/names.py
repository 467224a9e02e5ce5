"""Which VM is meant: a pod UID or the beginning of one, a VMI UID, namespace/name, or a name alone."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from hostd.errors import HostdError, NoSuchVM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hostd.client.model import VM, Layer

#: Of the beginning of a pod UID: fewer characters are more likely a slip.
_SHORTEST = 3


class Ambiguous(HostdError):
    """A name that could be several VMs or layers; the message names them."""


def find_vm(vms: Sequence[VM], given: str) -> VM:
    """The VM that is meant. Raises NoSuchVM, Ambiguous."""
    ways: list[Callable[[VM], bool]] = [
        lambda vm: vm.pod_uid == given.lower(),
        lambda vm: bool(vm.name) and vm.full_name == given,
        lambda vm: bool(vm.vmi_uid) and vm.vmi_uid == given.lower(),
        lambda vm: bool(vm.name) and vm.name == given,
        lambda vm: len(given) >= _SHORTEST and vm.pod_uid.startswith(given.lower()),
    ]
    for way in ways:
        found = [vm for vm in vms if way(vm)]
        if len(found) == 1:
            return found[0]
        if found:
            listed = "".join(f"\n  {vm.pod_uid}  {vm.full_name or '-'}  {vm.state}" for vm in found)
            raise Ambiguous(f"{given} could be {len(found)} VMs; name one by its pod UID:{listed}")
    raise NoSuchVM(f"no VM {given} is known here; `hostctl list` shows those that are" + _similar(vms, given))


def find_vms(vms: Sequence[VM], given: Sequence[str]) -> list[VM]:
    """Each once, in the order in which they are named."""
    return list({vm.pod_uid: vm for vm in (find_vm(vms, name) for name in given)}.values())


def find_layer(layers: Sequence[Layer], given: str) -> Layer:
    """The layer that is meant by its target, the end of it, or its volume. Raises HostdError, Ambiguous."""
    ways: list[Callable[[Layer], bool]] = [
        lambda layer: layer.target == given,
        lambda layer: layer.volume == given,
        lambda layer: layer.target.endswith("/" + given),
    ]
    for way in ways:
        found = [layer for layer in layers if way(layer)]
        if len(found) == 1:
            return found[0]
        if found:
            raise Ambiguous(f"{given} could be: " + ", ".join(layer.target for layer in found))
    listed = ", ".join(layer.volume for layer in layers) or "none"
    raise HostdError(f"the VM has no layer {given}; it has: {listed}")


def completions(vms: Sequence[VM]) -> list[str]:
    """What the shell offers: every name once, then every pod UID."""
    return [*dict.fromkeys(vm.full_name for vm in vms if vm.name), *(vm.pod_uid for vm in vms)]


def _similar(vms: Sequence[VM], given: str) -> str:
    word = given.rpartition("/")[2]
    named = [vm for vm in vms if word and vm.name]
    alike = get_close_matches(word, {vm.name for vm in named}, n=5)
    near = [vm.full_name for vm in named if word in vm.full_name or vm.name in word or vm.name in alike]
    return f"; perhaps {', '.join(near[:5])}?" if near else ""

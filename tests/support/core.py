"""What the tests of the core make again and again."""

from __future__ import annotations

from hostd.core.model import VM, Layer
from hostd.kubevirt.targets import Target, target

KUBELET = b"/var/lib/kubelet"
POD = "11111111-2222-4333-8444-555555555555"
OTHER = "99999999-2222-4333-8444-555555555555"
EMPTY_DIRS = KUBELET + b"/pods/" + POD.encode() + b"/volumes/kubernetes.io~empty-dir/"


def a_target(name: bytes = b"container-disks/disk_0.img", *, block: bool = False) -> Target:
    return target(KUBELET, EMPTY_DIRS + name, block=block)


def a_layer(name: bytes = b"container-disks/disk_0.img", *, block: bool = False, **more: object) -> Layer:
    made = Layer(a_target(name, block=block), source=("", b"") if block else ("0:50", b"/disk"))
    for key, value in more.items():
        setattr(made, key, value)
    return made


def a_vm(*layers: Layer, **more: object) -> VM:
    made = VM(POD, layers={layer.target.path: layer for layer in layers})
    for key, value in more.items():
        setattr(made, key, value)
    return made

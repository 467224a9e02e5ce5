"""What hostd says of its own parts, where that hangs on what there is on the node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hostd.core.requests import Requests
from tests.support.fake_service import vm


class Registry(list[Any]):
    """As much of it as Health asks."""

    unsaved = ()


def test_pod_cgroups_are_missed_only_where_there_are_vms() -> None:
    """Before kubelet's first pod there are neither: a node that has just been set up is well."""
    registry = Registry()
    keeper: Any = SimpleNamespace(
        registry=registry,
        pool=SimpleNamespace(hung=()),
        qemus=SimpleNamespace(cgroups=SimpleNamespace(understood=False)),
    )
    root: Any = None
    requests = Requests(keeper, root, lambda: keeper)
    assert requests.health == {}
    registry.append(vm())
    assert set(requests.health) == {"cgroups"}

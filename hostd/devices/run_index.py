"""Runs by pod UID, with those at hand that matter to claims: of a thousand VMs few have devices."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING

from hostd.devices.claim import Run

if TYPE_CHECKING:
    from hostd.devices.claim import Claims


class RunIndex(MutableMapping[str, Run]):
    """A mapping like any other, except for `concerned`."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        #: Pods that have a device open; pods by their VM's name.
        self._having: set[str] = set()
        self._pods: dict[str, set[str]] = {}

    def concerned(self, claims: Claims) -> dict[str, Run]:
        """The runs that have a device open, and those that the claims are for. No other has a say in what becomes of
        claims, or a part in what is told of devices.

        The cost grows with the claims, with the VMs that have devices and with the runs of one VM's name, and with
        nothing else: a VM's start or death must not cost more because a thousand others are there.
        """
        pods = set(self._having)
        for claim in claims.values():
            pods.update((claim.pod_uid, claim.used_by), self._pods.get(claim.vm, ()))
        return {pod_uid: run for pod_uid in pods if (run := self._runs.get(pod_uid)) is not None}

    def __getitem__(self, pod_uid: str) -> Run:
        return self._runs[pod_uid]

    def __setitem__(self, pod_uid: str, run: Run) -> None:
        self.pop(pod_uid, None)
        self._runs[pod_uid] = run
        if run.open:
            self._having.add(pod_uid)
        if run.vm:
            self._pods.setdefault(run.vm, set()).add(pod_uid)

    def __delitem__(self, pod_uid: str) -> None:
        run = self._runs.pop(pod_uid)
        self._having.discard(pod_uid)
        if run.vm:
            namesakes = self._pods[run.vm]
            namesakes.remove(pod_uid)
            if not namesakes:
                del self._pods[run.vm]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

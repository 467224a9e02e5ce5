"""Which of the processes in a pod are QEMUs, and of which VM: their command lines tell, read by a worker."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hostd.core.model import VM
    from hostd.core.qemus import Qemus
    from hostd.core.registry import Registry
    from hostd.core.survey import Command, Survey
    from hostd.linux.pidfd import Process


class Identification:
    """Judges candidates. `follow` takes over those that are QEMUs of a VM, or may be."""

    def __init__(self, registry: Registry, qemus: Qemus, survey: Survey, follow: Callable[[VM, Process], None]) -> None:
        self._registry = registry
        self._qemus = qemus
        self._survey = survey
        self._follow = follow

    async def identify(self, vm: VM, candidates: Iterable[Process]) -> bool:
        """Judges processes in the VM's pod, and takes them over. False: the VM was forgotten meanwhile, and who meets
        the pod again finds them again."""
        waiting = deque(candidates)
        try:
            launchers = self._qemus.launchers(vm.pod_uid)
            commands = await self._survey.commands([process.identity.pid for process in waiting] + launchers)
            if self._registry.get(vm.pod_uid) is not vm:
                return False
            while waiting:
                self._judge(vm, waiting.popleft(), commands)
        finally:
            for process in waiting:
                process.close()
        _name(vm, launchers, commands)
        return True

    def _judge(self, vm: VM, process: Process, commands: Mapping[int, Command]) -> None:
        command = commands[process.identity.pid]
        if not process.alive():
            process.close()
        elif command.probe or (command.known and command.guest is None):
            self._qemus.is_other(vm.pod_uid, process.identity)
            process.close()
        else:
            # While one lives whose command line cannot be read, nobody knows; that it was the VM's, its death does
            # not tell either.
            vm.had_qemu |= command.known
            self._follow(vm, process)
            if command.guest and not vm.name:
                vm.namespace, vm.name = command.guest.namespace, command.guest.name


def _name(vm: VM, launchers: Iterable[int], commands: Mapping[int, Command]) -> None:
    for pid in launchers:
        launcher = commands[pid].launcher
        if launcher and not vm.vmi_uid:
            vm.vmi_uid, vm.namespace, vm.name = launcher.uid, launcher.namespace, launcher.name

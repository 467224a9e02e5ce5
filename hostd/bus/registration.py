"""RegisterVM's details, read and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostd.bus import arguments
from hostd.core.model import Policy
from hostd.core.service import Registration
from hostd.errors import InvalidArgs

if TYPE_CHECKING:
    from hostd.bus.call import Call

KEYS = {
    "VMIUID": "s",
    "Namespace": "s",
    "Name": "s",
    "LeaderPID": "u",
    "LeaderStartTime": "t",
    "LeaderPIDFDID": "t",
    "LeaderPIDFD": "h",
    "GraceUSec": "t",
    "Policy": "s",
}
#: Start times and inode numbers are counted by the kernel from small numbers; microseconds of a grace fit as well.
_LARGEST = 2**63 - 1
_FORMS = "LeaderPIDFD alone, or LeaderPID with either LeaderStartTime or LeaderPIDFDID"


def read(call: Call, given: arguments.Details) -> Registration:
    """What an agent says. The pidfd is taken over from the call only when all the rest is right. Raises InvalidArgs."""
    said = arguments.details(given, KEYS, "RegisterVM")
    _check_leader(said)
    for key in ("LeaderStartTime", "LeaderPIDFDID", "GraceUSec"):
        if said.get(key, 0) > _LARGEST:
            raise InvalidArgs(f"{key} {said[key]} is out of range")
    return Registration(
        vmi_uid=_name(said, "VMIUID"),
        namespace=_name(said, "Namespace"),
        name=_name(said, "Name"),
        leader_pid=arguments.pid(said["LeaderPID"]) if "LeaderPID" in said else None,
        leader_start_time=said.get("LeaderStartTime"),
        leader_pidfd_id=said.get("LeaderPIDFDID"),
        grace_usec=said.get("GraceUSec"),
        policy=arguments.word(Policy, said["Policy"], "Policy") if "Policy" in said else None,
        leader_pidfd=call.take_fd(said["LeaderPIDFD"]) if "LeaderPIDFD" in said else None,
    )


def _check_leader(said: dict[str, Any]) -> None:
    """The leader is named in one form or not at all; a bare process id could be another process by now."""
    forms = {key for key in said if key.startswith("Leader")}
    allowed: tuple[set[str], ...] = (
        set(),
        {"LeaderPIDFD"},
        {"LeaderPID", "LeaderStartTime"},
        {"LeaderPID", "LeaderPIDFDID"},
    )
    if forms not in allowed:
        named = ", ".join(sorted(forms))
        raise InvalidArgs(f"a leader is named by {_FORMS}; these came: {named}")


def _name(said: dict[str, Any], key: str) -> str | None:
    return arguments.name(said[key], key) if key in said else None

"""The direction of the imports, as the design has it: what a part may know of the others."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
SOURCES = sorted((TOP / "hostd").rglob("*.py"))

#: Leaves that any part above `kubevirt` may use: the log, the version (`hostd` itself).
_COMMON = {"hostd", "hostd.log"}
#: Part → what it may import of hostd: modules, or packages as a whole (with a dot at the end). `hostd.errors` and the
#: part itself always.
RULES: dict[str, set[str]] = {
    "hostd": set(),
    "hostd.errors": set(),
    "hostd.values": set(),
    "hostd.linux": set(),
    "hostd.kubevirt": {"hostd.linux."},
    "hostd.config": {"hostd.values", "hostd.kubevirt.targets"},
    "hostd.log": set(),
    "hostd.notify": {"hostd.linux.", "hostd.log"},
    "hostd.core": {"hostd.linux.", "hostd.kubevirt.", "hostd.config", *_COMMON},
    "hostd.devices": {"hostd.linux.", "hostd.core.model", "hostd.config", *_COMMON},
    "hostd.prhelper": {"hostd.linux.", "hostd.core.model", "hostd.config", *_COMMON},
    "hostd.bus": {"hostd.core.model", "hostd.core.service", *_COMMON},
    # hostctl reaches the daemon over the bus alone, and knows its words.
    # The client knows the daemon's words and its adapter, and nothing of how it works.
    "hostd.client": {"hostd.bus.", "hostd.core.model", *_COMMON},
    "hostd.metrics": {"hostd.core.model", "hostd.core.service", "hostd.kubevirt.targets", *_COMMON},
    "hostd.ctl": {
        "hostd.client.",
        "hostd.bus.",
        "hostd.core.model",
        # What doctor looks at.
        "hostd.config",
        "hostd.linux.",
        "hostd.kubevirt.",
        "hostd.prhelper.preflight",
        *_COMMON,
    },
}
#: These put the parts together, so they know all of them.
WIRING = {"hostd.app", "hostd.__main__"}
#: Whose business `linux` must not know. (The kubelet's root is a directory that it is given.)
KUBEVIRT = re.compile(
    r"kubevirt|kubernetes|kubepods|virt-(?:handler|launcher|chroot)|container-?disk|hotplug|\bVMI\b|launcher",
    re.IGNORECASE,
)
#: Lines of `linux` that name them all the same, and why: the package says that it does not know KubeVirt, and the last
#: guard of an unmount names the directories that must stay whatever it is told.
EXCUSED = {("hostd.linux", "without KubeVirt"), ("hostd.linux.umount", "KEPT: Final")}


def module(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in SOURCES}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(source: ast.AST) -> set[str]:
    """hostd's modules that a source imports, wherever in it: for types, in a function, by its parent."""
    found: set[str] = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in inner}
    return {name for name in found if name.split(".")[0] == "hostd"}


def part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def allowed(importer: str, imported: str) -> bool:
    if importer in WIRING or imported == "hostd.errors" or part(imported) == part(importer):
        return True
    rules = RULES[part(importer)]
    return imported in rules or any(rule.endswith(".") and (imported + ".").startswith(rule) for rule in rules)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    wrong = sorted(imported for imported in imports(tree(MODULES[name])) if not allowed(name, imported))
    assert not wrong, f"{name} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(tree(MODULES[name])), f"{MODULES[name].relative_to(TOP)} has no docstring"


@pytest.mark.parametrize("name", [name for name in MODULES if part(name) == "hostd.linux"])
def test_linux_does_not_know_kubevirt(name: str) -> None:
    lines = [line for line in MODULES[name].read_text().splitlines() if KUBEVIRT.search(line)]
    assert not [line for line in lines if not any(name == module and words in line for module, words in EXCUSED)]


def test_nobody_imports_what_does_the_wiring() -> None:
    assert not [name for name in MODULES if name not in WIRING and imports(tree(MODULES[name])) & WIRING]


def test_the_rules_know_every_part() -> None:
    assert {part(name) for name in MODULES} - WIRING <= RULES.keys()


@pytest.mark.parametrize(
    ("importer", "line"),
    [
        ("hostd.linux.process", "import hostd.kubevirt.qemu"),
        ("hostd.linux.process", "from hostd.core import model"),
        ("hostd.linux.process", "from hostd import kubevirt"),
        ("hostd.linux.process", "def f():\n    from hostd.config import load"),
        ("hostd.kubevirt.pods", "from hostd.core.model import VM"),
        ("hostd.core.decision", "from hostd.bus import manager"),
        ("hostd.bus.manager", "from hostd.linux.pidfd import Identity"),
        ("hostd.devices.claims", "from hostd.core.service import VMService"),
        ("hostd.core.decision", "from hostd.devices import claims"),
    ],
)
def test_a_wrong_import_is_found(importer: str, line: str) -> None:
    assert not all(allowed(importer, imported) for imported in imports(ast.parse(line)))


def test_a_right_import_is_none() -> None:
    source = (
        "import os\nfrom hostd import __version__\nfrom hostd.linux import pidfd\nfrom hostd.linux.process import pids"
    )
    assert all(allowed("hostd.core.decision", imported) for imported in imports(ast.parse(source)))

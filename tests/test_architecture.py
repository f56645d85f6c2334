"""The seams: one direction of imports, no method named in the core, small files named after concepts."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CORE = sorted((REPOSITORY / "lit_refusion").rglob("*.py"))
METHODS = sorted([*(REPOSITORY / "objectives").glob("*.py"), *(REPOSITORY / "decoders").glob("*.py")])
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}
METHOD_NAMES = re.compile(
    r"(?<!lit_)(?<!lit-)\b(refusion|autoregressive|llada|dream|bd3|sdar|orthrus)\b", re.IGNORECASE
)


def imported_modules(path: Path) -> set[str]:
    """Modules imported when the file is imported; imports inside functions do not count."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def test_the_core_imports_no_method() -> None:
    for path in CORE:
        assert not re.search(r"^\s*(import|from)\s+(objectives|decoders)\b", path.read_text(), re.MULTILINE), path


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_names_no_method(path: Path) -> None:
    """Methods are wired by `_target_` in YAML; a name in the core would be a special case."""
    found = METHOD_NAMES.findall(path.read_text())
    assert not found, f"{path} names {found}"


def test_methods_do_not_import_each_other() -> None:
    for path in METHODS:
        others = {name for name in imported_modules(path) if name.split(".")[0] in ("objectives", "decoders")}
        assert not others, f"{path} imports {others}"


def test_imports_have_no_cycle() -> None:
    files = {module_name(path): path for path in [*CORE, *METHODS]}
    graph = {name: imported_modules(path) & set(files) - {name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_methods_inherit_from_their_abc_and_nothing_else() -> None:
    for path in METHODS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert [ast.unparse(base) for base in node.bases] in ([], ["Objective"], ["Decoder"]), (path, node.name)


@pytest.mark.parametrize("path", [*CORE, *METHODS], ids=lambda path: path.name)
def test_files_are_small_and_named_after_concepts(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES
    assert len(path.read_text().splitlines()) <= 320, f"{path} is too long"


def test_no_work_at_import() -> None:
    for path in [*CORE, *METHODS]:
        for node in ast.parse(path.read_text()).body:
            text = ast.unparse(node)
            assert not text.startswith(("os.environ", "sys.path")), f"{path}: {text}"

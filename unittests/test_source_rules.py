"""Rules that the sources keep: where collectives and private Paddle names may be, no assert, examples that run."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from unittests.conftest import STARTS_PROCESSES

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "paddle_group_sharded"
FILES = sorted(PACKAGE.rglob("*.py"))
COMPAT = (PACKAGE / "paddle_compat.py", PACKAGE / "paddle_pipeline.py")
COLLECTIVES = frozenset(
    (
        "all_gather all_gather_object all_reduce all_to_all all_to_all_single alltoall alltoall_single barrier "
        "batch_isend_irecv broadcast broadcast_object_list gather irecv isend new_group recv reduce reduce_scatter "
        "scatter scatter_object_list send stream wait"
    ).split()
)
PUBLIC_IN_SPITE_OF_THEIR_NAMES = {"_replace", "_asdict", "_fields", "_make"}  # of named tuples

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain that begins with a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def paddle_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of all that is imported and of all that is read from it, aliases resolved."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                aliases[name.asname or top] = name.name if name.asname else top
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                yield node.lineno, f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in aliases:
                yield node.lineno, f"{aliases[first]}.{rest}"


def collectives(tree: ast.Module) -> list[str]:
    """Paddle's collectives that a module names."""
    return [
        f"line {line}: {name}"
        for line, name in paddle_names(tree)
        if name.startswith("paddle.distributed.") and COLLECTIVES & set(name.split(".")[2:])
    ]


def private_names(tree: ast.Module, own: frozenset[str]) -> list[str]:
    """Private names of Paddle that a module uses; ``own`` are the private names that the package itself defines."""
    found = []
    for line, name in paddle_names(tree):
        parts = name.split(".")
        if parts[0] == "paddle" and any(p in ("base", "fluid", "core") or p.startswith("_") for p in parts[1:]):
            found.append(f"line {line}: {name}")
    for node in ast.walk(tree):  # such as tensor._clear_data()
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if dotted(node.value) not in ("self", "cls") and node.attr not in own:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@functools.cache
def own_attributes() -> frozenset[str]:
    """Private names that the package defines: functions, assignments to self, fields, slots."""
    names = set(PUBLIC_IN_SPITE_OF_THEIR_NAMES)
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return frozenset(names)


@every_file
def test_collectives_are_called_in_comm_only(path: Path) -> None:
    if path.parent.name != "comm":
        assert "\n".join(collectives(parse(path))) == ""


@every_file
def test_the_wrapped_process_group_is_used_in_comm_only(path: Path) -> None:
    if path.parent.name != "comm" and path not in COMPAT:
        used = {name.name for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom) for name in node.names}
        assert used & {"GlooGroup", "tcp_store"} == set()


@every_file
def test_private_paddle_names_are_in_paddle_compat_only(path: Path) -> None:
    if path not in COMPAT:
        assert "\n".join(private_names(parse(path), own_attributes())) == ""


@every_file
def test_no_assert_no_global_no_star_import(path: Path) -> None:
    found = []
    for node in ast.walk(parse(path)):
        star = isinstance(node, ast.ImportFrom) and any(name.name == "*" for name in node.names)
        if star or isinstance(node, (ast.Assert, ast.Global)):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert found == []


@every_file
def test_sources_are_ascii(path: Path) -> None:
    lines = path.read_bytes().splitlines()
    assert [number for number, line in enumerate(lines, 1) if not line.isascii()] == []


@every_file
def test_docstring_examples_run(path: Path) -> None:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    if parts[-1] == "__main__":
        pytest.skip("importing it runs the command line")
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


@pytest.mark.parametrize(
    "source",
    [
        "import paddle\npaddle.distributed.all_reduce(t)",
        "import paddle.distributed as dist\ndist.stream.all_gather(a, b)",
        "from paddle import distributed\ndistributed.barrier()",
        "from paddle.distributed import new_group as group",
        "from paddle.distributed.communication.stream import all_reduce",
    ],
)
def test_the_search_for_collectives_finds(source: str) -> None:
    assert collectives(ast.parse(source)) != []


def test_the_search_for_collectives_leaves_alone() -> None:
    source = "import paddle.distributed as dist\ndist.get_rank()\ncomm.all_reduce(t)\nfrom .comm import all_reduce"
    assert collectives(ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from paddle.base import core",
        "import paddle\npaddle.base.core.globals()",
        "import paddle\npaddle._C_ops.add(a, b)",
        "from paddle.framework import core",
        "tensor._clear_data()",
        "self.param._share_buffer_to(x)",
    ],
)
def test_the_search_for_private_names_finds(source: str) -> None:
    assert private_names(ast.parse(source), frozenset({"_own"})) != []


def test_the_search_for_private_names_leaves_alone() -> None:
    source = "import paddle\npaddle.nn.Linear(1, 1)\nself._mine = 1\nother._own()\nx.__class__\nlocal.core"
    assert private_names(ast.parse(source), frozenset({"_own"})) == []


def test_ctest_and_pytest_tell_pure_from_process_alike() -> None:
    pattern = STARTS_PROCESSES.pattern.replace("\\", "\\\\")
    assert f'set(STARTS_PROCESSES "{pattern}")' in (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")

"""Which package imports which: kernels <- plugins -> pariskv, and what a bare `import pariskv` costs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "pariskv": "pariskv",
    "pariskv_plugins": "plugins/pariskv_plugins",
    "pariskv_kernels": "kernels/pariskv_kernels",
}
HEAVY = {"transformers", "huggingface_hub", "accelerate", "gguf", "numba", "cuda"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / PACKAGES[package]).rglob("*.py"))


def parse(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"), str(module))


def imported(nodes: Iterator[ast.AST]) -> set[str]:
    """Top-level names of the packages that these nodes import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: no function bodies, nothing under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import_time(child)


def offenders(package: str, forbidden: set[str], *, anywhere: bool, outside: str = "-") -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module in modules(package):
        name = module.relative_to(ROOT).as_posix()
        if not name.startswith(outside):
            tree = parse(module)
            if bad := imported(ast.walk(tree) if anywhere else at_import_time(tree)) & forbidden:
                found[name] = bad
    return found


def test_every_package_has_modules() -> None:
    assert all(len(modules(package)) > 1 for package in PACKAGES)


def test_the_core_reaches_plugins_and_kernels_by_name_only() -> None:
    ours = {"pariskv_plugins", "pariskv_kernels"}
    assert offenders("pariskv", ours, anywhere=True, outside="pariskv/bench/") == {}
    assert offenders("pariskv", ours, anywhere=False) == {}  # the benchmarks time kernels, inside functions


def test_kernels_know_neither_the_core_nor_the_plugins() -> None:
    assert offenders("pariskv_kernels", {"pariskv", "pariskv_plugins"}, anywhere=True) == {}


def test_the_core_imports_nothing_heavy_at_import_time() -> None:
    assert offenders("pariskv", HEAVY, anywhere=False, outside="pariskv/integrations/") == {}


def test_plugins_import_nothing_heavy_at_import_time() -> None:
    assert offenders("pariskv_plugins", HEAVY, anywhere=False) == {}


def test_only_the_integrations_import_transformers() -> None:
    hub = {"transformers", "huggingface_hub", "accelerate"}
    assert offenders("pariskv", hub, anywhere=True, outside="pariskv/integrations/") == {}
    assert offenders("pariskv_plugins", hub, anywhere=True) == {}
    assert offenders("pariskv_kernels", hub, anywhere=True) == {}


@pytest.mark.parametrize("module", ["models", "hub", "fetch"])
def test_finding_a_model_imports_neither_torch_nor_transformers_before_it_is_asked_to(module: str) -> None:
    tree = parse(ROOT / "pariskv" / "integrations" / f"{module}.py")
    assert imported(at_import_time(tree)) & (HEAVY | {"torch"}) == set()


def test_the_import_rule_sees_what_it_must_see() -> None:
    tree = ast.parse(
        "if TYPE_CHECKING:\n    import transformers\n"
        "def lazy():\n    import numba\n"
        "try:\n    import gguf.reader\nexcept ImportError:\n    pass\n"
        "class Here:\n    from cuda import bindings\n"
    )
    assert imported(at_import_time(tree)) == {"gguf", "cuda"}
    assert imported(ast.walk(tree)) == {"transformers", "numba", "gguf", "cuda"}


@pytest.mark.parametrize(
    "statement", ["import pariskv", "import pariskv.registry", "import pariskv.integrations.fetch"]
)
def test_importing_is_light(statement: str) -> None:
    # torch takes `cuda` along where it is installed.
    code = (
        f"import sys, torch; before = set(sys.modules); {statement}; "
        f"print(*(set({sorted(HEAVY)!r}) & (sys.modules.keys() - before)))"
    )
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "plugins", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []

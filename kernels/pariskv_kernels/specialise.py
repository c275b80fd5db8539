"""Kernels written once, specialised by constants: loops that must be unrolled, register arrays, dead branches.

Numba leaves `for s in range(16)` a loop, so that a thread waits for every load before it asks for the next.
`@template` rewrites a kernel's own source for given constants before Numba compiles it:

    for s in static(N):   a copy of the body for each s, s a literal
    word[s]               with a literal index and no array of that name: a variable of its own, `word_3`
    if FLAG:              decided now, where FLAG is a constant

Its first statement becomes a wait for the kernels before it (`prepared` starts kernels early). Everything else is
plain Numba CUDA; the rewritten function keeps its file and line numbers.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import config, cuda

from pariskv_kernels.device import wait_for_the_kernels_before

config.CUDA_LOW_OCCUPANCY_WARNINGS = False  # a decode step's grids are small: a block for each head is meant


THREADS = "THREADS"
"""The constant that tells a kernel's threads, where it has one: no more registers are used than so many can have."""

LONGEST_NAME = 120
"""Characters of a kernel's name before the digest; a file's name has at most 255, with what Numba adds."""


def static(count: int) -> range:
    """Marks a loop for `template` to unroll; never called in a specialised kernel."""
    return range(count)


class Template:
    """A kernel's source; `template(N=16, ...)` is the kernel for these constants, compiled at its first launch.

    Integers and booleans are written into the source; anything else (a device function for a dtype) goes into
    the kernel's globals. Compiled kernels are kept on disk under a name that tells the constants and a digest of
    all sources: Numba looks at the kernel's own file only, and would go on using a device function's old code.
    """

    def __init__(self, function: Callable[..., None]):
        self.function = function
        self.__doc__ = function.__doc__
        self._made: dict[tuple[tuple[str, Any], ...], Any] = {}

    def __call__(self, **constants: Any) -> Any:
        key = tuple(sorted(constants.items(), key=lambda item: item[0]))
        if key not in self._made:
            name = _name(self.function.__name__, [_label(name, value) for name, value in key])
            kernel = self._specialised(name, constants)
            options = {} if config.ENABLE_CUDASIM else {"cache": True, "launch_bounds": constants.get(THREADS)}
            self._made[key] = cuda.jit(**options)(kernel)
        return self._made[key]

    def _specialised(self, name: str, constants: dict[str, Any]) -> Callable[..., None]:
        lines, first = inspect.getsourcelines(self.function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, first - 1)
        literals = {key: value for key, value in constants.items() if isinstance(value, int)}
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        arrays = {argument.arg for argument in function.args.args} | _arrays_of(function)
        function.name, function.decorator_list = name, []
        body = [new for old in function.body for new in _Writer(literals, arrays).write(old)]
        function.body = [*ast.parse(f"{wait_for_the_kernels_before.__name__}()").body, *body]
        code = compile(ast.fix_missing_locations(tree), inspect.getfile(self.function), "exec")
        # numpy, math, device functions: what the template's module knows.
        waiting = {wait_for_the_kernels_before.__name__: wait_for_the_kernels_before}
        namespace = {**self.function.__globals__, **waiting, **constants}
        exec(code, namespace)
        made: Callable[..., None] = namespace[name]
        return made


def template(function: Callable[..., None]) -> Template:
    """Decorator: the function is a kernel to be specialised, see the module."""
    return Template(function)


def _name(function: str, labels: list[str]) -> str:
    whole = "_".join([function, *labels])
    digest = hashlib.sha256(whole.encode() + _sources()).hexdigest()[:12]
    return f"{whole[:LONGEST_NAME]}_{digest}"


@lru_cache
def _sources() -> bytes:
    """A digest of the package's Python files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def _label(name: str, value: Any) -> str:
    return f"{name}{int(value)}" if isinstance(value, int) else getattr(value, "__name__", str(value))


def _arrays_of(function: ast.FunctionDef) -> set[str]:
    """Names that are bound to the result of a call or to a slice: shared or viewed arrays."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.Subscript):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


class _Writer(ast.NodeTransformer):
    """Writes one statement for the literals at hand; a statement may become many, or none."""

    def __init__(self, literals: dict[str, int], arrays: set[str]):
        self.literals, self.arrays = literals, arrays

    def write(self, statement: ast.stmt) -> list[ast.stmt]:
        done = self.visit(_copy(statement))
        return done if isinstance(done, list) else [done]

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "static"):
            return self.generic_visit(node)
        count = _constant(self.visit(call.args[0]))
        assert isinstance(node.target, ast.Name)
        assert count is not None, ast.unparse(call)
        out: list[ast.stmt] = []
        for value in range(count):
            inner = _Writer({**self.literals, node.target.id: value}, self.arrays)
            out += [new for old in node.body for new in inner.write(old)]
        return out

    def visit_If(self, node: ast.If) -> Any:
        test = self.visit(node.test)
        chosen = _constant(test)
        if chosen is None:
            node.test = test
            node.body = [new for old in node.body for new in self.write(old)]
            node.orelse = [new for old in node.orelse for new in self.write(old)]
            return node
        kept = node.body if chosen else node.orelse
        return [new for old in kept for new in self.write(old)]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.literals:
            return ast.copy_location(ast.Constant(self.literals[node.id]), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        index = _constant(node.slice)
        if index is None or not isinstance(node.value, ast.Name) or node.value.id in self.arrays:
            return node
        return ast.copy_location(ast.Name(f"{node.value.id}_{index}", node.ctx), node)


def _copy(statement: ast.stmt) -> ast.stmt:
    """A deep copy that keeps the line numbers."""
    copied = ast.parse(ast.unparse(statement)).body[0]
    for node in ast.walk(copied):
        if hasattr(node, "lineno"):
            ast.copy_location(node, statement)
    return copied


@lru_cache(maxsize=4096)
def _evaluate(source: str) -> int | None:
    try:
        return int(eval(source, {"__builtins__": {}}, {"min": min, "max": max}))
    except (NameError, TypeError, SyntaxError, AttributeError):
        return None


def _constant(node: ast.AST) -> int | None:
    """The value of an expression of literals, None for any other."""
    if any(isinstance(part, ast.Name) and part.id not in ("min", "max") for part in ast.walk(node)):
        return None
    return _evaluate(ast.unparse(node))

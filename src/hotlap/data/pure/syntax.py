"""The text of functions, as syntax trees, and questions about it."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from hotlap.store.keys import bytecode

Written = ast.FunctionDef | ast.Lambda


def tree_of(function: types.FunctionType) -> Written | None:
    """The syntax tree of a function; None without source text, or if the text is not what runs."""
    code, file = function.__code__, function.__code__.co_filename
    if file.startswith("<frozen "):  # Python's own, with the text beside it
        file = str(getattr(sys.modules.get(file[8:-1]), "__file__", file))
    linecache.checkcache(file)
    lines = linecache.getlines(file, function.__globals__)
    found = _compiled("".join(lines), file)
    if found is None:
        return None
    written, compiled = found
    if _key(code) not in compiled:
        return None
    nodes = [node for node in written.get((code.co_firstlineno, code.co_name), []) if _holds(node, code)]
    return min(nodes, key=_length) if nodes else None


@functools.lru_cache(maxsize=64)
def _compiled(text: str, file: str) -> tuple[dict[tuple[int, str], list[Written]], set[str]] | None:
    """The functions of a file by line and name, and the keys of their compiled code."""
    try:
        tree, code = ast.parse(text), compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    written: dict[tuple[int, str], list[Written]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            written.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            written.setdefault((node.lineno, "<lambda>"), []).append(node)
    return written, {_key(one) for one in _codes(code)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _key(code: types.CodeType) -> str:
    return repr((code.co_firstlineno, code.co_name, code.co_varnames, code.co_freevars, bytecode(code)))


def _holds(node: Written, code: types.CodeType) -> bool:
    """Whether a node contains all of a function's code: one line may hold several lambdas."""
    if isinstance(node, ast.FunctionDef):
        return True
    start, end = (node.body.lineno, node.body.col_offset), (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    for line, last, column, last_column in code.co_positions():
        if None in (line, last, column, last_column) or (column == 0 and last_column == 0):
            continue
        if (line, column) < start or (last, last_column) > end:
            return False
    return True


def _length(node: Written) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


# --- small questions ---------------------------------------------------------------------------------


_TELLING = {"debug", "info", "warning", "error", "critical", "keys", "values", "items", "join", "format"}
"""Methods that write to a log, and those that put words for it together."""


@functools.lru_cache(maxsize=256)
def declared_in(node: Written) -> frozenset[str]:
    found = [one for one in ast.walk(node) if isinstance(one, (ast.Global, ast.Nonlocal))]
    return frozenset(name for one in found for name in one.names)


def does_nothing_else(guard: ast.If, function: Written) -> bool:
    """Whether the code after an `if` is the same whether its body ran or not, but for what its calls do."""
    inside = {id(one) for one in ast.walk(guard)}
    leaving = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Subscript, ast.NamedExpr, ast.AugAssign, ast.Delete)
    body = [one for statement in guard.body for one in ast.walk(statement)]
    named = {one.id for one in body if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    others = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and id(one) not in inside}
    calls = [one.func for one in body if isinstance(one, ast.Call)]
    called = {one.attr for one in calls if isinstance(one, ast.Attribute)} - _TELLING
    called |= {ast.unparse(one) for one in calls if not isinstance(one, ast.Attribute)} - vars(builtins).keys()
    return not (guard.orelse or called or named & others or any(isinstance(one, leaving) for one in body))


def is_restored(write: ast.stmt, after: ast.Try, function: types.FunctionType) -> bool:
    """Whether a write to an entry of a dict is undone as soon as the statement after it ends, however it ends.

    As in `was = d[k]; d[k] = 1; try: … finally: d[k] = was`, where the function sets none of these names again.
    """
    if not isinstance(write, ast.Assign) or len(write.targets) != 1 or not isinstance(write.targets[0], ast.Subscript):
        return False
    target, whole = write.targets[0], tree_of(function)
    undoing = [
        one
        for one in after.finalbody
        if isinstance(one, ast.Assign) and list(map(ast.unparse, one.targets)) == [ast.unparse(target)]
    ]
    if whole is None or len(undoing) != 1 or not isinstance(undoing[0].value, ast.Name):
        return False
    set_here = [one.id for one in ast.walk(whole) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    saved, used = undoing[0].value.id, {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    kept = [
        one
        for one in ast.walk(whole)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name) and one.targets[0].id == saved
    ]
    is_saved = len(kept) == 1 and kept[0].lineno < write.lineno and _reads(kept[0].value, target)
    return is_saved and set_here.count(saved) == 1 and not used.intersection(set_here)


def _reads(node: ast.expr, target: ast.Subscript) -> bool:
    """Whether an expression is an entry, as `d[k]` or `d.get(k, …)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        node = ast.Subscript(node.func.value, node.args[0])
    return ast.unparse(node) == ast.unparse(target)


def loaded(target: ast.expr) -> ast.expr:
    """The target of an assignment as an expression to read."""
    match target:
        case ast.Name():
            return ast.copy_location(ast.Name(target.id, ast.Load()), target)
        case ast.Subscript():
            return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target


def mangled(name: str, function: types.FunctionType) -> str:
    """A name with two underscores as Python mangles it in its class."""
    if not name.startswith("__") or name.endswith("__"):
        return name
    homes = function.__qualname__.split(".")[:-1]
    return f"_{homes[-1].lstrip('_')}{name}" if homes and homes[-1] != "<locals>" else name


def shown(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 40 else f"{text[:38]} …"


def place(function: types.FunctionType, node: ast.AST) -> str:
    return f" ({Path(function.__code__.co_filename).name}, line {getattr(node, 'lineno', 0)})"

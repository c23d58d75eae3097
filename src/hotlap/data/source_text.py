"""The syntax tree of a function that runs, where its source text can be found and is what runs."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator

from hotlap.store.keys import bytecode

Written = ast.FunctionDef | ast.Lambda


def tree_of(function: types.FunctionType) -> Written | None:
    """The tree of a function; None where there is no text of it, or the text is no longer what runs."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = _compiled("".join(lines), code.co_filename)
    if found is None:
        return None
    written, compiled = found
    if _key(code) not in compiled:
        return None
    nodes = [node for node in written.get((code.co_firstlineno, code.co_name), []) if _holds(node, code)]
    return min(nodes, key=_length) if nodes else None


@functools.lru_cache(maxsize=64)
def _compiled(text: str, file: str) -> tuple[dict[tuple[int, str], list[Written]], set[str]] | None:
    """The functions of a file by line and name, and what each of them compiles to."""
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
    """Whether all of a function's code was written in a node: one line may have several lambdas."""
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

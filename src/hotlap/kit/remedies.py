"""Changes of a script that remedy a finding, as unified diffs of the lines concerned."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def source_of(where: str) -> tuple[Path, int, list[str]] | None:
    """File, number and lines of a place such as `train.py:31`; None if it cannot be read."""
    file, _, number = where.rpartition(":")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        line = int(number)
    except (OSError, ValueError):
        return None
    return (Path(file), line, lines) if 1 <= line <= len(lines) else None


def text_at(where: str) -> str:
    """The line of source at a place; empty if it cannot be read."""
    found = source_of(where)
    return found[2][found[1] - 1].strip() if found is not None else ""


def diff_of(path: Path, before: Sequence[str], after: Sequence[str]) -> str:
    """A unified diff with one line of context; empty without a change."""
    return "\n".join(difflib.unified_diff(before, after, str(path), str(path), lineterm="", n=1))


def lines_changed(places: Sequence[str], change: Callable[[str], str]) -> str:
    """A diff that changes the lines at these places of one file, the first one's; empty if that changes nothing."""
    found = [one for one in map(source_of, places) if one is not None]
    numbers = {number for path, number, _ in found if path == found[0][0]}
    if not found:
        return ""
    path, _, lines = found[0]
    return diff_of(path, lines, [change(line) if at in numbers else line for at, line in enumerate(lines, 1)])


def every_line_changed(file: str, change: Callable[[str], str]) -> str:
    """A diff that changes every line of a file."""
    found = source_of(f"{file}:1")
    return "" if found is None else diff_of(found[0], found[2], [change(line) for line in found[2]])


def argument_set(where: str, name: str, value: str) -> str:
    """A diff that gives the call at a place this argument, by its name."""
    found = source_of(where)
    if found is None:
        return ""
    path, number, lines = found
    calls = [one for one in _nodes(lines) if isinstance(one, ast.Call) and _covers(one, number)]
    call = max(calls, key=lambda one: "DataLoader" in ast.unparse(one.func), default=None)
    if call is None or call.end_lineno is None or call.end_col_offset is None:
        return ""
    given = next((one.value for one in call.keywords if one.arg == name), None)
    if given is not None and given.end_lineno == given.lineno and given.end_col_offset is not None:
        at, begin, end, text = given.lineno, given.col_offset, given.end_col_offset, value
    else:
        at, begin = call.end_lineno, call.end_col_offset - 1
        end, text = begin, f", {name}={value}"
    # Offsets of ast count bytes.
    line = lines[at - 1].encode()
    changed = (line[:begin].removesuffix(b", ") + text.encode() + line[end:]).decode()
    return diff_of(path, lines, [*lines[: at - 1], changed, *lines[at:]])


def only_every(where: str, every: int) -> str:
    """A diff by which the statement at a place runs in one of so many updates, by a counter of the loop."""
    found = source_of(where)
    if found is None:
        return ""
    path, number, lines = found
    inner = [one for one in _nodes(lines) if isinstance(one, ast.stmt) and _covers(one, number)]
    if not inner:
        return ""
    statement = max(inner, key=lambda one: (one.lineno, -(one.end_lineno or 0)))
    first, last = statement.lineno - 1, statement.end_lineno or statement.lineno
    space = re.match(r"\s*", lines[first])
    indent, counter = space[0] if space else "", _counter(lines, number)
    head = f"{indent}if {counter or 'update'} % {every} == 0:" + ("" if counter else "  # count updates in your loop")
    return diff_of(path, lines, [*lines[:first], head, *(f"    {line}" for line in lines[first:last]), *lines[last:]])


def under_no_grad(where: str) -> str:
    """A diff by which the evaluation at a place records no graph: its function, else its outermost loop."""
    found = source_of(where)
    if found is None:
        return ""
    path, number, lines = found
    around = [one for one in _nodes(lines) if isinstance(one, ast.stmt) and _covers(one, number)]
    around = [one for one in around if ".backward(" not in ast.unparse(one)]
    if not around:
        return ""
    functions = [one for one in around if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    chosen = functions[-1] if functions else min(around, key=lambda one: one.lineno)
    first, last = chosen.lineno - 1, chosen.end_lineno or chosen.lineno
    space = re.match(r"\s*", lines[first])
    indent = space[0] if space else ""
    if functions:
        return diff_of(path, lines, [*lines[:first], f"{indent}@torch.no_grad()", *lines[first:]])
    body = [f"    {line}" for line in lines[first:last]]
    return diff_of(path, lines, [*lines[:first], f"{indent}with torch.no_grad():", *body, *lines[last:]])


def detached(file: str, holder: str) -> str:
    """A diff by which what `holder` collects, by `append` or by `+=`, keeps no graph."""
    name = re.escape(holder.split(" of ")[0].rpartition(".")[2])
    appended = re.compile(rf"\b({name})\.append\(([\w.]+)\)")
    added = re.compile(rf"\b({name})\s*(\+=|=\s*{name}\s*\+)\s*([\w.]+)$")

    def change(line: str) -> str:
        return added.sub(r"\1 \2 \3.detach()", appended.sub(r"\1.append(\2.detach())", line))

    return every_line_changed(file, change) if name else ""


def without_copy(line: str) -> str:
    """A line without its first copy of a tensor."""
    for wrong, right in (
        (r"\.clone\(\)", ""),
        (r"torch\.(?:as_)?tensor\(([\w.]+)\)", r"\1"),
        (r"(?:copy\.)?deepcopy\(([\w.]+)\)", r"\1"),
    ):
        changed = re.sub(wrong, right, line, count=1)
        if changed != line:
            return changed
    return line


def narrowed(line: str) -> str:
    """A line with float32 where it names float64."""
    return re.sub(r"\.double\(\)", ".float()", re.sub(r"\b(torch|np|numpy)\.(float64|double)\b", r"\1.float32", line))


def _nodes(lines: Sequence[str]) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse("\n".join(lines)))
    except SyntaxError:
        return iter(())


def _covers(node: ast.stmt | ast.expr, number: int) -> bool:
    return node.lineno <= number <= (node.end_lineno or node.lineno)


def _counter(lines: Sequence[str], number: int) -> str:
    """The variable of a loop around a line that counts, by `enumerate`."""
    loops = [one for one in _nodes(lines) if isinstance(one, ast.For) and _covers(one, number)]
    for loop in reversed(loops):
        is_counted = isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "enumerate"
        if is_counted and isinstance(loop.target, ast.Tuple) and isinstance(loop.target.elts[0], ast.Name):
            return loop.target.elts[0].id
    return ""

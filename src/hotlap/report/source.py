"""A script as source text: where its loader, optimizers and calls of the model stand, and edits at those places.

hotlap reads the script and runs none of it. A name counts only if the text alone decides what it stands for.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from hotlap.core.errors import HotlapError

Function = ast.FunctionDef | ast.AsyncFunctionDef
Binding = tuple[ast.Module | Function, str]
"""A scope, and a name in it."""

FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""The optimizers of torch that have a fused kernel."""
DATA = "torch.utils.data"
PARTS = (f"{DATA}.random_split", f"{DATA}.Subset")
"""What makes parts of a dataset, which take many indices at once if the whole does."""
PASSED_ON = ("enumerate", "tqdm", "track")
"""Functions that hand on the batches of a loader."""
DEEPEST = 20
"""Names that stand for names, in a row."""


class NotFoundError(HotlapError):
    """The text does not tell where a change belongs; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A piece of the text, by its first and last character, and what takes its place."""

    begin: int
    end: int
    text: str


class Source:
    """A script's text. The methods that look for a place raise NotFoundError where they are not certain of it."""

    def __init__(self, text: str) -> None:
        """Raise NotFoundError where the text is not Python that this version reads."""
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise NotFoundError("the script is not Python source that this Python reads") from None
        if not text.replace("\n", "").replace("\t", "").isprintable():
            raise NotFoundError("the script holds characters that cannot be printed, such as the line ends of Windows")
        self.text = text
        self._lines = text.split("\n")
        self._starts = _starts(self._lines)
        self._above = {inner: node for node in ast.walk(self.tree) for inner in ast.iter_child_nodes(node)}
        given = _given(self.tree)
        self._used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)} | given
        self._imported = {name: of for name, of in _imports(self.tree) if name not in given}

    def edited(self, edits: list[Edit], begin: int = 0, end: int | None = None) -> str:
        """The text, or a piece of it, with edits that do not overlap; those at the same place follow each other."""
        text, at = "", begin
        for edit in sorted(edits, key=lambda one: (one.begin, one.end)):
            text, at = text + self.text[at : edit.begin] + edit.text, edit.end
        return text + self.text[at:end]

    # --- places ------------------------------------------------------------------------------

    def fused_optimizers(self) -> list[ast.Call]:
        """The calls that make optimizers with a fused kernel."""
        found = [call for call in self._optimizers() if self._kind(call) in FUSED]
        for call in found:
            named = {word.arg for word in call.keywords}
            if None in named or named & {"fused", "foreach", "differentiable"}:
                raise NotFoundError(f"line {call.lineno} chooses the kind of its update itself")
        if not found:
            raise NotFoundError("the script makes no optimizer of torch's by its name")
        return found

    def training_loader(self) -> ast.Call:
        """The call that makes the loader of the training loop."""
        loop = self._training_part()
        if not isinstance(loop, ast.For):
            raise NotFoundError("the backward pass stands in no loop over batches")
        found = self._handed_on(loop.iter)
        if not isinstance(found, ast.Call) or self._dotted(found.func) != f"{DATA}.DataLoader":
            raise NotFoundError(f"line {loop.lineno} does not tell which DataLoader it goes through")
        return found

    def training_call(self) -> ast.Call:
        """The call of the model before the backward pass."""
        trained = self._trained_models()
        calls = [
            node
            for node in self._within(self._training_part())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and self._is_trained(node.func, trained)
        ]
        if len(calls) != 1:
            many = f"in {len(calls)} places" if calls else "nowhere that hotlap recognises"
            raise NotFoundError(f"the training loop calls the model {many}")
        return calls[0]

    def model_of_optimizer(self) -> tuple[str, ast.stmt]:
        """The name under which the only optimizer gets the model, and the statement that makes the optimizer."""
        optimizers = list(self._optimizers())
        names = [name for call in optimizers for name in self._parameters_of(call)]
        if len(optimizers) != 1 or len({name.id for name in names}) != 1:
            raise NotFoundError("not one optimizer takes the parameters of one model")
        statement = self.statement_of(optimizers[0])
        if self.scope_of(names[0]) is not self.scope_of(optimizers[0]):
            raise NotFoundError("the optimizer's parameters come from elsewhere")
        return names[0].id, statement

    def forward_statements(self) -> tuple[ast.stmt, ast.stmt]:
        """The first and the last of the statements from the call of the model to its loss."""
        call, backward = self.training_call(), self._backward()
        first, last = self.statement_of(call), self.statement_of(backward)
        body = self._body_of(last)
        loss = backward.func.value if isinstance(backward.func, ast.Attribute) else None
        if first is last or first not in body or not isinstance(loss, ast.Name):
            raise NotFoundError(f"line {last.lineno} makes the loss and its backward pass at once")
        between = body[body.index(first) : body.index(last)]
        makes = [at for at, one in enumerate(between) if loss.id in _assigned(one)]
        if not makes:
            raise NotFoundError(f"{loss.id} of line {last.lineno} is made elsewhere")
        forward = between[: makes[-1] + 1]
        if not all(isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign)) for one in forward):
            raise NotFoundError(f"other statements stand between lines {first.lineno} and {forward[-1].lineno}")
        return first, forward[-1]

    def copies_to_device(self) -> list[ast.Call]:
        """The calls that copy a batch to the device, in the training loop."""
        loop = self._training_part()
        batch = _assigned(loop.target) if isinstance(loop, ast.For) else set()
        found = []
        for node in self._within(loop):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or node.keywords:
                continue
            of, most = node.func.value, {"to": (1, 1), "cuda": (0, 1)}.get(node.func.attr)
            of = of.value if isinstance(of, ast.Subscript) else of
            if most is None or not isinstance(of, ast.Name) or of.id not in batch:
                continue
            if most[0] <= len(node.args) <= most[1] and not any(isinstance(one, ast.Starred) for one in node.args):
                found.append(node)
        if not found:
            raise NotFoundError("hotlap finds no .to(device) of a batch in the training loop")
        return found

    def tensors_of(self, dataset: ast.expr) -> tuple[ast.Call, bool]:
        """The call that makes a `TensorDataset`, and whether the dataset is only a part of that."""
        found, is_part = self.resolved(dataset), False
        if isinstance(found, ast.Call) and found.args and self._dotted(found.func) in PARTS:
            found, is_part = self.resolved(found.args[0]), True
        if not isinstance(found, ast.Call) or self._dotted(found.func) != f"{DATA}.TensorDataset":
            raise NotFoundError("only a TensorDataset certainly takes many indices at once")
        return found, is_part

    def uses_of(self, name: ast.Name) -> int:
        """How many times a variable is read."""
        binding = self._binding(name)
        names = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == name.id]
        return sum(isinstance(one.ctx, ast.Load) and self._binding(one) == binding for one in names)

    def set_in(self, setting: str) -> int | None:
        """The line in which the script sets this attribute, or calls this function, itself."""
        for node in ast.walk(self.tree):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            place = node.func if isinstance(node, ast.Call) else node
            if (is_set or isinstance(node, ast.Call)) and self._dotted(place) == setting:
                return int(getattr(node, "lineno", 0))
        return None

    def header(self) -> tuple[int, bool]:
        """Where lines behind the first imports belong, and whether `torch` is imported by then."""
        last, has_torch = None, False
        for statement in self.tree.body:
            is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not isinstance(statement, (ast.Import, ast.ImportFrom)) and not (is_docstring and last is None):
                break
            last = statement
            names = statement.names if isinstance(statement, ast.Import) else []
            has_torch |= any(name.name.partition(".")[0] == "torch" and name.asname is None for name in names)
        if last is None or isinstance(last, ast.Expr):
            raise NotFoundError("the script begins without imports")
        if self._lines[(last.end_lineno or 1) - 1].encode()[last.end_col_offset or 0 :].split(b"#")[0].strip():
            raise NotFoundError(f"line {last.end_lineno} holds more than an import")
        return self.line_start((last.end_lineno or 1) + 1), has_torch

    def knows(self, name: str) -> str | None:
        """What a name stands for by the script's imports, or itself where the script uses it; None: it is free."""
        return self._imported.get(name) or (name if name in self._used else None)

    # --- pieces of text ----------------------------------------------------------------------

    def piece(self, node: ast.expr) -> str:
        """The text of an expression."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The first character of a node, and the one behind it."""
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno or 0, node.end_col_offset or 0)

    def line_start(self, number: int) -> int:
        """The first character of a line."""
        return self._starts[number - 1] if number <= len(self._starts) else len(self.text)

    def indent_of(self, statement: ast.stmt) -> str:
        """What stands before a statement that has its lines for itself."""
        line = self._lines[statement.lineno - 1].encode()
        before, after = line[: statement.col_offset].decode(), self._behind(statement)
        if before.strip() or after:
            raise NotFoundError(f"line {statement.lineno} holds more than one statement")
        return before

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement around an expression; raises NotFoundError where that is more than one line of work."""
        while not isinstance(node, ast.stmt):
            node = self._above[node]
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
            raise NotFoundError(f"line {node.lineno} does more than one thing")
        return node

    def with_argument(self, call: ast.Call, text: str) -> Edit:
        """One more argument for a call."""
        begin, end = self.span(call)
        is_generator = len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.GeneratorExp)
        if is_generator and self.span(call.args[0])[1] == end:
            raise NotFoundError(f"line {call.lineno} hands over a generator without parentheses")
        last, at = "", begin
        for token, stop in self._tokens(begin, end - 1):
            last, at = token, stop
        glue = {"(": "", ",": " "}.get(last, ", ") if (call.args or call.keywords) else ""
        comma = "," if last == "," else ""
        return Edit(begin=at, end=at, text=f"{glue}{text}{comma}")

    def indented(self, first: ast.stmt, last: ast.stmt, head: str) -> list[Edit]:
        """A line before some statements, which move to the right below it."""
        indent = self.indent_of(first)
        numbers = range(first.lineno, (last.end_lineno or last.lineno) + 1)
        begin, end = self.line_start(numbers[0]), self.line_start(numbers[-1] + 1)
        if self._holds_long_strings(begin, end):
            raise NotFoundError(f"a text of several lines stands in lines {numbers[0]} to {numbers[-1]}")
        edits = [Edit(begin=begin, end=begin, text=f"{indent}{head}\n")]
        step = "\t" if "\t" in indent else "    "
        starts = [self.line_start(number) for number in numbers if self._lines[number - 1].strip()]
        return [*edits, *(Edit(begin=at, end=at, text=step) for at in starts)]

    def _behind(self, statement: ast.stmt) -> bool:
        rest = self._lines[(statement.end_lineno or 1) - 1].encode()[statement.end_col_offset or 0 :].strip()
        return bool(rest) and not rest.startswith(b"#")

    def _at(self, line: int, column: int) -> int:
        """The place of a character from its line and its column in bytes, as `ast` counts."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _tokens(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """The tokens of a piece of code, each with the place behind it; without comments and ends of lines."""
        piece = f"({self.text[begin:end]}\n)"  # in parentheses lines may break
        starts = _starts(piece.split("\n"))
        skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER)
        with_ends = tokenize.generate_tokens(io.StringIO(piece).readline)
        try:
            for token in with_ends:
                place = begin + starts[token.end[0] - 1] + token.end[1] - 1
                if token.type not in skipped and place <= end and token.string:
                    yield token.string, place
        except tokenize.TokenError:  # the piece ends before its own last parenthesis
            return

    def _holds_long_strings(self, begin: int, end: int) -> bool:
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
        long = [self.span(node) for node in nodes if (node.end_lineno or 0) > node.lineno]
        return any(begin <= place < end for place, _ in long)

    # --- what names stand for ----------------------------------------------------------------

    def scope_of(self, node: ast.AST) -> ast.Module | Function | None:
        """The function around a node, or the module; None within a class or a lambda, which hotlap does not follow."""
        while node in self._above:
            inner, node = node, self._above[node]
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner in node.body:
                return None if isinstance(self._above.get(node), ast.ClassDef) else node
            if isinstance(node, (ast.ClassDef, ast.Lambda)):
                return None
        return self.tree

    def resolved(self, node: ast.expr) -> ast.expr | None:
        """The expression that a name stands for, if that is only one."""
        for _ in range(DEEPEST):
            if not isinstance(node, ast.Name):
                return node
            found = self._binding(node)
            given = self._argument(*found) if found is not None else None
            found_value = given if given is not None or found is None else self._value(*found)
            if found_value is None:
                return None
            node = found_value
        return None

    def _binding(self, name: ast.Name) -> Binding | None:
        """Where a name gets its values: through arguments of functions that are called at one place alone."""
        scope, word = self.scope_of(name), name.id
        for _ in range(DEEPEST):
            if scope is None:
                return None
            given = self._argument(scope, word)
            if isinstance(given, ast.Name):
                scope, word = self.scope_of(given), given.id
            elif given is not None or scope is self.tree or word in _parameters(scope) or self._stores(scope, word):
                return scope, word
            else:
                scope = self.scope_of(scope)
        return None

    def _argument(self, scope: ast.Module | Function, name: str) -> ast.expr | None:
        """What the only call of a function hands over for a parameter that the function does not set itself."""
        if isinstance(scope, ast.Module) or name not in _parameters(scope) or self._stores(scope, name):
            return None
        uses = [node for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id == scope.name]
        call = self._above[uses[0]] if len(uses) == 1 else None
        if not isinstance(call, ast.Call) or call.func is not uses[0] or scope.decorator_list:
            return None
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            return None
        places = [one.arg for one in (*scope.args.posonlyargs, *scope.args.args)]
        named = {word.arg: word.value for word in call.keywords}
        at = places.index(name) if name in places else len(call.args)
        return call.args[at] if at < len(call.args) else named.get(name)

    def _stores(self, scope: ast.Module | Function, name: str) -> list[ast.AST]:
        """The places in a scope that give a name a value."""
        return [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Name)
            and node.id == name
            and not isinstance(node.ctx, ast.Load)
            and self.scope_of(node) is scope
        ]

    def _value(self, scope: ast.Module | Function, name: str) -> ast.expr | None:
        """What a variable is set to, where it is set once."""
        stores = self._stores(scope, name)
        place = self._above[stores[0]] if len(stores) == 1 else None
        if isinstance(place, ast.AnnAssign):
            return place.value
        if isinstance(place, ast.Assign) and len(place.targets) == 1:
            return place.value
        if not isinstance(place, ast.Tuple) or not isinstance(of := self._above[place], ast.Assign):
            return None
        at, value = place.elts.index(stores[0]), of.value  # type: ignore[arg-type]
        if isinstance(value, ast.Call):
            if self._dotted(value.func) in PARTS:
                return value
            value = self._returned(value)  # type: ignore[assignment]
        is_like = isinstance(value, ast.Tuple) and len(value.elts) == len(place.elts) and len(of.targets) == 1
        return value.elts[at] if is_like and isinstance(value, ast.Tuple) else None

    def _returned(self, call: ast.Call) -> ast.expr | None:
        """What a function of the script returns, where it returns at one place alone."""
        name = call.func.id if isinstance(call.func, ast.Name) else None
        made = [one for one in ast.walk(self.tree) if isinstance(one, ast.FunctionDef) and one.name == name]
        if len(made) != 1 or made[0].decorator_list:
            return None
        ends = [one for one in ast.walk(made[0]) if isinstance(one, ast.Return) and self.scope_of(one) is made[0]]
        return ends[0].value if len(ends) == 1 else None

    def _dotted(self, node: ast.AST) -> str | None:
        """A name with its modules, such as `torch.optim.AdamW`, by the script's imports."""
        if isinstance(node, ast.Attribute):
            before = self._dotted(node.value)
            return f"{before}.{node.attr}" if before else None
        return self._imported.get(node.id) if isinstance(node, ast.Name) else None

    # --- the training ------------------------------------------------------------------------

    def _optimizers(self) -> Iterator[ast.Call]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self._kind(node):
                yield node

    def _kind(self, call: ast.Call) -> str | None:
        """The class of an optimizer of torch's that a call makes."""
        head, _, kind = (self._dotted(call.func) or "").rpartition(".")
        return kind if head in ("torch.optim", f"torch.optim.{kind.lower()}") else None

    def _parameters_of(self, optimizer: ast.Call) -> list[ast.Name]:
        """The names of the models whose parameters an optimizer is given."""
        given = optimizer.args[0] if optimizer.args else next((one.value for one in optimizer.keywords), None)
        found = self.resolved(given) if given is not None else None
        return [
            node.func.value
            for node in (ast.walk(found) if found is not None else ())
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("parameters", "named_parameters")
            and isinstance(node.func.value, ast.Name)
        ]

    def _trained_models(self) -> set[Binding]:
        names = [name for call in self._optimizers() for name in self._parameters_of(call)]
        return {found for name in names if (found := self._binding(name)) is not None}

    def _is_trained(self, name: ast.Name, trained: set[Binding]) -> bool:
        return self._binding(name) in trained

    def _backward(self) -> ast.Call:
        """The only call of `backward`."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
        ]
        if len(found) != 1:
            raise NotFoundError(f"the script has {len(found)} backward passes" if found else "it has no .backward()")
        return found[0]

    def _training_part(self) -> ast.For | ast.While | Function | ast.Module:
        """The innermost loop around the backward pass, or the function."""
        node: ast.AST = self._backward()
        while node in self._above:
            node = self._above[node]
            if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef)):
                return node
        return self.tree

    def _within(self, part: ast.AST) -> Iterator[ast.AST]:
        """The nodes of the training part, without functions that it defines."""
        scope = part if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) else self.scope_of(part)
        return (node for node in ast.walk(part) if node is not part and self.scope_of(node) is scope)

    def _handed_on(self, node: ast.expr) -> ast.expr | None:
        """The loader behind `enumerate`, a progress bar and names."""
        found = self.resolved(node)
        for _ in range(DEEPEST):
            function = found.func if isinstance(found, ast.Call) else None
            word = getattr(function, "id", None) or getattr(function, "attr", None)
            if not isinstance(found, ast.Call) or word not in PASSED_ON or not found.args:
                return found
            found = self.resolved(found.args[0])
        return None

    def _body_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which one stands."""
        above = self._above[statement]
        bodies = [getattr(above, part, None) for part in ("body", "orelse", "finalbody")]
        return next(body for body in bodies if isinstance(body, list) and statement in body)


def _starts(lines: list[str]) -> list[int]:
    """The place of the first character of each line."""
    return [0, *accumulate(len(line) + 1 for line in lines[:-1])]


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that imports bring, each with what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (name.asname, name.name) if name.asname else (name.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def _given(tree: ast.Module) -> set[str]:
    """The names that the script gives to something itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def _parameters(function: ast.Module | Function) -> set[str]:
    if isinstance(function, ast.Module):
        return set()
    return {one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def _assigned(part: ast.stmt | ast.expr) -> set[str]:
    nodes = ast.walk(part)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

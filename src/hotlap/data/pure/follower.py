"""Following the code of a dataset without running it: statements, expressions and functions.

hotlap follows every value as one of a few kinds: an existing object (`Concrete`), plain data such as numbers, tensors
and pictures (`Data`), or a container (`Container`). It notes what the code reads, with the current value; if a branch
depends on such a value, hotlap follows only that branch. The proof ends at code that writes to anything that outlives
the call, draws random numbers, or calls unknown functions.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hotlap.data.pure.calls import MOST_ROUNDS, Calls
from hotlap.data.pure.known_calls import TORCHS, is_library
from hotlap.data.pure.read_state import MISSING, is_content
from hotlap.data.pure.syntax import (
    Written,
    declared_in,
    does_nothing_else,
    is_restored,
    loaded,
    mangled,
    place,
    shown,
    tree_of,
)
from hotlap.data.pure.values import (
    ITERATOR,
    NEW,
    NOTHING,
    NUMBER,
    Arguments,
    Atom,
    Attribute,
    Concrete,
    Container,
    Data,
    Instance,
    LocalFunction,
    RefusedError,
    Scope,
    Super,
    Value,
    concrete,
    exact,
    is_leaf,
    joined,
    make_container,
    make_dict,
    make_named,
    may_be_none,
    merged,
    single,
    union,
)

_SCALARS = (int, float, bool, str, bytes, type(None))
MOST_CALLS, MOST_DEPTH = 2000, 40
"""Limits: calls that hotlap follows in all, and their depth."""


DEPTH, FEW_CASES = 2, 6
"""How deep containers that grow are followed, and how many different entries of one."""


class Follower(Calls):
    """Follows code and notes what it reads."""

    def __init__(self, may_draw: bool) -> None:
        super().__init__(may_draw)
        self.where = ""
        self._calls = 0
        self._depth = 0
        self._live: list[Scope] = []
        self._growths = 0
        self._running: set[Any] = set()
        self._known: dict[Any, Value] = {}
        self._so_far: dict[Any, Value] = {}
        """What calls in progress are known to give, for those that happen within themselves."""
        self._within_itself: set[Any] = set()
        self._tested: ast.If | None = None
        self._within: list[ast.If] = []
        """The `if` whose test is followed, and those whose bodies are, in the function in progress."""
        self._reads: dict[tuple[int, Any], set[int]] = {}
        self._flags: dict[tuple[int, str], tuple[dict[str, Any], int]] = {}
        """Attributes that were read, by the `if` whose test did, and those that the body of that `if` sets."""

    def fetched(self, samples: Any) -> Value:
        """The samples as a value."""
        self.length(concrete(samples))
        found = self.subscript(concrete(samples), NUMBER)
        at_once = NOTHING if is_content(samples) else self.attribute(concrete(samples), "__getitems__")
        if at_once:
            found = union([found, self.iterate(self.call(at_once, Arguments([make_container(list, NUMBER)])))])
        self.plain(found, "gives")
        return found

    # --- functions -------------------------------------------------------------------------------

    def run(self, function: types.FunctionType, given: Arguments) -> Value:
        key = (id(function), tuple(given.places), tuple(sorted(given.names.items(), key=lambda row: row[0])),
               given.rest, given.more, self.is_seeded,
               self.version, tuple(self.overwritten.items()))  # fmt: skip
        if key in self._known:
            return self._known[key]
        if key in self._running:
            self._within_itself.add(key)
            return self._so_far.get(key, NOTHING)
        self._calls += 1
        if self._calls > MOST_CALLS or self._depth > MOST_DEPTH:
            raise RefusedError("calls too much to be followed")
        node = tree_of(function)
        if node is None:
            raise RefusedError(f"calls {function.__qualname__}, whose source text is not at hand")
        if function.__code__.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise RefusedError(f"calls the generator {function.__qualname__}")
        was, growths = self.where, self._growths
        tested, within = self._tested, self._within
        self._tested, self._within = None, []
        self._running.add(key)
        self._depth += 1
        try:
            found = self._result(key, function, node, given)
        finally:
            self._depth -= 1
            self._running.discard(key)
        self.where, self._tested, self._within = was, tested, within
        holds_more = self._growths != growths and not all(isinstance(atom, (Data, Concrete)) for atom in given.all)
        if not holds_more:  # otherwise the next call may fill another container
            self._known[key] = found
        # The result holds as long as the function has this code and these defaults.
        self.state.slot(function, "__code__", function.__code__)
        self.state.slot(function, "__defaults__", function.__defaults__)
        self.state.slot(function, "__kwdefaults__", function.__kwdefaults__)
        return found

    def _result(self, key: Any, function: types.FunctionType, node: Written, given: Arguments) -> Value:
        """The result of a function; of one that calls itself, once another round finds nothing more."""
        defaults = [self.read(one) for one in function.__defaults__ or ()]
        named = {name: self.read(one) for name, one in (function.__kwdefaults__ or {}).items()}
        for _ in range(MOST_ROUNDS):
            scope, known = Scope(function, node), dict(self._known)
            self._bind(scope, node, given, defaults, named)
            found = self._body(node, scope)
            if key not in self._within_itself or found == self._so_far.get(key, NOTHING):
                self._within_itself.discard(key)
                return found
            self._so_far[key], self._known = found, known  # what was found meanwhile may lack something
        raise RefusedError(f"calls {function.__qualname__} within itself")

    def run_local(self, local: LocalFunction, given: Arguments) -> Value:
        if id(local.node) in self._running:
            raise RefusedError("calls a function within itself")
        scope = local.scope.inner(local.node)
        arguments = local.node.args
        defaults = [self.value(one, local.scope) for one in arguments.defaults]
        named = {
            one.arg: self.value(default, local.scope)
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
        self._bind(scope, local.node, given, defaults, named)
        self._running.add(id(local.node))
        try:
            return self._body(local.node, scope)
        finally:
            self._running.discard(id(local.node))

    def _body(self, node: Written, scope: Scope) -> Value:
        scope.is_seeded = self.is_seeded
        self._live.append(scope)
        if isinstance(node, ast.Lambda):
            found, ends = self.value(node.body, scope), True
        else:
            ends = self._block(node.body, scope)
            found = union([*scope.returned, concrete(None) if ends else NOTHING])
        self._live.pop()
        if ends:
            self.left_as(scope.is_seeded)
        self.is_seeded = scope.is_seeded
        return found

    def _bind(
        self, scope: Scope, node: Written, given: Arguments, defaults: list[Value], named: dict[str, Value]
    ) -> None:
        arguments = node.args
        places = [*arguments.posonlyargs, *arguments.args]
        by_default = dict(zip([one.arg for one in places][len(places) - len(defaults) :], defaults, strict=True))
        by_default |= named
        left = dict(given.names)
        for number, one in enumerate(places):
            if number < len(given.places):
                value = given.places[number]
            elif one.arg in left:
                value = left.pop(one.arg)
            else:
                value = union([by_default.get(one.arg, NOTHING), given.rest, given.more])
            scope.set(one.arg, value)
        for one in arguments.kwonlyargs:
            scope.set(one.arg, left.pop(one.arg, NOTHING) or union([by_default.get(one.arg, NOTHING), given.more]))
        if arguments.vararg is not None:
            extra = given.places[len(places) :]
            items = extra if not given.rest else None
            scope.set(arguments.vararg.arg, make_container(tuple, union([*extra, given.rest]), items))
        if arguments.kwarg is not None:
            rest = make_container(dict, union([NEW, *left.values(), given.more]))
            scope.set(arguments.kwarg.arg, rest if given.more else make_named(left))

    # --- statements ------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Follow statements; return whether the code after them is reached."""
        for number, statement in enumerate(body):
            self.where = place(scope.function, statement)
            after = body[number + 1] if number + 1 < len(body) else None
            if isinstance(after, ast.Try) and is_restored(statement, after, scope.function):
                return self._overwritten(statement, body[number + 1 :], scope)
            if not self._statement(statement, scope):
                return False
        return True

    def _overwritten(self, write: ast.stmt, body: Sequence[ast.stmt], scope: Scope) -> bool:
        """Follow a write to an entry of an existing dict, and the statements after it, of which the first undoes it."""
        assert isinstance(write, ast.Assign)
        assert isinstance(write.targets[0], ast.Subscript)
        target = write.targets[0]
        held, key = single(self.value(target.value, scope)), exact(self.value(target.slice, scope))
        if type(held) is not dict or key not in held or (id(held), key) in self.overwritten:
            return self._statement(write, scope) and self._block(body, scope)
        self.overwritten[id(held), key] = self.value(write.value, scope)
        (first, *others), text = body, ast.unparse(target)
        assert isinstance(first, ast.Try)
        undone = [
            one for one in first.finalbody if not (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == text)
        ]
        goes_on = self._statement(ast.Try(first.body, first.handlers, first.orelse, undone), scope)
        del self.overwritten[id(held), key]
        return goes_on and self._block(others, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> bool:
        match node:
            case ast.Return():
                scope.returned.append(concrete(None) if node.value is None else self.value(node.value, scope))
                self.left_as(scope.is_seeded)
                return False
            case ast.Raise():
                if node.exc is not None:
                    self.value(node.exc, scope)
                self.left_as(scope.is_seeded)
                return False
            case ast.Expr():
                self.value(node.value, scope)
            case ast.Assign():
                for target in node.targets:
                    self._assign_from(target, node.value, scope)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign_from(node.target, node.value, scope)
            case ast.AugAssign():
                self._augmented(node, scope)
            case ast.If():
                return self._branched(node, scope)
            case ast.For() | ast.While():
                return self._looped(node, scope)
            case ast.With():
                for item in node.items:
                    entered = self._entered(self.value(item.context_expr, scope))
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, entered, scope)
                return self._block(node.body, scope)
            case ast.Try():
                return self._tried(node, scope)
            case ast.Assert():
                self.truth(self.value(node.test, scope))
            case ast.Break() | ast.Continue():
                scope.loops[-1].append(dict(scope.names))
                self.left_as(scope.loops_seeded[-1])
                return False
            case ast.FunctionDef():
                if node.decorator_list or any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in ast.walk(node)):
                    raise RefusedError(f"writes a function {node.name} that cannot be followed")
                scope.set(node.name, frozenset({LocalFunction(node, scope)}))
            case ast.Import() | ast.ImportFrom():
                self._imported(node, scope)
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Subscript):
                        owner = self.value(target.value, scope)
                        self.written_to(owner, "deletes entries of")
                        for atom in owner:
                            if isinstance(atom, Instance):
                                key = self.value(target.slice, scope)
                                self.call_method(atom, "__delitem__", Arguments([key]))
                    elif not isinstance(target, ast.Name):
                        raise RefusedError("deletes an attribute")
            case ast.Pass() | ast.Global() | ast.Nonlocal():
                pass
            case _:
                raise RefusedError(f"has a statement that cannot be followed ({type(node).__name__.lower()})")
        return True

    def _branched(self, node: ast.If, scope: Scope) -> bool:
        self._tested = node
        is_true = self.truth(self.value(node.test, scope))
        self._tested = None
        if is_true is False:
            return self._block(node.orelse, scope)
        before, was_seeded = dict(scope.names), self.is_seeded
        self._within.append(node)
        goes_on = self._block(node.body, scope)
        self._within.pop()
        if is_true:
            return goes_on
        after, scope.names = scope.names, before
        then_seeded, self.is_seeded = self.is_seeded, was_seeded
        others_go_on = self._block(node.orelse, scope)
        if goes_on:
            scope.names = merged(scope.names, after) if others_go_on else after
            if others_go_on:
                self.left_as(then_seeded)
            self.is_seeded = then_seeded
        return goes_on or others_go_on

    def _looped(self, node: ast.For | ast.While, scope: Scope) -> bool:
        if isinstance(node, ast.For):
            coming = self.iterate(self.value(node.iter, scope))
        was_seeded = self.is_seeded
        for _ in range(MOST_ROUNDS):
            before, version = dict(scope.names), self.version
            scope.loops.append([before])
            scope.loops_seeded.append(was_seeded)
            if isinstance(node, ast.For):
                self._assign(node.target, coming, scope)
            else:
                self.truth(self.value(node.test, scope))
            if self._block(node.body, scope):
                scope.loops[-1].append(scope.names)
                self.left_as(was_seeded)
            self.is_seeded = scope.loops_seeded.pop()
            scope.names = functools.reduce(merged, scope.loops.pop())
            if scope.names == before and version == self.version:
                break
        else:
            raise RefusedError("has a loop that cannot be followed")
        return self._block(node.orelse, scope)

    def _tried(self, node: ast.Try, scope: Scope) -> bool:
        before, start, seedings = dict(scope.names), len(scope.log), self.seedings
        goes_on = self._block(node.body, scope) and self._block(node.orelse, scope)
        if node.handlers and self.seedings != seedings:
            raise RefusedError(f"seeds {TORCHS} where an error may be caught")
        ways = [scope.names] if goes_on else []
        broken = dict(before)
        for name, value in scope.log[start:]:  # an error may occur after any of them
            broken[name] = broken.get(name, NOTHING) | value
        for handler in node.handlers:
            scope.names = dict(broken)
            if handler.type is not None:
                self.value(handler.type, scope)
            if handler.name is not None:
                scope.set(handler.name, NEW)
            if self._block(handler.body, scope):
                ways.append(scope.names)
        scope.names = functools.reduce(merged, ways) if ways else dict(broken)
        return self._block(node.finalbody, scope) and bool(ways)

    def _imported(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            name = alias.name if isinstance(node, ast.Import) else node.module or ""
            module = sys.modules.get(name) if not getattr(node, "level", 0) else None
            if module is None or (isinstance(node, ast.ImportFrom) and alias.name == "*"):
                raise RefusedError(f"imports {name or alias.name}")
            if isinstance(node, ast.ImportFrom):
                scope.set(alias.asname or alias.name, self.attribute(concrete(module), alias.name))
            else:
                root = sys.modules[name.partition(".")[0]]
                scope.set(alias.asname or name.partition(".")[0], concrete(module if alias.asname else root))

    def _entered(self, value: Value) -> Value:
        if all(isinstance(atom, Data) for atom in value):
            return value
        raise RefusedError("enters a context that is not known")

    # --- writing ---------------------------------------------------------------------------------

    def _assign_from(self, target: ast.expr, source: ast.expr, scope: Scope) -> None:
        targets = target.elts if isinstance(target, ast.Tuple) else []
        sources = source.elts if isinstance(source, ast.Tuple) else []
        is_open = any(isinstance(one, ast.Starred) for one in (*targets, *sources))
        if targets and len(targets) == len(sources) and not is_open:
            values = [self.value(one, scope) for one in sources]
            for one, value in zip(targets, values, strict=True):
                self._assign(one, value, scope)
            return
        self._assign(target, self.value(source, scope), scope)

    def _assign(self, target: ast.expr, value: Value, scope: Scope) -> None:
        match target:
            case ast.Name():
                if target.id in declared_in(scope.node):
                    raise RefusedError(f"sets the variable {target.id} outside of it")
                scope.set(target.id, value)
            case ast.Tuple() | ast.List():
                self._unpacked(target, value, scope)
            case ast.Subscript():
                self.value(target.slice, scope)
                owner = self.value(target.value, scope)
                self.written_to(owner, f"writes to {shown(target)}")
                made = frozenset(atom for atom in owner if isinstance(atom, Instance))
                for one in made:
                    assert isinstance(one, Instance)
                    self.call_method(one, "__setitem__", Arguments([self.value(target.slice, scope), value]))
                key = single(self.value(target.slice, scope))
                self._put(target.value, owner - made, value, is_named=isinstance(key, str))
            case ast.Attribute():
                name = mangled(target.attr, scope.function)
                owner = self.value(target.value, scope)
                if self._is_flag(target, single(owner), exact(value), scope):
                    return
                for atom in owner:
                    if not isinstance(atom, Instance) or hasattr(getattr(atom.kind, name, None), "__set__"):
                        raise RefusedError(f"sets {shown(target)}")
                    self.hold(atom, name, value)
            case _:
                raise RefusedError(f"writes to {shown(target)}")

    def _unpacked(self, target: ast.Tuple | ast.List, value: Value, scope: Scope) -> None:
        counts = [
            len(atom.items)
            for atom in value
            if isinstance(atom, Container) and atom.items is not None and atom.names is None
        ]
        is_known = len(counts) == len(value) and all(count == len(target.elts) for count in counts)
        if is_known and not any(isinstance(one, ast.Starred) for one in target.elts):
            for number, one in enumerate(target.elts):
                found = [atom.items[number] for atom in value if isinstance(atom, Container) and atom.items is not None]
                self._assign(one, union(found), scope)
            return
        parts = self.iterate(value)
        for one in target.elts:
            if isinstance(one, ast.Starred):
                self._assign(one.value, make_container(list, parts), scope)
            else:
                self._assign(one, parts, scope)

    def _put(self, node: ast.expr, owner: Value, value: Value, *, is_named: bool) -> None:
        """A container that the code made holds more from now on; `is_named` if under a text, so that it is no list."""
        if not any(isinstance(atom, Container) for atom in owner):
            self.plain(value, "stores")
            return
        if not isinstance(node, (ast.Name, ast.Attribute)):
            raise RefusedError("writes into a container within another")
        for atom in owner:
            if isinstance(atom, Container) and not (is_named and atom.kind is list):
                self.grow(atom, value)

    def grow(self, container: Container, added: Value) -> None:
        """A container holds more from now on, under every name in every function that may mean it."""
        added = self._widened(added, DEPTH)
        if len(added | container.parts) > FEW_CASES:
            added = self._widened(added, 0)
        if added <= container.parts:
            return
        self._growths += 1
        grown = _grown(container, added)
        scopes: dict[int, Scope] = {}
        for one in self._live:
            at: Scope | None = one
            while at is not None:
                scopes[id(at)] = at
                at = at.outer
        for scope in scopes.values():
            for name, known in list(scope.names.items()):
                more = union([known, *(_regrown(atom, container, grown) for atom in known)])
                if more != known:
                    scope.set(name, more)
        for made, held in self.made.items():
            for name, known in list(held.items()):
                self.hold(made, name, union(_regrown(atom, container, grown) for atom in known))

    def _widened(self, value: Value, depth: int) -> Value:
        """The value, where deeper containers of plain data count as plain data: without this a loop may have no end."""
        found: list[Value] = []
        for atom in value:
            parts = self._widened(atom.parts, depth - 1) if isinstance(atom, Container) and depth else NOTHING
            if not isinstance(atom, Container) or (depth and parts == atom.parts):
                found.append(frozenset({atom}))
            elif depth:
                found.append(frozenset({Container(atom.kind, parts, atom.fresh, made_at=atom.made_at)}))
            else:
                with contextlib.suppress(RefusedError):
                    self.plain(frozenset({atom}), "holds")
                    atom = Data(False)
                found.append(frozenset({atom}))
        return union(found)

    # --- flags -----------------------------------------------------------------------------------
    #
    # `if not self.told: log(…); self.told = True` leaves a trace, but none that a later call shows: nothing but this
    # test reads the flag, and the body does nothing that the code after it could see.

    def noted_read(self, space: Mapping[Any, Any], name: Any) -> None:
        self._reads.setdefault((id(space), name), set()).add(id(self._tested))

    def _is_flag(self, target: ast.Attribute, owner: Any, value: Any, scope: Scope) -> bool:
        """Whether this sets a flag that only guards this place; `settle` checks that nothing else reads it."""
        own, name = getattr(owner, "__dict__", None), mangled(target.attr, scope.function)
        if not is_library(type(owner).__module__):  # a script may look at its own flags
            return False
        if not isinstance(own, dict) or type(own.get(name)) is not bool or value is MISSING:
            return False
        is_usual = getattr(type(owner), "__setattr__", None) is object.__setattr__
        if not is_usual or hasattr(getattr(type(owner), name, None), "__set__"):
            return False
        guards = [node for node in self._within if id(node) in self._reads.get((id(own), name), ())]
        if len(guards) != 1 or not does_nothing_else(guards[0], scope.node):
            return False
        self._flags[id(own), name] = own, id(guards[0])
        return True

    def settle(self) -> None:
        """Refuse flags that something else reads; the others do not matter."""
        for key, (own, guard) in self._flags.items():
            if self._reads[key] != {guard} or id(own) in self._elements:
                raise RefusedError(f"sets {key[1]}")
            self.state.forget(own, key[1])

    def _augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        target = node.target
        if isinstance(target, ast.Attribute):
            raise RefusedError(f"sets {shown(target)}")
        owner, value = self.value(loaded(target), scope), self.value(node.value, scope)
        self.written_to(owner, f"writes to {shown(target)}")
        if isinstance(target, ast.Subscript):
            self.written_to(self.value(target.value, scope), f"writes to {shown(target)}")
        found = self._combined(owner, value, id(node))
        if isinstance(target, ast.Name):
            self._assign(target, found, scope)

    # --- expressions -----------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: Scope) -> Value:
        """The value of an expression."""
        was_seeded = self.is_seeded
        found = self._value(node, scope)
        if not isinstance(node, ast.Call):
            self.left_as(was_seeded)  # as in `flag and torch.manual_seed(1)`
        return found

    def _value(self, node: ast.expr, scope: Scope) -> Value:
        match node:
            case ast.Constant():
                return concrete(node.value)
            case ast.Name():
                return self._named(node.id, scope)
            case ast.Attribute():
                return self.attribute(self.value(node.value, scope), mangled(node.attr, scope.function))
            case ast.Subscript():
                return self.subscript(self.value(node.value, scope), self.value(node.slice, scope))
            case ast.Call():
                return self._called(node, scope)
            case ast.BinOp():
                return self._combined(self.value(node.left, scope), self.value(node.right, scope), id(node))
            case ast.UnaryOp():
                return self._unary(node, scope)
            case ast.Compare():
                return self._compared(node, scope)
            case ast.BoolOp():
                return self._either(node, scope)
            case ast.IfExp():
                is_true = self.truth(self.value(node.test, scope))
                ways = [node.body, node.orelse] if is_true is None else [node.body if is_true else node.orelse]
                return union(self.value(way, scope) for way in ways)
            case ast.Tuple() | ast.List() | ast.Set():
                return self._display(node, scope)
            case ast.Dict():
                keys = [self.value(key, scope) for key in node.keys if key is not None]
                held = [self.value(one, scope) for one in node.values]
                spread = [
                    self.entries_of(one) if key is None else one for key, one in zip(node.keys, held, strict=True)
                ]
                values = [one for key, one in zip(node.keys, held, strict=True) if key is not None]
                if len(values) == len(held):
                    return make_dict(union(keys), union(values), made_at=id(node))
                return make_container(dict, union([*keys, *spread]), made_at=id(node))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehended(node, scope)
            case ast.Lambda():
                return frozenset({LocalFunction(node, scope)})
            case ast.JoinedStr():
                for part in node.values:
                    if isinstance(part, ast.FormattedValue):
                        self.plain(self.value(part.value, scope), "puts into words")
                return frozenset({Data(True, str)})
            case ast.Slice():
                for bound in (node.lower, node.upper, node.step):
                    if bound is not None:
                        self.value(bound, scope)
                return frozenset({Data(True, slice)})
            case ast.NamedExpr():
                found = self.value(node.value, scope)
                while scope.outer is not None and scope.outer.node is scope.node:  # out of comprehensions
                    scope = scope.outer
                self._assign(node.target, found, scope)
                return found
            case ast.Starred():
                return self.iterate(self.value(node.value, scope))
        raise RefusedError(f"has an expression that cannot be followed ({type(node).__name__.lower()})")

    def _named(self, name: str, scope: Scope) -> Value:
        at: Scope | None = scope
        while at is not None:
            if name in at.names:
                return at.names[name]
            at = at.outer
        function = scope.function
        free = function.__code__.co_freevars
        if name in free:
            cell = (function.__closure__ or ())[free.index(name)]
            try:
                value = cell.cell_contents
            except ValueError:
                return NOTHING  # which raises
            self.state.cell(cell, value)
            return self.read(value)
        found = function.__globals__.get(name, MISSING)
        if not is_library(function.__module__):
            self.state.name(function.__globals__, name, found)
        if found is MISSING:
            found = getattr(builtins, name, MISSING)
        return NOTHING if found is MISSING else self.read(found)

    def _display(self, node: ast.Tuple | ast.List | ast.Set, scope: Scope) -> Value:
        kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
        items = [self.value(one, scope) for one in node.elts]
        is_open = kind is set or any(isinstance(one, ast.Starred) for one in node.elts)
        known = None if is_open or kind is list else items
        return make_container(kind, union(items), known, made_at=0 if kind is tuple else id(node))

    def _comprehended(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope) -> Value:
        for _ in range(MOST_ROUNDS):  # what one round leaves in objects and containers, the next one finds
            before = self.version, self._growths
            found = self._comprehended_once(node, scope.inner())
            if (self.version, self._growths) == before:
                return found
        raise RefusedError("has a loop that cannot be followed")

    def _comprehended_once(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, within: Scope
    ) -> Value:
        self._live.append(within)
        for one in node.generators:
            self._assign(one.target, self.iterate(self.value(one.iter, within)), within)
            for test in one.ifs:
                self.truth(self.value(test, within))
        if isinstance(node, ast.DictComp):
            found = make_dict(self.value(node.key, within), self.value(node.value, within), made_at=id(node))
        else:
            kinds: dict[type, type] = {ast.ListComp: list, ast.SetComp: set, ast.GeneratorExp: ITERATOR}
            found = make_container(kinds[type(node)], self.value(node.elt, within), made_at=id(node))
        self._live.pop()
        return found

    def _unary(self, node: ast.UnaryOp, scope: Scope) -> Value:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            is_true = self.truth(value)
            return NUMBER if is_true is None else concrete(not is_true)
        number = single(value)
        if isinstance(node.op, ast.USub) and type(number) in (int, float):
            return concrete(-number)
        is_fresh = self.plain(value, "computes with")
        return frozenset({Data(is_fresh)}) if isinstance(node.op, ast.UAdd) else NEW

    def _combined(self, left: Value, right: Value, made_at: int) -> Value:
        containers = [atom for atom in left | right if isinstance(atom, Container)]
        lists = [atom.value for atom in left | right if isinstance(atom, Concrete) and is_content(atom.value)]
        if containers or any(not isinstance(one, (Tensor, np.ndarray)) for one in lists):
            # `list + list`, `[0] * n`, `dict | dict`, and arrays computed with lists.
            kinds = {atom.kind for atom in containers} | {type(one) for one in lists} or {list}
            parts = [self.entries_of(frozenset({atom})) for atom in left | right if not is_leaf(atom)]
            found = [
                make_container(kind, union(parts), made_at=made_at)
                for kind in kinds
                if kind in (list, tuple, dict, set)
            ]
            with contextlib.suppress(RefusedError):
                self.plain(left | right, "computes with")
                found.append(NEW)
            return union(found)
        self.plain(left | right, "computes with")
        return NEW

    def _compared(self, node: ast.Compare, scope: Scope) -> Value:
        values = [self.value(one, scope) for one in (node.left, *node.comparators)]
        if len(values) == 2:
            folded = self._folded(node.ops[0], *values)
            if folded is None and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                values = [values[0], frozenset(atom for atom in values[1] if not self._asked(atom, values[0]))]
            if folded is not None:
                return concrete(folded)
        if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            for value in values:
                self.plain(value, "compares")
        return NEW

    def _folded(self, op: ast.cmpop, left: Value, right: Value) -> bool | None:
        """The result of a comparison, if it is known."""
        if isinstance(op, (ast.Is, ast.IsNot)):
            if len(left) == len(right) == 1:
                (a,), (b,) = left, right
                if isinstance(a, Concrete) and isinstance(b, Concrete):
                    return (a.value is b.value) == isinstance(op, ast.Is)
                if (
                    None in (single(left, 0), single(right, 0))
                    and not isinstance(a, Attribute)
                    and not isinstance(b, Attribute)
                ):
                    is_none = all(may_be_none(atom) for atom in (a, b))
                    return None if is_none else isinstance(op, ast.IsNot)
            return None
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._held(left, right, isinstance(op, ast.In))
        a, b = single(left), single(right)
        if (
            isinstance(a, enum.Enum)
            and isinstance(b, enum.Enum)
            and type(a) is type(b)
            and is_library(type(a).__module__)
        ):
            return (a is b) == isinstance(op, ast.Eq) if isinstance(op, (ast.Eq, ast.NotEq)) else None
        if type(a) in (int, str, bool, float) and type(b) in (int, str, bool, float):
            if isinstance(op, ast.Eq):
                return bool(a == b)
            if isinstance(op, ast.NotEq):
                return bool(a != b)
        return None

    def _asked(self, atom: Atom, key: Value) -> bool:
        """Whether a new object answers `in` itself."""
        if not isinstance(atom, Instance):
            return False
        self.call_method(atom, "__contains__", Arguments([key]))
        return True

    def _held(self, left: Value, right: Value, is_in: bool) -> bool | None:
        """Whether an existing list or dict holds a plain value; None if that is not known."""
        key, held = exact(left), single(right)
        if key is MISSING or not isinstance(key, (str, int)) or isinstance(held, enum.Enum):
            return None
        if isinstance(held, dict):
            found = self.entry(held, key, NOTHING)
            return bool(found) == is_in
        if type(held) in (list, tuple, set, frozenset) and all(type(one) in _SCALARS for one in held):
            self.state.content(held)
            return (key in held) == is_in
        return None

    def _either(self, node: ast.BoolOp, scope: Scope) -> Value:
        found: list[Value] = []
        for number, one in enumerate(node.values):
            value = self.value(one, scope)
            is_last = number == len(node.values) - 1
            is_true = None if is_last else self.truth(value)
            ends = is_true is not None and is_true == isinstance(node.op, ast.Or)
            if is_last or is_true is None or ends:
                found.append(value)
            if ends:
                break
        return union(found)

    def _called(self, node: ast.Call, scope: Scope) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return self._super(scope)
        function, given = self.value(node.func, scope), Arguments()
        made_at = id(node)
        for one in node.args:
            if not isinstance(one, ast.Starred):
                value = self.value(one, scope)
                if given.rest:
                    given.rest |= value
                else:
                    given.places.append(value)
                continue
            spread = self.value(one.value, scope)
            (atom,) = spread if len(spread) == 1 else (None,)
            if isinstance(atom, Container) and atom.items is not None and atom.names is None and not given.rest:
                given.places += atom.items
            else:
                given.rest = union([given.rest, self.iterate(spread)])
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            (atom,) = value if len(value) == 1 else (None,)
            if keyword.arg is not None:
                given.names[keyword.arg] = value
            elif isinstance(atom, Container) and atom.names is not None and atom.items is not None:
                given.names |= dict(zip(atom.names, atom.items, strict=True))
            else:
                given.more = union([given.more, self.entries_of(value)])
        self.made_at = made_at
        # A single function, called once, may seed for the code after it.
        found = self._call(next(iter(function)), given) if len(function) == 1 else self.call(function, given)
        self.where = place(scope.function, node)
        return found

    def _super(self, scope: Scope) -> Value:
        code, at = scope.function.__code__, scope
        while at.outer is not None:
            at = at.outer
        if "__class__" not in code.co_freevars or not code.co_argcount:
            raise RefusedError("calls super() in a way that cannot be followed")
        kind = (scope.function.__closure__ or ())[code.co_freevars.index("__class__")].cell_contents
        owners = at.names[code.co_varnames[0]]
        return frozenset(Super(kind, atom) for atom in owners if isinstance(atom, (Concrete, Instance)))


# --- growing containers ------------------------------------------------------------------------------


def _grown(container: Container, added: Value) -> Container:
    values = None if container.values is None else union([container.values, added])
    parts = union([container.parts, added])
    return Container(container.kind, parts, values=values, made_at=container.made_at)


def _regrown(atom: Atom, container: Container, grown: Container) -> Value:
    """An atom after a container has grown: that container, one that holds it, or its method."""
    if atom == container:
        return frozenset({grown})
    match atom:
        case Container() if container.made_at and (atom.kind, atom.made_at) == (container.kind, container.made_at):
            return frozenset({joined([_grown(atom, NOTHING), grown])})
        case Container():
            parts = union([atom.parts, *(_regrown(one, container, grown) for one in atom.parts)])
            values = atom.values
            if values is not None:
                values = union([values, *(_regrown(one, container, grown) for one in values)])
            held = Container(atom.kind, parts, atom.fresh, None, values, made_at=atom.made_at)
            return frozenset({held}) if parts != atom.parts else NOTHING
        case Attribute() if isinstance(atom.owner, Container):
            owners = _regrown(atom.owner, container, grown)
            return frozenset(Attribute(atom.name, owner) for owner in owners if isinstance(owner, Container))
    return NOTHING

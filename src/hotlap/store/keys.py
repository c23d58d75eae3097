"""Keys of the cache: a sha256 over data, code and parameters, in which no two different values look alike."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import StoreError, kind_of
from hotlap.store.disk import CHUNK
from hotlap.store.manifest import hash_file

MOST_DEPTH = 100
_FORMAT = b"hotlap key 1"


def key_of(*parts: Any) -> str:
    """A key of 64 hex digits, the same for the same parts in every process and on every machine.

    Texts, numbers, bytes, lists, tuples and dicts count by value; tensors and arrays by dtype, shape and every byte; a
    Path by the content of its file; functions, classes and modules by their source text. What a function calls does
    not count: give it as a part too, or see `ContentKeys`. Raises StoreError for anything else.
    """
    digest = hashlib.sha256(_FORMAT)
    for piece in _pieces(parts, ()):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(value: Any, inside: tuple[int, ...]) -> Iterator[Any]:
    """The bytes for a value: tag, length, content; so where a value ends is never ambiguous."""
    if id(value) in inside:  # a function that uses itself, or a list inside of itself
        yield from _leaf(b"^", str(inside.index(id(value))).encode())
        return
    if len(inside) > MOST_DEPTH:
        raise StoreError(f"a part of a key is nested more than {MOST_DEPTH} deep")
    inside = (*inside, id(value))
    match value:
        case None:
            yield from _leaf(b"n", b"")
        case np.generic() | np.ndarray():
            yield from _array(value)
        case bool():
            yield from _leaf(b"b", b"1" if value else b"0")
        case int():
            yield from _leaf(b"i", b"%x" % value if value >= 0 else b"-%x" % -value)
        case float():
            yield from _leaf(b"f", float(value).hex().encode())
        case str():
            yield from _leaf(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            yield from _leaf(b"y", bytes(value))
        case list() | tuple():
            yield from _leaf(b"l" if isinstance(value, list) else b"t", len(value).to_bytes(8, "big"))
            for part in value:
                yield from _pieces(part, inside)
        case Mapping():
            # Sorted by the hash of each key: equal dicts have one key, whatever their order.
            rows = sorted(((_hash(k, inside), v) for k, v in value.items()), key=lambda row: row[0])
            yield from _leaf(b"d", len(rows).to_bytes(8, "big"))
            for name, part in rows:
                yield name
                yield from _pieces(part, inside)
        case Tensor():
            yield from _tensor(value)
        case Path():
            yield from _leaf(b"p", repr(hash_file(value)).encode())
        case functools.partial():
            yield from _leaf(b"r", b"")
            yield from _pieces((value.func, value.args, value.keywords), inside)
        case types.FunctionType() | type() | types.ModuleType():
            yield from _code(value, inside)
        case _:
            raise StoreError(f"{kind_of(value)} cannot be part of a key; give the numbers, tensors and code it holds")


def _leaf(tag: bytes, content: bytes) -> Iterator[bytes]:
    yield tag + len(content).to_bytes(8, "big")
    yield content


def _hash(value: Any, inside: tuple[int, ...]) -> bytes:
    digest = hashlib.sha256()
    for piece in _pieces(value, inside):
        digest.update(piece)
    return digest.digest()


def _tensor(tensor: Tensor) -> Iterator[Any]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StoreError(f"a tensor of layout {tensor.layout} cannot be part of a key; make it dense")
    yield from _leaf(b"T", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    rows = max(1, CHUNK // flat.element_size())
    for start in range(0, flat.numel(), rows):  # in pieces, so that a GPU tensor needs little host memory
        yield flat[start : start + rows].cpu().contiguous().view(torch.uint8).numpy().data


def _array(array: Any) -> Iterator[Any]:
    if array.dtype.hasobject:
        raise StoreError("an array of Python objects cannot be part of a key; use one of numbers")
    yield from _leaf(b"A", f"{array.dtype.descr!r} {array.shape}".encode())
    flat = np.asarray(array).reshape(-1)
    rows = max(1, CHUNK // max(1, flat.itemsize))
    for start in range(0, flat.size, rows):
        yield flat[start : start + rows].tobytes()


def _code(part: Any, inside: tuple[int, ...]) -> Iterator[bytes]:
    # Of a class also its base classes, if they are written in Python.
    own, *bases = inspect.getmro(part) if isinstance(part, type) else (part,)
    yield from _leaf(b"c", _source(own).encode())
    for base in bases:
        try:
            text = _source(base)
        except StoreError:
            text = base.__qualname__
        yield from _leaf(b"m", text.encode())
    if isinstance(part, types.FunctionType):
        # Functions with the same text differ by defaults and closures.
        yield from _pieces((part.__defaults__, part.__kwdefaults__, _closure_of(part)), inside)
        if part.__name__ == "<lambda>":  # its text is the whole line, which may hold several lambdas
            yield from _leaf(b"x", repr(bytecode(part.__code__)).encode())


def _closure_of(function: types.FunctionType) -> list[Any]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise StoreError(f"{function.__qualname__} uses a variable that has no value yet") from None


def _source(part: Any) -> str:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        name = getattr(part, "__qualname__", None) or getattr(part, "__name__", "it")
        raise StoreError(f"{name} has no source text for a key; define it in a file") from None


def bytecode(code: types.CodeType) -> tuple[Any, ...]:
    """What code does, without file and line: the same in every process of one Python version."""
    return code.co_code, code.co_names, [_constant(value) for value in code.co_consts]


def _constant(value: Any) -> Any:
    match value:
        case types.CodeType():
            return bytecode(value)
        case frozenset():  # its order differs between processes
            return "frozenset", sorted(repr(part) for part in value)
        case _:
            return repr(value)

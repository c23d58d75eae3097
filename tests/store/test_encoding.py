"""State of any training as JSON and tensors, and back."""

import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import StoreError
from hotlap.store.encoding import decode, encode, to_json
from hotlap.store.files import from_json
from hotlap.store.tensors import tensor_pieces, tensors_from


def round_trip(value):
    """Through bytes, as a checkpoint goes."""
    tensors = {}
    text = to_json(encode(value, tensors, "state"))
    return decode(from_json(text, "state.json"), tensors_from(b"".join(bytes(p) for p in tensor_pieces(tensors)), "t"))


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


keys = st.one_of(st.text(max_size=5), st.integers(-9, 9), st.tuples(st.integers(0, 3), st.text(max_size=2)))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float32)),
    st.integers(-9, 9).map(lambda n: torch.tensor(n)),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, dtype=np.uint8)),
    st.floats().map(np.float64),
    st.floats(width=32).map(np.float32),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=3).map(Counter),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(states)
def test_any_nested_state_comes_back_as_it_was(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        {1: torch.ones(1), "1": torch.zeros(1), (1,): torch.full((1,), 2.0)},
        {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)},
        [torch.ones(1), {"0": torch.zeros(1)}, {"x": torch.ones(2)}],
        {"\ud800": torch.ones(1), "é\n": torch.zeros(2)},
    ],
    ids=["keys that look alike", "dots in keys", "lists and dicts", "keys that are no text"],
)
def test_no_tensor_takes_the_place_of_another_whatever_the_keys(value):
    assert same(round_trip(value), value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308])
def test_odd_numbers_come_back_to_the_bit(value):
    assert same(round_trip([value]), [value])


def test_arrays_of_no_dimension_and_numbers_of_numpy_keep_their_kind():
    value = {"zero": np.array(3.5), "narrow": np.float32(0.1), "whole": np.int16(7), "flag": np.bool_(True)}
    assert same(round_trip(value), value)


def test_a_tensor_lies_in_memory_as_it_did():
    """A fused optimizer walks weight and state side by side: in another order it would mix them up."""
    for tensor in (
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
    ):
        back = round_trip(tensor)
        assert back.stride() == tensor.stride()
        assert torch.equal(back, tensor)


def test_what_is_encoded_is_a_copy_that_training_cannot_change():
    weight, array, words = torch.ones(3), np.ones(3), ["a"]
    tensors = {}
    coded = encode({"w": weight, "a": array, "l": words}, tensors, "state")
    weight.zero_()
    array[:] = 0
    words.append("b")
    back = decode(coded, tensors)
    assert back["w"].sum() == 3
    assert back["a"].sum() == 3
    assert back["l"] == ["a"]


def test_kinds_of_dict_and_list_come_back_as_plain_ones():
    assert same(round_trip(OrderedDict(b=1, a=2)), {"b": 1, "a": 2})


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, b"bytes", object(), Pair(1, 2), lambda: 0, torch.float32, 1j, 10**5000, range(3),
        np.array([object()]), np.array(["word"]), np.array([1], dtype=">i4"), np.datetime64("2020-01-01"),
        torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.complex128), {frozenset(): 1}, {b"key": 1},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_stored_safely_is_refused_and_its_place_is_named(value):
    with pytest.raises(StoreError, match=r"^state\.deep"):
        encode({"deep": [value]} if not isinstance(value, dict) else {"deep": value}, {}, "state")


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["$tensor", "$array", "$scalar", "$float", "$tuple", "$dict", "$counter", "$x", "a"]),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(json_values)
def test_garbage_is_decoded_or_refused_and_never_anything_else(coded):
    with contextlib.suppress(StoreError):
        decode(coded, {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.bfloat16)}, torch.device("cpu"))


@pytest.mark.parametrize(
    "coded",
    [
        {"$float": 10**400}, {"$tensor": ["a", "cuda", [0, 0]]}, {"$tensor": ["a", "cpu", [5]]},
        {"$array": "b"}, {"$dict": [[{"$tensor": ["a", "cpu"]}, 1]]}, {"$dict": [[[], 1]]}, {"$tensor": [[], "cpu"]},
        {"a": 1, "b": 2}, {}, {"$run": "os.system"}, {"$tensor": "missing"}, {"$tuple": 3},
    ],
    ids=str,
)  # fmt: skip
def test_each_wrong_form_is_refused(coded):
    with pytest.raises(StoreError, match="not have hotlap's format"):
        decode(coded, {"a": torch.ones(2), "b": torch.ones(1, dtype=torch.bfloat16)}, torch.device("cpu"))


def test_nesting_beyond_reason_is_refused():
    deep = '{"$tuple":[' * 100_000 + "]}" * 100_000
    with pytest.raises(StoreError, match="nested too deeply"):
        from_json(deep.encode(), "state.json")
    coded = []
    for _ in range(5000):
        coded = [coded]
    with pytest.raises(StoreError):
        decode(coded, {})


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"NaN", b"[Infinity]", b"1" * 5000, b'{"a":1}x'])
def test_what_is_no_json_is_refused_by_the_name_of_its_file(text):
    with pytest.raises(StoreError, match=r"odd\.json"):
        from_json(text, "odd.json")


def test_the_same_value_is_always_the_same_text():
    text = b'{"a":[1.5,null],"b":1}'
    assert to_json({"b": 1, "a": [1.5, None]}) == to_json(json.loads(text)) == text

"""What is told of attention that drops by a kernel whose masks are poor. Here the kernel is a pretended one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotlap.engine.assists.attention import Masks
from hotlap.script import advice as attending
from hotlap.script.advice import NODE, AttentionAdvice, dropping_call
from hotlap.script.session import Session, Settings

GOOD = Masks(distinct=1.0, spread=1.0, limit=1.3)
POOR = Masks(distinct=0.31, spread=3.2, limit=1.3)


class Node:
    """Stands in for a node of autograd's."""

    def __init__(self, name="AddBackward0", *before, dropout=None, shape=()):
        self._name, self.next_functions = name, tuple((one, 0) for one in before)
        here = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
        self._input_metadata = [SimpleNamespace(shape=list(shape), **here)]
        if dropout is not None:
            self._saved_dropout_p = dropout

    _saved_query = property(lambda self: pytest.fail("what was saved was asked for, which runs hooks of the user's"))

    def name(self):
        return self._name


def attention(dropout, key=(2, 3, 7, 4)):
    query, key = Node(shape=(2, 3, 5, 4)), Node(shape=key) if key else None
    return Node(f"{NODE}0", query, key, None, dropout=dropout, shape=(2, 3, 5, 8))


def test_a_call_that_drops_is_found_wherever_it_is_and_nothing_of_it_is_held():
    both = Node("MulBackward0", attention(0.0), None, Node("ViewBackward0", attention(0.25)))
    found = dropping_call([Node(), Node("AddBackward0", both, both)])
    assert found.dropout == 0.25
    assert [tuple(one.shape) for one in found.inputs] == [(2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 8)]
    assert {one.dtype for one in found.inputs} == {torch.bfloat16}
    assert all(one.untyped_storage().nbytes() == 2 for one in found.inputs)


def test_where_keys_are_not_learnt_there_are_as_many_as_places_that_ask():
    found = dropping_call([attention(0.5, key=None)])
    assert [tuple(one.shape) for one in found.inputs] == [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 8)]


def test_real_nodes_tell_shapes_without_what_they_saved():
    asked = []
    packed = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: asked.append(1) or tensor)
    tensors = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    with packed:
        node = torch.nn.functional.scaled_dot_product_attention(*tensors).grad_fn
    call = attending._call_of(node)
    assert [tuple(one.shape) for one in call.inputs] == [(2, 3, 5, 4)] * 3
    assert call.dropout == 0.0
    assert not asked
    assert node._saved_query is not None
    assert asked  # or this would prove nothing


@pytest.mark.parametrize("node", [Node(), attention(0.0), Node("AddBackward0", attention(0.0), attention(0.0))])
def test_attention_that_does_not_drop_is_none_of_it(node):
    assert dropping_call([node]) is None


def test_large_graphs_are_looked_through_for_a_while_only(monkeypatch):
    monkeypatch.setattr(attending, "MOST_NODES", 50)
    chain = attention(0.5)
    for _ in range(40):
        chain = Node("AddBackward0", chain)
    assert dropping_call([chain]) is not None
    for _ in range(40):
        chain = Node("AddBackward0", chain)
    assert dropping_call([chain]) is None


def test_real_graphs_without_that_kernel_have_no_such_call(monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.1, batch_first=True)
    monkeypatch.setattr(attending, "masks_of", lambda *_: pytest.fail("looked at"))
    seen = AttentionAdvice()
    seen.see({"hidden": layer(torch.randn(2, 5, 8)), "other": 3})
    assert seen.advice() == []


def looked(monkeypatch, found, given=0.1):
    """A look at a graph with such a call, whose masks are these."""
    monkeypatch.setattr(attending, "masks_of", lambda *_: found)
    monkeypatch.setattr(attending, "tensors_in", lambda outputs: outputs)
    seen = AttentionAdvice()
    seen.see([SimpleNamespace(grad_fn=attention(given))])
    return seen


def test_poor_masks_are_told_with_their_figures_and_what_to_do(monkeypatch):
    (line,) = looked(monkeypatch, POOR).advice()
    assert "31% of positions dropped independently, 3.2 times the variance of chance" in line
    assert "torch.backends.cuda.enable_cudnn_sdp(False)" in line


def test_good_masks_and_those_that_cannot_be_looked_at_are_not_told(monkeypatch):
    assert looked(monkeypatch, GOOD).advice() == []
    seen = looked(monkeypatch, POOR)

    def full(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(attending, "masks_of", full)
    assert seen.advice() == []


def test_only_the_first_outputs_with_gradients_are_looked_at(monkeypatch):
    asked = []
    monkeypatch.setattr(attending, "dropping_call", lambda nodes: asked.append(len(nodes)))
    seen, x = AttentionAdvice(), torch.randn(3, requires_grad=True)
    for outputs in (None, torch.randn(3), "words", (x * 2, x + 1), x * 3):
        seen.see(outputs)
    assert asked == [2]


def test_whatever_a_graph_is_like_the_script_goes_on():
    class Odd:
        grad_fn = property(lambda self: 1 / 0)

    seen = AttentionAdvice()
    seen.see([Odd()])
    x = torch.randn(3, requires_grad=True)
    y = torch.nn.functional.scaled_dot_product_attention(*(x.expand(1, 1, 2, 3) for _ in range(3)))
    y.sum().backward()
    seen.see(y)  # what it saved is gone
    assert seen.advice() == []


@pytest.mark.parametrize("found", [GOOD, POOR])
def test_a_script_hears_of_it_at_its_end(monkeypatch, tmp_path, capsys, found):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(attending, "masks_of", lambda *_: found)
    monkeypatch.setattr(attending, "dropping_call", lambda nodes: dropping_call([attention(0.1)]))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(Settings(name="test", out=tmp_path / "run")):
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    told = capsys.readouterr().err
    assert "8 updates" in told
    assert told.count("attention uses cuDNN's dropout") == (found is POOR)

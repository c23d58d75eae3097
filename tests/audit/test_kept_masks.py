"""Models that keep a mask for batches of the last length, as the Transformer of word_language_model does."""

import random

import pytest
import torch
from calling import CAPTURED, Scripted, assert_equal_states, gradients
from torch import nn

from hotlap.engine.capture.fingerprint import fingerprint

LENGTHS = [5] * 11 + [3]
"""Of the batches of an epoch: the last one is shorter."""


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.mask = None

    def forward(self, words):
        if self.mask is None or len(self.mask) != len(words):
            self.mask = self.made(len(words))
        hidden = self.words(words)
        return self.last(torch.einsum("ij,jbw->ibw", self.mask, hidden)).log_softmax(-1)

    def made(self, length):
        return torch.ones(length, length).tril()


class Drawn(Masked):
    """To make the mask does what a replay would leave out."""

    def made(self, length):
        return super().made(length) * random.random()


class AlwaysAnew(Masked):
    def forward(self, words):
        self.mask = None
        return super().forward(words)


def batch(number, length):
    return torch.randint(11, (length, 4), generator=torch.Generator().manual_seed(number))


def gradients_of(model, call, epochs=3):
    """Of each batch, and what the model gives in the evaluation after each epoch."""
    found = []
    random.seed(1)
    for _ in range(epochs):
        for number, length in enumerate(LENGTHS):
            model.zero_grad()
            call(batch(number, length))[..., 0].sum().backward()
            found.append(gradients(model))
        model.eval()
        with torch.no_grad():
            found.append({str(length): call(batch(0, length)) for length in (5, 4, 2)})
        model.train()
    return found


@pytest.mark.parametrize("kind", [Masked, Drawn])
def test_a_mask_for_another_length_does_not_end_a_capture(kind):
    alone, model = kind(), kind()
    call = Scripted(model, CAPTURED)
    for mine, theirs in zip(gradients_of(model, call), gradients_of(alone, alone), strict=True):
        assert_equal_states(mine, theirs)
    assert call.call.given_up is None
    replayed = [sum(graph.replays for graph in recorder.graphs) for recorder in call.recorders]
    assert sum(replayed) >= 3 * 2 * (len(LENGTHS) - 5)


def test_a_mask_that_is_made_anew_in_every_call_ends_it():
    model = AlwaysAnew()
    call = Scripted(model, CAPTURED)
    gradients_of(model, call, epochs=1)
    assert call.call.given_up == "AlwaysAnew changes its attribute 'mask' in every step"


def test_a_tensor_of_another_shape_in_the_same_memory_is_another_state():
    model, memory = Masked(), torch.ones(25)
    model.mask = memory.view(5, 5)
    before = fingerprint([model])
    model.mask = memory[:16].view(4, 4)
    assert fingerprint([model]) != before
    model.mask = memory.view(5, 5)
    assert fingerprint([model]) == before

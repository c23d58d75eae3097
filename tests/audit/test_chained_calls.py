"""Calls whose outputs are arguments of the next ones, as in a loop over the letters of a word, under capture."""

import pytest
import torch
from calling import CAPTURED, Scripted
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.last = nn.Linear(11, 6), nn.Linear(6, 3)

    def forward(self, x, state):
        state = torch.tanh(self.hidden(torch.cat((x, state), 1)))
        return self.last(state).log_softmax(1), state


def word_by_word(model, call, letters, *, penalty=False, words=30):
    """Gradients of all words; the outputs of a call get gradients in one way, and those of the last in another."""
    found, generator = [], torch.Generator().manual_seed(1)
    for _ in range(words):
        model.zero_grad()
        state = torch.zeros(2, 6)
        for x in torch.randn(letters, 2, 5, generator=generator):
            output, state = call(x, state)
        loss = nn.functional.nll_loss(output, torch.tensor([0, 2]))
        if penalty:
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + sum(grad.square().sum() for grad in grads)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    return found


@pytest.mark.parametrize("letters", [1, 2, 3, 4])
@pytest.mark.parametrize("penalty", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_call_made_again_is_differentiated_by_itself(letters, penalty):
    alone, model = Cell(), Cell()
    call = Scripted(model, CAPTURED)
    made = word_by_word(model, call, letters, penalty=penalty)
    for mine, theirs in zip(made, word_by_word(alone, alone, letters, penalty=penalty), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_an_argument_given_twice_gets_its_gradient_once():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a, b):
            return a * self.weight, b * self.weight

    model = Sum()
    call, x = Scripted(model, CAPTURED), torch.ones(3, requires_grad=True)
    for number in range(20):
        x.grad = None
        one, other = call(x, x)
        # What it does with the outputs changes now and then.
        (one + other if number % 7 else one * 2).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0)), number

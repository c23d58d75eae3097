"""Loops as word_language_model of pytorch/examples has them: weights are updated without an optimizer."""

import functools

import torch
from torch import nn

from hotlap.core.ledger import Ledger
from hotlap.script.loop_finder import Loop, ManualUpdates
from hotlap.script.training import ScriptTraining
from hotlap.script.tuning import ScriptGate

RATE = 0.05


def in_its_data(model):
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-RATE)
    model.zero_grad()


@torch.no_grad()
def in_place(model):
    for p in model.parameters():
        p -= RATE * p.grad
        p.grad = None


def with_other_data(model):
    for p in model.parameters():
        p.data = p.data - RATE * p.grad
        p.grad = None


def with_gradients_that_stay(model):
    for p in model.parameters():
        p.data.sub_(RATE * p.grad.data)
        p.grad.data.zero_()


WAYS = [in_its_data, in_place, with_other_data, with_gradients_that_stay]


class Reader(nn.Module):
    """A small copy of word_language_model's: it is given its state, and gives it back."""

    def __init__(self, dropout=0.2, words=11, width=8):
        super().__init__()
        self.drop, self.encoder = nn.Dropout(dropout), nn.Embedding(words, width)
        self.rnn, self.decoder = nn.LSTM(width, width, 2, dropout=dropout), nn.Linear(width, words)

    def forward(self, words, state):
        output, state = self.rnn(self.drop(self.encoder(words)), state)
        return self.decoder(self.drop(output)).flatten(0, 1).log_softmax(1), state


def read(model, epochs=4, *, call=None, update=in_its_data, steps=7, passed=lambda loss: None):
    """Train as word_language_model does, with a state that goes on from batch to batch; losses and weights."""
    torch.manual_seed(2)
    device = next(model.parameters()).device
    text = torch.randint(11, (5 * steps + 1, 4), generator=torch.Generator().manual_seed(3)).to(device)
    criterion, losses, call = nn.NLLLoss(), [], call or model
    for _ in range(epochs):
        state = torch.zeros(2, 4, 8, device=device), torch.zeros(2, 4, 8, device=device)
        for i in range(0, text.size(0) - 1, 5):
            state = tuple(part.detach() for part in state)
            output, state = call(text[i : i + 5], state)
            loss = criterion(output, text[i + 1 : i + 6].view(-1))
            loss.backward()
            passed(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            update(model)
            losses.append(loss.item())
        losses.append(_evaluated(model, call, text))
    return losses, [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def _evaluated(model, call, text):
    """The loss of it all, with a state that goes on from batch to batch."""
    model.eval()
    total, state = 0.0, (torch.zeros(2, 4, 8, device=text.device), torch.zeros(2, 4, 8, device=text.device))
    for i in range(0, text.size(0) - 1, 5):
        output, state = call(text[i : i + 5], state)
        total += nn.functional.nll_loss(output, text[i + 1 : i + 6].view(-1)).item()
    model.train()
    return total


def reader(**settings):
    """A fresh one, the same each time."""
    torch.manual_seed(1)
    return Reader(**settings)


def judged(model, **choice):
    """What the gate says to a plan, right after a backward pass; the gradients of the script stay as they are."""
    one, found = ManualUpdates(), []
    read(model, epochs=1, passed=one.passed)
    one.settle()
    training = ScriptTraining(Loop(optimizers=[one], modules=[model], loaders=[]), [], Ledger())
    (call,) = training.calls
    call.remember_next()

    def passed(loss):
        if not found:
            before = [p.grad.clone() for p in model.parameters()]
            found.append(ScriptGate(training).check(training.own.but(**choice)))
            assert all(map(torch.equal, before, (p.grad for p in model.parameters())))

    original = functools.partial(nn.Module.__call__, model)
    read(model, epochs=1, call=lambda *args: call(original, args, {}), passed=passed)
    training.close()
    return found[0]

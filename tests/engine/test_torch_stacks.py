"""torch's own stacks of transformer layers, made fit to be recorded."""

import pytest
import torch
from torch import nn

from hotlap.engine.assists.rewiring import rewire
from hotlap.engine.capture.fingerprint import fingerprint

WIDTH, LENGTH = 8, 5


class Encoder(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, mask):
        return self.stack(x, mask=mask)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0), 2)

    def forward(self, x, mask):
        return self.stack(x, x.flip(0), tgt_mask=mask)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0)

    def forward(self, x, mask):
        return self.transformer(x, x.flip(0), src_mask=mask, tgt_mask=mask)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BANDED = torch.zeros(LENGTH, LENGTH).masked_fill_(torch.ones(LENGTH, LENGTH).triu(3).bool(), -torch.inf)


def trained(model, mask):
    model.zero_grad()
    x = torch.randn(LENGTH, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    outputs = model(x, mask)
    outputs.square().sum().backward()
    return outputs.detach(), [p.grad.clone() for p in model.parameters()]


def look(monkeypatch):
    """Counts how often a mask is looked into."""
    from torch.nn.modules import transformer

    seen, original = [], transformer._detect_is_causal_mask

    def noted(mask, is_causal=None, size=None):
        seen.append(mask)
        return original(mask, is_causal, size)

    monkeypatch.setattr(transformer, "_detect_is_causal_mask", noted)
    return seen


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mask", [CAUSAL, BANDED, None], ids=["causal", "banded", "none"])
@pytest.mark.parametrize("kind", [Encoder, Decoder, Whole])
def test_outputs_and_gradients_are_the_same_and_no_mask_is_looked_into(kind, mask, monkeypatch):
    torch.manual_seed(0)
    model = kind()
    seen = look(monkeypatch)
    theirs = trained(model, mask)
    assert seen
    seen.clear()
    before = fingerprint([model])
    adapted = rewire(model)
    with adapted:
        mine = trained(model, mask)
    assert not seen
    assert fingerprint([model]) == before
    torch.testing.assert_close(mine, theirs)
    assert adapted.what == ("masks are not read back",)


def test_a_hint_of_the_scripts_own_is_kept(monkeypatch):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0), 1, enable_nested_tensor=False)
    hints = []
    model.layers[0].register_forward_pre_hook(lambda _, __, kwargs: hints.append(kwargs["is_causal"]), with_kwargs=True)
    x = torch.randn(LENGTH, 3, WIDTH)
    with rewire(model):
        model(x, mask=CAUSAL, is_causal=True)
        model(x, mask=CAUSAL)
    assert hints == [True, False]


def test_a_stack_with_a_forward_pass_of_its_own_is_left_alone():
    class Own(nn.TransformerEncoder):
        def forward(self, src, **more):
            return super().forward(src, **more)

    assert rewire(Own(nn.TransformerEncoderLayer(WIDTH, 2, 16), 1, enable_nested_tensor=False)) is None
    assert rewire(nn.Linear(2, 2)) is None

"""Networks over windows, and how learning rates move."""

import pytest
import torch
from torch import nn

from hotlap.recipes.networks import AttentiveLstm, LastStep, WindowTransformer
from hotlap.recipes.tabular import warm_up_and_cosine


@pytest.mark.parametrize(
    "network",
    [
        lambda: AttentiveLstm(5, 3, width=16),
        lambda: WindowTransformer(5, 3, length=7, width=16, heads=2, layers=2),
        lambda: LastStep(5, 3),
    ],
)
def test_each_network_learns_a_rule_in_its_inputs(network):
    torch.manual_seed(0)
    model = network()
    x = torch.randn(256, 7, 5)
    y = (x[:, -1, 0] > 0).long() + (x[:, -1, 1] > 1).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first = None
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert model(x).shape == (256, 3)
    assert loss.item() < 0.6 * first


def test_a_learning_rate_rises_and_then_falls_to_nothing():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = warm_up_and_cosine(0.1)(optimizer, 100)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == 0.2
    assert max(rates) == rates[9] == rates[10] == 2.0
    assert rates[11:] == sorted(rates[11:], reverse=True)
    assert rates[-1] < 0.01

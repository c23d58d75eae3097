"""Sparse gradients, which no fused kernel takes."""

import pytest
import torch
from torch import nn

import hotlap
from hotlap.script.update.updates import Updates


def step(embedding, optimizer, updates):
    optimizer.zero_grad()
    embedding(torch.tensor([1, 3])).sum().backward()
    updates.before_step(optimizer)
    optimizer.step()
    updates.after_step(optimizer)


def test_a_script_that_turns_to_sparse_gradients_keeps_its_own_step_under_a_fused_plan():
    embedding = nn.Embedding(5, 2)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    updates = Updates([optimizer])
    updates.use("fused")
    step(embedding, optimizer, updates)
    embedding.sparse, before = True, embedding.weight.detach().clone()
    step(embedding, optimizer, updates)
    assert (before - embedding.weight)[[1, 3]].sum().item() == 4
    updates.close()


def test_a_script_with_sparse_gradients_is_offered_no_fused_optimizer():
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1, 3])).sum().backward()
    assert "sparse" in Updates([optimizer]).supports("fused")


@pytest.mark.parametrize("layer", [nn.Embedding(5, 4, sparse=True), nn.EmbeddingBag(5, 4, sparse=True)])
def test_a_rig_refuses_to_fuse_an_optimizer_of_sparse_gradients(layer):
    rig = hotlap.Rig(layer, torch.optim.SGD(layer.parameters(), lr=0.1), nn.CrossEntropyLoss(), device="cpu")
    assert "sparse" in rig.supports(rig.plan.but(optimizer="fused"))

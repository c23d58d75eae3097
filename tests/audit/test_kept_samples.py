"""Samples are kept until the end of an epoch, counted in the updates that the script makes in it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotlap.core.ledger import Ledger
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.loop_finder import Loop
from hotlap.script.training import ScriptTraining

ROWS = torch.arange(48.0).reshape(24, 2)


class Rows(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize(("together", "in_epoch", "left"), [(1, 12, 8), (2, 6, 4), (4, 3, 2)])
def test_where_gradients_of_batches_add_up_an_epoch_has_fewer_updates(together, in_epoch, left):
    model = nn.Linear(2, 1)
    loader = DataLoader(Rows(), batch_size=2)
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
    loop = Loop(optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], modules=[model], loaders=[proxy])
    training = ScriptTraining(loop, [proxy], Ledger())
    for number, _ in enumerate(proxy.iterate(), 1):
        if number % together == 0:
            training.stepped()
        if number == 4:
            assert training.epoch_windows == 12
            assert training.epoch_updates == in_epoch
            assert training.keep_samples(math.inf) == left
            break
    training.close()

"""A recipe in one file: a number from columns of numbers; all else is inherited."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from hotlap.recipes.options import Options, option
from hotlap.recipes.recipe import Asked, Reader
from hotlap.recipes.tables import read_table
from hotlap.recipes.tabular import TabularRecipe


@dataclass(frozen=True, kw_only=True)
class AmountOptions(Options):
    width: int = option(8, "numbers in the hidden layer")


class AmountReader(Reader):
    def __init__(self, columns, width):
        self.columns, self.width = tuple(columns), width

    def table(self, data):
        return read_table(data)

    def state(self):
        return {"columns": list(self.columns), "width": self.width}

    def model(self, name):
        return nn.Sequential(nn.Linear(len(self.columns), self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def inputs(self, table):
        return torch.from_numpy(np.stack([table[name].values for name in self.columns], 1).astype(np.float32))

    def asked(self, table, say):
        return Asked(data=Subset(TensorDataset(self.inputs(table)), range(len(table))), rows=np.arange(len(table)))


class AmountRecipe(TabularRecipe):
    name, summary, expects = "amount", "a number from columns of numbers", "columns of numbers"
    options_type = AmountOptions

    def is_number(self):
        return True

    def reader_of(self):
        return AmountReader(self.columns, self.options.width)

    def data_of(self, side):
        return TensorDataset(self.reader.inputs(side.table), torch.from_numpy(side.target).float().unsqueeze(1))

    def job(self, name, data, held):
        torch.manual_seed(self.options.seed)
        scored = {"metrics": {"mse": nn.MSELoss(reduction="none")}, "monitor": "mse", "better": "lower"}
        model = self.reader.model(name)
        return self.adamw_job(model, data, held, lr=0.05, epochs=20, loss=nn.MSELoss(), **scored)

    @classmethod
    def revive(cls, state, folder):
        return AmountReader(state["columns"], state["width"])

"""A training of tiny steps on the CPU, in which there is nothing to gain; prints what a step took, as JSON."""

import argparse
import json
import time
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 8), torch.randn(512, 1)), batch_size=8)
marks = []
for _ in range(args.epochs):
    marks.append((time.perf_counter(), time.process_time()))
    for x, y in loader:
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
marks.append((time.perf_counter(), time.process_time()))
steps = [[(now - before) / len(loader) for before, now in zip(*pair, strict=True)] for pair in pairwise(marks)]
print(json.dumps({"wall_s": [wall_s for wall_s, _ in steps], "cpu_s": [cpu_s for _, cpu_s in steps]}))

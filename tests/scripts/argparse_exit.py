#!/usr/bin/env python
import argparse
import os
import sys

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

HERE = os.path.dirname(os.path.abspath(__file__))


def parse_args():
    parser = argparse.ArgumentParser(description="train a small classifier")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--fail", action="store_true", help="end with exit code 3")
    return parser.parse_args()


class Spirals(Dataset):
    def __init__(self, n, rng):
        k = rng.integers(0, 3, n)
        r = rng.uniform(0.1, 1.0, n)
        t = 4.0 * r + k * 2 * np.pi / 3 + 0.4 * rng.normal(size=n)
        self.points = np.stack([r * np.cos(t), r * np.sin(t)], axis=1)
        self.classes = k

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, i):
        x, y = self.points[i]
        feats = np.array([x, y, x * x, y * y, x * y], dtype=np.float32)
        return feats, int(self.classes[i])


def main():
    args = parse_args()
    print("%s in a folder that %s, arguments: %s" % (
        os.path.basename(__file__), "exists" if os.path.isdir(HERE) else "is missing", sys.argv[1:]))
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train = DataLoader(Spirals(12000, rng), batch_size=args.batch_size, shuffle=True)
    test = DataLoader(Spirals(700, rng), batch_size=args.batch_size)
    net = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3)).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    acc = 0.0
    for epoch in range(args.epochs):
        net.train()
        total = 0.0
        for x, y in train:
            x, y = x.to(device), y.to(device)
            loss = loss_fn(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(x)
        net.eval()
        with torch.no_grad():
            acc = sum((net(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in test) / len(test.dataset)
        print("epoch %d loss %.4f acc %.4f" % (epoch + 1, total / len(train.dataset), acc))
        sys.stdout.flush()

    if args.fail:
        print("error: accuracy %.4f is not good enough" % acc, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class WindowDataset(Dataset):
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, idx):
        return torch.from_numpy(self.x[idx]), torch.tensor(self.y[idx])


class Model(nn.Module):
    def __init__(self, d=128, heads=4, layers=4):
        super().__init__()
        self.proj = nn.Linear(29, d)
        self.pos = nn.Parameter(torch.zeros(1, 20, d))
        layer = nn.TransformerEncoderLayer(d, heads, dim_feedforward=4 * d, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        x = self.proj(x) + self.pos
        return self.head(self.encoder(x).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=5)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--batch_size', type=int, default=128)
    parser.add_argument('--lr', type=float, default=5e-4)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(0)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    x = rng.standard_normal((20000, 20, 29), dtype=np.float32)
    y = (x.mean(1) @ rng.standard_normal((29, 3), dtype=np.float32)).argmax(1)
    train_loader = DataLoader(WindowDataset(x[:18000], y[:18000]), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(WindowDataset(x[18000:], y[18000:]), batch_size=500)

    model = Model().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.epochs * len(train_loader))

    t0 = time.time()
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for x_batch, y_batch in train_loader:
            x_batch = x_batch.to(device)
            y_batch = y_batch.to(device)
            opt.zero_grad(set_to_none=True)
            logits = model(x_batch)
            loss = F.cross_entropy(logits, y_batch)
            loss.backward()
            opt.step()
            sched.step()
            losses.append(loss.item())
        model.eval()
        hits = 0
        with torch.no_grad():
            for x_batch, y_batch in val_loader:
                hits += (model(x_batch.to(device)).argmax(-1).cpu() == y_batch).sum().item()
        print(f'epoch {epoch}: loss={np.mean(losses):.4f} acc={hits / 2000:.4f} lr={sched.get_last_lr()[0]:.2e}')
    print(f'{time.time() - t0:.2f} s')


if __name__ == '__main__':
    main()

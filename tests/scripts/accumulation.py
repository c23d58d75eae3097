# Trains with gradient accumulation: batch 64 x 4 = effective batch of 256
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 7
EPOCHS = 4
BATCH_SIZE = 64
ACCUMULATION_STEPS = 4
LEARNING_RATE = 2e-3

torch.manual_seed(SEED)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_moons_nd(n, dim=12):
    # two interleaved half moons, lifted to `dim` dims by a random projection
    t = torch.rand(n) * math.pi
    label = torch.randint(0, 2, (n,))
    upper = torch.stack([torch.cos(t), torch.sin(t)], dim=1)
    lower = torch.stack([1 - torch.cos(t), 0.5 - torch.sin(t)], dim=1)
    pts = torch.where(label[:, None] == 0, upper, lower)
    pts = pts + 0.25 * torch.randn(n, 2)
    proj = torch.randn(2, dim)
    return pts @ proj + 0.05 * torch.randn(n, dim), label.float()


x, y = make_moons_nd(8000)
train_set = TensorDataset(x[:7210], y[:7210])
val_set = TensorDataset(x[7210:], y[7210:])
train_loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True, num_workers=0)
val_loader = DataLoader(val_set, batch_size=256, shuffle=False)


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.fc1 = nn.Linear(12, 32)
        self.fc2 = nn.Linear(32, 32)
        self.fc3 = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return self.fc3(x).squeeze(-1)


model = Net().to(device)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
updates_per_epoch = math.ceil(len(train_loader) / ACCUMULATION_STEPS)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * updates_per_epoch, eta_min=1e-5)

global_step = 0
for epoch in range(1, EPOCHS + 1):
    model.train()
    epoch_loss = 0
    optimizer.zero_grad(set_to_none=True)

    for i, batch in enumerate(train_loader):
        xb, yb = [t.to(device) for t in batch]
        # the last group of an epoch may be smaller
        group_start = i - i % ACCUMULATION_STEPS
        group_size = min(ACCUMULATION_STEPS, len(train_loader) - group_start)

        loss = criterion(model(xb), yb) / group_size
        loss.backward()
        epoch_loss += loss.item() * group_size

        if (i + 1) % ACCUMULATION_STEPS == 0 or (i + 1) == len(train_loader):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            global_step += 1

    model.eval()
    hits = 0
    with torch.no_grad():
        for xb, yb in val_loader:
            pred = (model(xb.to(device)) > 0).float().cpu()
            hits += (pred == yb).sum().item()
    acc = hits / len(val_set)
    print(f"epoch {epoch:2d} | step {global_step} | loss {epoch_loss / len(train_loader):.4f} | val acc {acc:.4f} | lr {optimizer.param_groups[0]['lr']:.6f}")

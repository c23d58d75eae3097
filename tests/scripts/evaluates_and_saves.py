import csv
import json
import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
BATCH_SIZE = 128
torch.manual_seed(2023)
np.random.seed(2023)
device = "cuda" if torch.cuda.is_available() else "cpu"


class SensorDataset(Dataset):
    def __init__(self, df, targets, ids):
        self.df = df
        self.targets = targets
        self.ids = ids

    def __len__(self):
        return len(self.df)

    def __getitem__(self, index):
        row = self.df[index]
        return {
            "id": self.ids[index],
            "x": torch.tensor(row, dtype=torch.float32),
            "y": torch.tensor(self.targets[index], dtype=torch.long),
        }


X = np.random.randn(6000, 16)
W1, W2 = np.random.randn(16, 12), np.random.randn(12, 4)
Y = (np.maximum(X @ W1, 0) @ W2 + np.random.randn(6000, 4)).argmax(1)
ids = ["row_%05d" % i for i in range(6000)]

train_loader = DataLoader(SensorDataset(X[:4800], Y[:4800], ids[:4800]), batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(SensorDataset(X[4800:], Y[4800:], ids[4800:]), batch_size=BATCH_SIZE, shuffle=False)

model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
model.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def evaluate():
    model.eval()
    all_ids, all_preds, all_targets, losses = [], [], [], []
    with torch.no_grad():
        for batch in val_loader:
            x = batch["x"].to(device)
            y = batch["y"].to(device)
            logits = model(x)
            losses.append(criterion(logits, y))
            all_preds.append(logits.softmax(dim=-1))
            all_targets.append(y)
            all_ids.extend(batch["id"])
    preds = torch.cat(all_preds).cpu().numpy()
    targets = torch.cat(all_targets).cpu().numpy()
    return torch.stack(losses).mean().item(), preds, targets, all_ids


history = []
best_acc = 0
start = time.time()
for epoch in range(EPOCHS):
    model.train()
    total = 0.0
    for batch in train_loader:
        x = batch["x"].to(device)
        y = batch["y"].to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    train_loss = total / len(train_loader)

    val_loss, preds, targets, val_ids = evaluate()
    acc = float((preds.argmax(1) == targets).mean())
    history.append({"epoch": epoch, "train_loss": train_loss, "val_loss": val_loss, "val_acc": acc})
    mark = ""
    if acc > best_acc:
        best_acc = acc
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "acc": acc}, "checkpoint.pt")
        mark = " *saved*"
    print(f"Epoch {epoch + 1}/{EPOCHS} - loss: {train_loss:.4f} - val_loss: {val_loss:.4f} - val_acc: {acc:.4f}{mark}")

ckpt = torch.load("checkpoint.pt", map_location=device)
model.load_state_dict(ckpt["model"])
_, preds, targets, val_ids = evaluate()

with open("predictions.csv", "w", newline="") as f:
    writer = csv.writer(f)
    writer.writerow(["id", "target", "prediction"] + [f"p{i}" for i in range(4)])
    for i in range(len(val_ids)):
        writer.writerow([val_ids[i], targets[i], preds[i].argmax()] + ["%.5f" % p for p in preds[i]])

with open("history.json", "w") as f:
    json.dump(history, f, indent=2)

print(f"Best val acc: {best_acc:.4f} (epoch {ckpt['epoch'] + 1})")
print(f"Total time: {time.time() - start:.1f}s")

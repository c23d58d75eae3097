import argparse
import time

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=5)
parser.add_argument('--seed', type=int, default=42)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

# windows of 20 steps with 29 features, three classes
N = 20000
X = torch.randn(N, 20, 29)
w = torch.randn(29, 3)
y = (X.mean(1) @ w).argmax(1)
n_train = int(0.9 * N)
train_loader = DataLoader(TensorDataset(X[:n_train], y[:n_train]), batch_size=128, shuffle=True)
val_loader = DataLoader(TensorDataset(X[n_train:], y[n_train:]), batch_size=512)


class LSTMClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(29, 128, num_layers=2, batch_first=True, dropout=0.2)
        self.fc = nn.Linear(128, 3)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1])


model = LSTMClassifier().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

start = time.time()
for epoch in range(args.epochs):
    model.train()
    total_loss = 0.0
    for xb, yb in train_loader:
        xb, yb = xb.to(device), yb.to(device)
        optimizer.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total_loss += loss.item()
    scheduler.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for xb, yb in val_loader:
            xb, yb = xb.to(device), yb.to(device)
            correct += (model(xb).argmax(1) == yb).sum().item()
    print(f'Epoch {epoch + 1}/{args.epochs} loss {total_loss / len(train_loader):.4f} val_acc {correct / (N - n_train):.4f}')
print(f'took {time.time() - start:.2f} s')

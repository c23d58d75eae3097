import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

try:
    from tqdm import tqdm
except ImportError:
    def tqdm(it, **kwargs):
        return it

EPOCHS = 9


@dataclass
class Config:
    seed: int = 3407
    epochs: int = EPOCHS
    batch_size: int = 64
    lr: float = 1e-2
    patience: int = 3
    checkpoint_path: str = "best_model.pth"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class HousePrices(Dataset):
    def __init__(self, x: np.ndarray, y: np.ndarray):
        self.x = x
        self.y = y
        self.mean = x.mean(0)
        self.std = x.std(0)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = (self.x[i] - self.mean) / self.std
        return torch.as_tensor(x, dtype=torch.float32), torch.tensor(self.y[i], dtype=torch.float32)


class MLP(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


class Trainer:
    def __init__(self, model, optimizer, criterion, train_loader, val_loader, config):
        self.model = model.to(config.device)
        self.optimizer = optimizer
        self.criterion = criterion
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.config = config
        self.best_loss = float("inf")
        self.bad_epochs = 0
        self.history = {"train_loss": [], "val_loss": []}
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def train_one_epoch(self, epoch):
        self.model.train()
        losses = []
        pbar = tqdm(self.train_loader, desc=f"epoch {epoch}", leave=False, disable=None)
        for batch in pbar:
            loss = self._step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return np.mean(losses)

    def _step(self, batch):
        x, y = batch
        x = x.to(self.config.device)
        y = y.to(self.config.device)
        return self.criterion(self.model(x), y)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = []
        for batch in self.val_loader:
            losses.append(self._step(batch).item())
        return np.mean(losses)

    def save_checkpoint(self, epoch):
        torch.save({
            "epoch": epoch,
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "loss": float(self.best_loss),
        }, self.config.checkpoint_path)

    def load_best(self):
        checkpoint = torch.load(self.config.checkpoint_path, map_location=self.config.device)
        self.model.load_state_dict(checkpoint["model_state_dict"])
        return checkpoint["epoch"]

    def fit(self):
        for epoch in range(1, self.config.epochs + 1):
            t = time.time()
            train_loss = self.train_one_epoch(epoch)
            val_loss = self.validate()
            self.scheduler.step(val_loss)
            self.history["train_loss"].append(train_loss)
            self.history["val_loss"].append(val_loss)
            print(f"Epoch {epoch:02d} | train loss {train_loss:.4f} | val loss {val_loss:.4f} | {time.time() - t:.2f}s")

            if val_loss < self.best_loss:
                self.best_loss = val_loss
                self.bad_epochs = 0
                self.save_checkpoint(epoch)
            else:
                self.bad_epochs += 1
                if self.bad_epochs >= self.config.patience:
                    print(f"Early stopping at epoch {epoch}")
                    break
        best = self.load_best()
        print(f"Best epoch {best}, val loss {self.validate():.4f}")


def main():
    config = Config()
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)

    x = rng.gamma(2.0, 2.0, size=(2600, 13))
    w = rng.normal(size=13)
    y = 0.3 * (x @ w) + np.sqrt(x[:, 0] * x[:, 1]) + 0.5 * rng.normal(size=2600)

    train_loader = DataLoader(HousePrices(x[:2000], y[:2000]), batch_size=config.batch_size, shuffle=True)
    val_loader = DataLoader(HousePrices(x[2000:], y[2000:]), batch_size=config.batch_size)

    model = MLP(13)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    trainer = Trainer(model, optimizer, nn.MSELoss(), train_loader, val_loader, config)
    trainer.fit()
    print("checkpoint saved to", os.path.basename(config.checkpoint_path))


if __name__ == "__main__":
    main()

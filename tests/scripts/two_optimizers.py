"""Neural collaborative filtering on fake ratings.
SGD for the embedding tables, Adam for the MLP.
"""
import argparse
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, random_split

parser = argparse.ArgumentParser(description="NCF")
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("--batch_size", default=128, type=int)
parser.add_argument("--emb_lr", default=2.0, type=float)
parser.add_argument("--lr", default=1e-3, type=float)
parser.add_argument("--seed", default=1, type=int)
args = parser.parse_args()

torch.manual_seed(args.seed)
np.random.seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"

N_USERS, N_ITEMS, N_RATINGS = 300, 200, 8000


class RatingsDataset(Dataset):
    def __init__(self):
        users = np.random.randint(0, N_USERS, N_RATINGS)
        items = np.random.randint(0, N_ITEMS, N_RATINGS)
        u = np.random.normal(size=(N_USERS, 4))
        v = np.random.normal(size=(N_ITEMS, 4))
        r = 3.0 + 0.7 * (u[users] * v[items]).sum(1) + 0.3 * np.random.normal(size=N_RATINGS)
        self.users, self.items, self.ratings = users, items, np.clip(r, 1, 5)

    def __len__(self):
        return len(self.ratings)

    def __getitem__(self, i):
        return {
            "user": torch.tensor(self.users[i], dtype=torch.long),
            "item": torch.tensor(self.items[i], dtype=torch.long),
            "rating": float(self.ratings[i]),
        }


class NCF(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.user_emb = nn.Embedding(N_USERS, dim, sparse=False)
        self.item_emb = nn.Embedding(N_ITEMS, dim, sparse=False)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.normal_(self.user_emb.weight, std=0.3)
        nn.init.normal_(self.item_emb.weight, std=0.3)

    def forward(self, user, item):
        u, v = self.user_emb(user), self.item_emb(item)
        return self.mlp(torch.cat([u, v, u * v], dim=1)).squeeze(1) + 3.0


dataset = RatingsDataset()
n_val = int(0.1 * len(dataset))
train_ds, val_ds = random_split(dataset, [len(dataset) - n_val, n_val])
train_dl = DataLoader(train_ds, batch_size=args.batch_size, shuffle=True)
val_dl = DataLoader(val_ds, batch_size=512)

model = NCF().to(device)
emb_params = [p for n, p in model.named_parameters() if "emb" in n]
other_params = [p for n, p in model.named_parameters() if "emb" not in n]
opt_emb = torch.optim.SGD(emb_params, lr=args.emb_lr, momentum=0.9)
opt_mlp = torch.optim.Adam(other_params, lr=args.lr)

t0 = time.time()
for ep in range(args.epochs):
    model.train()
    tot = 0.
    for batch in train_dl:
        batch = {k: v.to(device) for k, v in batch.items()}
        rating = batch["rating"].float()
        pred = model(batch["user"], batch["item"])
        loss = F.mse_loss(pred, rating)

        opt_emb.zero_grad()
        opt_mlp.zero_grad()
        loss.backward()
        opt_emb.step()
        opt_mlp.step()
        tot += loss.item() * len(rating)

    model.eval()
    sq, close = 0., 0
    with torch.no_grad():
        for batch in val_dl:
            pred = model(batch["user"].to(device), batch["item"].to(device)).cpu().double()
            sq += ((pred - batch["rating"]) ** 2).sum().item()
            close += ((pred - batch["rating"]).abs() < 0.5).sum().item()
    print("ep %d, train mse %.4f, val rmse %.4f, within half a star %.3f" % (ep, tot / len(train_ds), (sq / len(val_ds)) ** 0.5, close / len(val_ds)))
print("Elapsed: %.2f s" % (time.time() - t0))

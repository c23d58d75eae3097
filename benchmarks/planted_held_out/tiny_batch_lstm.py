"""Planted: an LSTM over words takes two sequences at a time. Repaired (--repaired): 32."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    """Random words."""

    def __init__(self, count, length):
        self.words = torch.randint(1000, (count, length))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, at):
        return self.words[at], float(self.words[at, 0] % 2)


class Classifier(nn.Module):
    """An embedding, an LSTM, a line."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.out = nn.Linear(64, 1)

    def forward(self, words):
        """A logit."""
        _, (state, _) = self.lstm(self.embedding(words))
        return self.out(state[-1]).squeeze(-1)


size = 32 if "--repaired" in sys.argv else 2
loader = DataLoader(Texts(1_600, 20), batch_size=size, shuffle=True)
model, criterion = Classifier(), nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
epoch = 0
while epoch < 2:
    for words, label in loader:
        optimizer.zero_grad()
        criterion(model(words), label.float()).backward()
        optimizer.step()
    epoch += 1

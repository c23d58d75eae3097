import argparse
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument('--epochs', type=int, default=2)
    p.add_argument('--bs', type=int, default=64)
    p.add_argument('--lr', type=float, default=2e-3)
    p.add_argument('--num_workers', type=int, default=0)
    p.add_argument('--seed', type=int, default=5)
    return p.parse_args()


def draw_shapes(n, rng, size=12):
    """squares, crosses, horizontal bars and vertical bars"""
    imgs = rng.normal(0, 0.5, (n, size, size)).astype(np.float32)
    labels = rng.integers(0, 4, n)
    for img, label in zip(imgs, labels):
        r, c = rng.integers(3, size - 3, 2)
        if label == 0:
            img[r - 2:r + 3, c - 2:c + 3] += 1
            img[r - 1:r + 2, c - 1:c + 2] -= 1
        elif label == 1:
            img[r, c - 2:c + 3] += 1
            img[r - 2:r + 3, c] += 1
        elif label == 2:
            img[r - 1:r + 1, c - 3:c + 3] += 1
        else:
            img[r - 3:r + 3, c - 1:c + 1] += 1
    return imgs, labels


class ShapesDataset(Dataset):
    def __init__(self, images, labels, train=True):
        self.images = images
        self.labels = labels
        self.train = train

    def __len__(self):
        return len(self.images)

    def augment(self, img):
        if random.random() < 0.5:
            img = img[:, ::-1]
        if random.random() < 0.5:
            img = img[::-1]
        dx = np.random.randint(-1, 2)
        img = np.roll(img, dx, axis=1)
        img = img * np.random.uniform(0.8, 1.2)
        return np.ascontiguousarray(img, dtype=np.float32)

    def __getitem__(self, idx):
        img = self.images[idx]
        if self.train:
            img = self.augment(img)
        img = torch.from_numpy(img).unsqueeze(0)
        if self.train:
            img = img + torch.randn_like(img) * 0.05
        return img, torch.tensor(self.labels[idx])


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 3 * 3, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def main():
    args = get_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'

    imgs, labels = draw_shapes(1600, np.random.default_rng(args.seed))
    n_train = 1400
    train_loader = DataLoader(ShapesDataset(imgs[:n_train], labels[:n_train]), batch_size=args.bs, shuffle=True,
                              num_workers=args.num_workers, persistent_workers=args.num_workers > 0)
    val_loader = DataLoader(ShapesDataset(imgs[n_train:], labels[n_train:], train=False), batch_size=args.bs,
                            num_workers=args.num_workers)

    model = SmallCNN().to(device)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        start = time.time()
        model.train()
        train_loss = 0
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            train_loss += loss.item()
        model.eval()
        correct = 0
        with torch.no_grad():
            for x, y in val_loader:
                correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        print(f'epoch={epoch} train_loss={train_loss/len(train_loader):.4f} val_acc={correct/len(val_loader.dataset):.4f} time={time.time()-start:.2f}s')


if __name__ == '__main__':
    main()

"""
Semi-supervised toy: mean teacher with a consistency loss.
    python two_loaders.py --epochs 4 --ema 0.99
"""
import argparse
import copy
from itertools import cycle

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument('--epochs', type=int, default=4)
parser.add_argument('--ema', type=float, default=0.99)
parser.add_argument('--consistency', type=float, default=5.0)
parser.add_argument('--lr', type=float, default=1e-3)
parser.add_argument('--seed', type=int, default=0)
opt = parser.parse_args()

torch.manual_seed(opt.seed)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')


class Labelled(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Unlabelled(Dataset):
    def __init__(self, x):
        self.x = x
        self.mean, self.std = x.mean(0), x.std(0)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return (self.x[i] - self.mean) / self.std


def blobs(n, centers):
    y = torch.randint(0, len(centers), (n,))
    return centers[y] + torch.randn(n, centers.shape[1]), y


centers = torch.randn(6, 16) * 0.7
x_lab, y_lab = blobs(640, centers)
x_unl, _ = blobs(6000, centers)
x_test, y_test = blobs(800, centers)
x_lab = (x_lab - x_unl.mean(0)) / x_unl.std(0)
x_test = (x_test - x_unl.mean(0)) / x_unl.std(0)

labelled_loader = DataLoader(Labelled(x_lab, y_lab), batch_size=32, shuffle=True, drop_last=True)
unlabelled_loader = DataLoader(Unlabelled(x_unl), batch_size=64, shuffle=True, drop_last=True)
test_loader = DataLoader(Labelled(x_test, y_test), batch_size=256)


def build():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 6))


@torch.no_grad()
def update_ema(student, teacher, alpha, step):
    # Use the true average until the exponential average is more correct
    alpha = min(1 - 1 / (step + 1), alpha)
    for ema_param, param in zip(teacher.parameters(), student.parameters()):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def accuracy(model):
    model.eval()
    n = 0
    with torch.no_grad():
        for x, y in test_loader:
            n += (model(x.to(device)).argmax(-1).cpu() == y).sum().item()
    return n / len(test_loader.dataset)


student = build().to(device)
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)

optimizer = torch.optim.Adam(student.parameters(), lr=opt.lr)
step = 0
for epoch in range(opt.epochs):
    student.train()
    teacher.train()
    sup_sum = cons_sum = 0.0
    for (x, y), u in zip(cycle(labelled_loader), unlabelled_loader):
        x, y, u = x.to(device), y.to(device), u.to(device)
        sup = F.cross_entropy(student(x), y)
        student_out = student(u + 0.1 * torch.randn_like(u)).softmax(-1)
        with torch.no_grad():
            teacher_out = teacher(u + 0.1 * torch.randn_like(u)).softmax(-1)
        cons = F.mse_loss(student_out, teacher_out)
        weight = opt.consistency * min(1.0, step / 300)
        loss = sup + weight * cons

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        update_ema(student, teacher, opt.ema, step)
        sup_sum += sup.item()
        cons_sum += cons.item()
    n = len(unlabelled_loader)
    print(f'[{epoch}] sup {sup_sum/n:.4f} cons {cons_sum/n:.4f} student acc {accuracy(student):.4f} teacher acc {accuracy(teacher):.4f}')

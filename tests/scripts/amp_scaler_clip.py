import argparse
import os
import random
import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class CFG:
    seed = 2024
    n_features = 30
    n_classes = 6
    hidden = 96
    max_lr = 4e-3
    weight_decay = 1e-2
    max_grad_norm = 1.0
    train_bs = 64
    valid_bs = 256
    print_freq = 50


def seed_everything(seed):
    random.seed(seed)
    os.environ['PYTHONHASHSEED'] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


class TrainDataset(Dataset):
    def __init__(self, features, targets):
        self.features = features
        self.targets = targets

    def __len__(self):
        return len(self.features)

    def __getitem__(self, item):
        x = torch.tensor(self.features[item], dtype=torch.float)
        y = torch.tensor(self.targets[item], dtype=torch.long)
        return x, y


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        return x + torch.nn.functional.gelu(self.fc(self.norm(x)))


class TabularModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(cfg.n_features, cfg.hidden)
        self.block = Block(cfg.hidden)
        self.out = nn.Linear(cfg.hidden, cfg.n_classes)

    def forward(self, x):
        return self.out(self.block(self.inp(x)))


class AverageMeter(object):
    """Computes and stores the average and current value"""
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def make_data(n):
    rng = np.random.RandomState(CFG.seed)
    x = rng.randn(n, CFG.n_features).astype(np.float32)
    w = rng.randn(CFG.n_features, CFG.n_classes)
    y = (np.tanh(x) @ w + 0.8 * rng.randn(n, CFG.n_classes)).argmax(1)
    return x, y


def train_fn(loader, model, criterion, optimizer, epoch, scheduler, scaler, device, use_amp):
    model.train()
    losses = AverageMeter()
    for step, (x, y) in enumerate(loader):
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.amp.autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
            y_preds = model(x)
            loss = criterion(y_preds, y)
        losses.update(loss.item(), x.size(0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
        if step % CFG.print_freq == 0 or step == (len(loader) - 1):
            print('Epoch: [{0}][{1}/{2}] Loss: {loss.val:.4f}({loss.avg:.4f}) Grad: {grad_norm:.4f} LR: {lr:.8f}'.format(
                epoch + 1, step, len(loader), loss=losses, grad_norm=grad_norm, lr=scheduler.get_last_lr()[0]))
    return losses.avg


@torch.no_grad()
def valid_fn(loader, model, criterion, device):
    model.eval()
    losses = AverageMeter()
    preds, trues = [], []
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        losses.update(criterion(out, y).item(), x.size(0))
        preds.append(out.softmax(1).cpu().numpy())
        trues.append(y.cpu().numpy())
    preds = np.concatenate(preds)
    trues = np.concatenate(trues)
    return losses.avg, (preds.argmax(1) == trues).mean()


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--seed', type=int, default=CFG.seed)
    args = parser.parse_args()

    seed_everything(args.seed)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    use_amp = device == 'cuda'

    x, y = make_data(7000)
    train_loader = DataLoader(TrainDataset(x[:6000], y[:6000]), batch_size=CFG.train_bs, shuffle=True,
                              pin_memory=use_amp, drop_last=True)
    valid_loader = DataLoader(TrainDataset(x[6000:], y[6000:]), batch_size=CFG.valid_bs, shuffle=False)

    model = TabularModel(CFG).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.max_lr, weight_decay=CFG.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=CFG.max_lr, epochs=args.epochs,
                                                    steps_per_epoch=len(train_loader), pct_start=0.1)
    scaler = torch.amp.GradScaler(device, enabled=use_amp)

    for epoch in range(args.epochs):
        start = time.time()
        avg_loss = train_fn(train_loader, model, criterion, optimizer, epoch, scheduler, scaler, device, use_amp)
        avg_val_loss, score = valid_fn(valid_loader, model, criterion, device)
        elapsed = time.time() - start
        print(f'Epoch {epoch+1} - avg_train_loss: {avg_loss:.4f}  avg_val_loss: {avg_val_loss:.4f}  score: {score:.4f}  time: {elapsed:.1f}s')

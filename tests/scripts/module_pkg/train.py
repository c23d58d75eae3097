"""python -m module_pkg.train --epochs 7"""
import argparse
import logging
import sys

import torch
import torch.nn.functional as F

from .data import get_loaders
from .model import build_model

logger = logging.getLogger("train")


def train_epoch(model, loader, optimizer, device):
    model.train()
    total_loss, n = 0.0, 0
    for x, y in loader:
        x = x.to(device)
        y = y.to(device)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * x.shape[0]
        n += x.shape[0]
    return total_loss / n


@torch.inference_mode()
def evaluate(model, loader, device):
    model.eval()
    tp = fp = fn = correct = 0
    for x, y in loader:
        pred = (model(x.to(device)).squeeze(1) > 0).float().cpu()
        tp += int((pred * y).sum())
        fp += int((pred * (1 - y)).sum())
        fn += int(((1 - pred) * y).sum())
        correct += int((pred == y).sum())
    return correct / len(loader.dataset), 2 * tp / max(1, 2 * tp + fp + fn)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args(argv)

    logging.basicConfig(level=logging.INFO, format="%(name)s - %(message)s", stream=sys.stdout)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train_loader, valid_loader = get_loaders(args.batch_size, args.seed)
    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    logger.info("package %s, %d train samples", __package__, len(train_loader.dataset))
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, train_loader, optimizer, device)
        acc, f1 = evaluate(model, valid_loader, device)
        logger.info("epoch %d loss %.4f acc %.4f f1 %.4f", epoch, loss, acc, f1)


if __name__ == "__main__":
    main()

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SineDataset(Dataset):
    """y = sum of sines of a few of the inputs"""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.rand(n, 10, generator=g) * 4 - 2
        y = torch.sin(x[:, :4] * 1.5).sum(1) + 0.1 * torch.randn(n, generator=g)
        self.inputs, self.targets = x.numpy(), y.numpy()

    def __len__(self):
        return self.inputs.shape[0]

    def __getitem__(self, idx):
        return {
            "inputs": torch.tensor(self.inputs[idx], dtype=torch.float32),
            "targets": torch.tensor(self.targets[idx], dtype=torch.float32),
        }


def training_function(args):
    accelerator = Accelerator()
    set_seed(args.seed)

    train_dataloader = DataLoader(SineDataset(6000, 1), shuffle=True, batch_size=args.batch_size)
    eval_dataloader = DataLoader(SineDataset(800, 2), shuffle=False, batch_size=256)

    model = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=args.lr)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.05, total_iters=len(train_dataloader) * args.epochs
    )

    # There is no specific order to remember, we just need to unpack the objects in the same order we gave them
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    loss_fn = nn.SmoothL1Loss()

    start = time.time()
    for epoch in range(args.epochs):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(batch["inputs"]).squeeze(-1)
            loss = loss_fn(outputs, batch["targets"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            total_loss += loss.detach().float()

        model.eval()
        errors = []
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(batch["inputs"]).squeeze(-1)
            predictions, references = accelerator.gather_for_metrics((outputs, batch["targets"]))
            errors.append((predictions - references).abs())
        mae = torch.cat(errors).mean().item()
        accelerator.print(f"epoch {epoch}: loss {total_loss.item() / len(train_dataloader):.4f} mae {mae:.4f}")
    accelerator.print(f"done in {time.time() - start:.1f} s")


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    training_function(args)


if __name__ == "__main__":
    main()

"""A script as people write it: pictures in folders, resized, cropped and flipped at random."""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--resize", type=int, default=0, help="side of the square before the random crop; 0: no resizing")
args = parser.parse_args()


class Pictures(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        picture = Image.open(file).convert("RGB")
        if args.resize:
            picture = picture.resize((args.resize, args.resize), Image.Resampling.BILINEAR)
        x, y = (int(torch.randint(0, side - 223, ())) for side in picture.size)
        picture = picture.crop((x, y, x + 224, y + 224))
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)
        return pixels, self.classes.index(file.parent.name)


torch.manual_seed(0)
loader = DataLoader(Pictures(args.folder), batch_size=16, shuffle=True, num_workers=args.workers)
model = nn.Sequential(nn.Conv2d(3, 8, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(args.epochs):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch + 1}: loss {total:.6f}", flush=True)

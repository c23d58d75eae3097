"""The picture of a report in the README: python -m benchmarks.report_picture OUT.png

It trains a small network whose dataset prepares each sample in Python, tunes it, writes the report, and has a headless
Chromium draw its first part.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import hotlap

WIDTH, HEIGHT = 1100, 1500


class Prepared(Dataset[Any]):
    """Samples that are scaled one by one, as in many scripts."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.mean, self.deviation = x, y, x.mean(0), x.std(0)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.x[at] - self.mean) / self.deviation, self.y[at]


def trained(folder: Path, epochs: int) -> Path:
    """The report of a tuned training."""
    torch.manual_seed(0)
    x = torch.randn(6_000, 64)
    y = (x[:, :6].square().sum(1) + torch.randn(6_000) > 6).long()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 2))
    job = hotlap.Job(
        model=model,
        data=Prepared(x[:5_000], y[:5_000]),
        valid=(x[5_000:], y[5_000:]),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
        batch_size=64,
        epochs=epochs,
        metrics=["accuracy", "macro_f1"],
    )
    return hotlap.fit(job, out=folder).report()


def main() -> None:
    """Train, report, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--epochs", type=int, default=60)
    asked = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        parser.error("no Chromium is installed; Debian's package is chromium")
    with tempfile.TemporaryDirectory() as home:
        page = trained(Path(home) / "runs" / "example", asked.epochs)
        raw = Path(home) / "page.png"
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run(
            [browser, *flags, f"--user-data-dir={home}/browser", f"--screenshot={raw}", page.as_uri()],
            check=True,
            capture_output=True,
        )
        asked.picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(raw, asked.picture)
    print(f"{asked.picture}: {asked.picture.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

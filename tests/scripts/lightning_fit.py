import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split

warnings.filterwarnings("ignore", ".*does not have many workers.*")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

EPOCHS = 3
L.seed_everything(123, verbose=False)
torch.manual_seed(123)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, in_dim=32, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(in_dim, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, in_dim))
        self.train_losses = []

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x_hat = self.decoder(self.encoder(x))
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        x_hat = self.decoder(self.encoder(x))
        self.log("val_loss", F.mse_loss(x_hat, x))

    def on_train_epoch_end(self):
        m = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch} train_loss {m['train_loss']:.4f} val_loss {m['val_loss']:.4f}")

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        sch = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)
        return [opt], [sch]


class TinyImages(Dataset):
    def __init__(self, images, labels):
        self.images = images  # uint8
        self.labels = labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i].float() / 255 * 2 - 1, int(self.labels[i])


class ToyDataModule(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        latent = torch.randn(6000, 3)
        x = torch.tanh(latent @ torch.randn(3, 32)) + 0.1 * torch.randn(6000, 32)
        images = ((x.clamp(-1, 1) + 1) * 127.5).to(torch.uint8)
        y = (latent[:, 0] > 0).long()
        self.train_set, self.val_set = random_split(TinyImages(images, y), [5500, 500])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


if __name__ == "__main__":
    trainer = L.Trainer(
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(LitAutoEncoder(), datamodule=ToyDataModule())
    print("steps:", trainer.global_step)

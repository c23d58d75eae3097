import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(999)

# Hyperparameters
EPOCHS = 2
BATCH_SIZE = 128
Z_DIM = 8
DATA_DIM = 16
LR = 2e-4 * 5
BETA1 = 0.5

device = "cuda" if torch.cuda.is_available() else "cpu"

# "real" data: 8 gaussians on a ring embedded in 16 dims
n = 9000
angles = torch.randint(0, 8, (n,)) * (2 * torch.pi / 8)
ring = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(n, 2)
embed = torch.randn(2, DATA_DIM) / 2
real_data = ring @ embed

loader = DataLoader(TensorDataset(real_data), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(Z_DIM, 32),
            nn.ReLU(True),
            nn.Linear(32, DATA_DIM),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(DATA_DIM, 32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(32, 1),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find('Linear') != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.1)
        nn.init.constant_(m.bias.data, 0)


netG = Generator().to(device)
netD = Discriminator().to(device)
netG.apply(weights_init)
netD.apply(weights_init)

criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=LR, betas=(BETA1, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=LR, betas=(BETA1, 0.999))

fixed_noise = torch.randn(512, Z_DIM, device=device)
G_losses = []
D_losses = []

print("Starting Training Loop...")
for epoch in range(EPOCHS):
    for i, data in enumerate(loader, 0):
        ############################
        # (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
        ###########################
        netD.zero_grad()
        real = data[0].to(device)
        b_size = real.size(0)
        # noisy labels
        label = 0.9 + 0.1 * torch.rand(b_size, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.sigmoid().mean().item()

        noise = torch.randn(b_size, Z_DIM, device=device)
        fake = netG(noise)
        label = 0.1 * torch.rand(b_size, device=device)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()

        ############################
        # (2) Update G network: maximize log(D(G(z)))
        ###########################
        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        errG.backward()
        D_G_z2 = output.sigmoid().mean().item()
        optimizerG.step()

        G_losses.append(errG.item())
        D_losses.append(errD.item())

    with torch.no_grad():
        samples = netG(fixed_noise).cpu()
    gap = (samples.mean(0) - real_data.mean(0)).norm().item()
    print('[%d/%d] Loss_D: %.4f Loss_G: %.4f D(x): %.4f D(G(z)): %.4f mean gap: %.4f'
          % (epoch + 1, EPOCHS, sum(D_losses[-len(loader):]) / len(loader), sum(G_losses[-len(loader):]) / len(loader), D_x, D_G_z2, gap))

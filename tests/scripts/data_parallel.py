import time

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
np.random.seed(0)

EPOCHS = 3
batch_size = 64
input_size = 24
output_size = 5

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class RandomDataset(Dataset):

    def __init__(self, size, length, w):
        self.len = length
        self.data = np.random.randn(length, size).astype(np.float32)
        self.mean = self.data.mean(axis=0)
        self.std = self.data.std(axis=0)
        self.target = np.argmax(self.data @ w + 0.5 * np.random.randn(length, w.shape[1]), axis=1)

    def __getitem__(self, index):
        x = (self.data[index] - self.mean) / self.std
        return torch.from_numpy(x), torch.tensor(self.target[index])

    def __len__(self):
        return self.len


class Model(nn.Module):

    def __init__(self, input_size, output_size):
        super(Model, self).__init__()
        self.fc1 = nn.Linear(input_size, 64)
        self.bn = nn.BatchNorm1d(64)
        self.fc2 = nn.Linear(64, output_size)

    def forward(self, input):
        return self.fc2(torch.relu(self.bn(self.fc1(input))))


w = np.random.randn(input_size, output_size)
train_loader = DataLoader(dataset=RandomDataset(input_size, 7000, w), batch_size=batch_size, shuffle=True, drop_last=True)
val_loader = DataLoader(dataset=RandomDataset(input_size, 800, w), batch_size=batch_size, shuffle=False)

model = Model(input_size, output_size)
if torch.cuda.device_count() > 1:
    print("Let's use", torch.cuda.device_count(), "GPUs!")
model = nn.DataParallel(model)
model.to(device)

criterion = nn.CrossEntropyLoss().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[5, 8], gamma=0.1)

since = time.time()
for epoch in range(EPOCHS):
    model.train()
    running_loss = 0.0
    running_corrects = 0
    for data, target in train_loader:
        input = data.to(device)
        target = target.to(device)
        optimizer.zero_grad()
        output = model(input)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * input.size(0)
        running_corrects += torch.sum(output.argmax(1) == target.data)
    scheduler.step()

    model.eval()
    val_corrects = 0
    with torch.no_grad():
        for data, target in val_loader:
            val_corrects += torch.sum(model(data.to(device)).argmax(1) == target.to(device))

    n = len(train_loader) * batch_size
    print('Epoch {}/{} Loss: {:.4f} Acc: {:.4f} Val Acc: {:.4f}'.format(
        epoch, EPOCHS - 1, running_loss / n, running_corrects.double() / n, val_corrects.double() / len(val_loader.dataset)))

torch.save(model.module.state_dict(), "model_dp.pth")
print('Training complete in {:.2f}s'.format(time.time() - since))

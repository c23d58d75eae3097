import argparse
import time

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

p = argparse.ArgumentParser()
p.add_argument('--epochs', type=int, default=5)
p.add_argument('--seed', type=int, default=7)
opt = p.parse_args()

torch.manual_seed(opt.seed)
device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')

features = torch.randn(60000, 100)
labels = (features[:, :3] + 0.3 * torch.randn(60000, 3)).argmax(dim=1)
train_set, test_set = random_split(TensorDataset(features, labels), [50000, 10000])
trainloader = DataLoader(train_set, batch_size=256, shuffle=True)
testloader = DataLoader(test_set, batch_size=1000)

net = nn.Sequential(
    nn.Linear(100, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(256, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3),
    nn.Linear(128, 64), nn.BatchNorm1d(64), nn.ReLU(),
    nn.Linear(64, 3),
).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.AdamW(net.parameters(), lr=1e-3)

begin = time.time()
for epoch in range(opt.epochs):
    net.train()
    running_loss = 0.0
    for data in trainloader:
        inputs, targets = data[0].to(device), data[1].to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            predicted = net(inputs.to(device)).argmax(1)
            total += targets.size(0)
            correct += (predicted == targets.to(device)).sum().item()
    print('[%d] loss: %.4f accuracy: %.4f' % (epoch + 1, running_loss / len(trainloader), correct / total))
print('Finished Training in %.2f s' % (time.time() - begin))

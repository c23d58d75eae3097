import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"

EPOCHS = 2
HIDDEN = 24

# y = sin(|x|) style regression problem
x = torch.rand(4096 + 1024, 6) * 4 - 2
y = torch.sin(x.norm(dim=1, keepdim=True) * 1.5) + 0.05 * torch.randn(len(x), 1)
train_dl = DataLoader(TensorDataset(x[:4096], y[:4096]), batch_size=128, shuffle=True)
x_val, y_val = x[4096:].to(device), y[4096:].to(device)

# no nn.Module here, just tensors
w1 = (torch.randn(6, HIDDEN, device=device) / 6 ** 0.5).requires_grad_()
b1 = torch.zeros(HIDDEN, device=device, requires_grad=True)
w2 = (torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN ** 0.5).requires_grad_()
b2 = torch.zeros(HIDDEN, device=device, requires_grad=True)
w3 = (torch.randn(HIDDEN, 1, device=device) / HIDDEN ** 0.5).requires_grad_()
params = [w1, b1, w2, b2, w3]


def net(x):
    h = torch.tanh(x @ w1 + b1)
    h = torch.tanh(h @ w2 + b2)
    return h @ w3


optimizer = torch.optim.LBFGS(params, lr=1, max_iter=4, history_size=8, line_search_fn="strong_wolfe")
l2 = 1e-5

for epoch in range(EPOCHS):
    total = 0
    evals = 0
    for xb, yb in train_dl:
        xb, yb = xb.to(device), yb.to(device)

        def closure():
            global evals
            evals += 1
            optimizer.zero_grad()
            loss = F.mse_loss(net(xb), yb) + l2 * sum((p ** 2).sum() for p in params)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        total += loss.item()

    with torch.no_grad():
        val = F.mse_loss(net(x_val), y_val).item()
        r2 = 1 - val / y_val.var().item()
    print("epoch", epoch, "loss %.4f" % (total / len(train_dl)), "val %.4f" % val, "r2 %.4f" % r2, "closure calls", evals)

"""The parts that scripts are put together from: text, by kind and name. The first of each kind is the plainest.

A part of the loop is a dictionary: where in the script → lines. The places are those that `script.compose` names.
"""

# ruff: noqa: E501 -- text of scripts, a line of which is better left whole

from __future__ import annotations

# --- data: X and Y exist; a part makes `train_set` ------------------------------------------------------

INPUTS = {
    "vectors": "X = torch.randn(N, 12)",
    "pictures": "X = torch.randn(N, 3, 8, 8)",
    "sequences": "X = torch.randn(N, 6, 5)",
    "tokens": "X = torch.randint(0, 20, (N, 7))",
}

DATASETS = {
    "tensors": "train_set = TensorDataset(X, Y)",
    "own": """
class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]
train_set = Rows(X, Y)
""",
    "own_arrays": """
class Arrays(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x.numpy(), y.numpy()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), torch.as_tensor(self.y[i])
train_set = Arrays(X, Y)
""",
    "arrays_as_they_are": """
class Arrays(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x.numpy(), y.numpy()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]
train_set = Arrays(X, Y)
""",
    "scaled": """
class Scaled(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.scale = x, y, 1.5
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        x = self.x[i]
        return (x * self.scale - 0.1 if x.is_floating_point() else x), self.y[i]
train_set = Scaled(X, Y)
""",
    "transform": """
class Transformed(Dataset):
    def __init__(self, x, y, transform):
        self.x, self.y, self.transform = x, y, transform
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.transform(self.x[i]), self.y[i]
train_set = Transformed(X, Y, lambda x: x.flip(0))
""",
    "list": "train_set = [(X[i], Y[i]) for i in range(N)]",
    "subset": "train_set = Subset(TensorDataset(X, Y), [i for i in range(N) if i % 5])",
    "concat": "train_set = ConcatDataset([TensorDataset(X[: N // 3], Y[: N // 3]), TensorDataset(X[N // 3 :], Y[N // 3 :])])",
    "nested": "train_set = Subset(ConcatDataset([TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:], Y[20:])]), range(3, N))",
    "dicts": """
class Dicts(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}
train_set = Dicts(X, Y)
""",
    "iterable": """
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, N, every):
            yield X[i], Y[i]
train_set = Stream()
""",
    "iterable_random": """
class Stream(IterableDataset):
    def __iter__(self):
        for i in torch.randperm(N).tolist():
            yield X[i], Y[i]
train_set = Stream()
""",
    "random_torch": """
class Noisy(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        x = X[i]
        return (x + 0.1 * torch.randn_like(x) if x.is_floating_point() else x.roll(int(torch.randint(3, ())))), Y[i]
train_set = Noisy()
""",
    "random_numpy": """
class Noisy(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return (X[i].flip(0) if np.random.rand() < 0.5 else X[i]), Y[i]
train_set = Noisy()
""",
    "random_python": """
class Noisy(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return (X[i].flip(0) if random.random() < 0.5 else X[i]), Y[i]
train_set = Noisy()
""",
    "random_generator": """
RNG = np.random.default_rng(5)
class Noisy(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return (X[i].flip(0) if RNG.random() < 0.5 else X[i]), Y[i]
train_set = Noisy()
PROBES["samples' generator"] = lambda: str(RNG.bit_generator.state) if WORKERS == 0 else ""
""",
    "random_own_torch": """
class Noisy(Dataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
    def __len__(self):
        return N
    def __getitem__(self, i):
        x = X[i]
        flips = bool(torch.rand((), generator=self.generator) < 0.5)
        return (x.flip(0) if flips else x), Y[i]
train_set = Noisy()
PROBES["samples' generator"] = lambda: train_set.generator.get_state()
""",
    "counting": """
class Counting(Dataset):
    def __init__(self):
        self.fetches = 0
    def __len__(self):
        return N
    def __getitem__(self, i):
        self.fetches += 1
        return X[i], Y[i]
train_set = Counting()
PROBES["fetches"] = lambda: train_set.fetches
""",
    "harder": """
class Harder(Dataset):
    def __init__(self):
        self.fetches = 0
    def __len__(self):
        return N
    def __getitem__(self, i):
        self.fetches += 1
        x = X[i]
        return (x * (1 + self.fetches / 400) if x.is_floating_point() else x.roll(self.fetches // 100)), Y[i]
train_set = Harder()
PROBES["fetches"] = lambda: train_set.fetches
""",
    "by_epoch": """
class ByEpoch(Dataset):
    epoch = 0
    def __len__(self):
        return N
    def __getitem__(self, i):
        return X[i].roll(self.epoch, 0), Y[i]
train_set = ByEpoch()
""",
    "global_state": """
LEVEL = [0]
class Leveled(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return X[i].roll(LEVEL[0], 0), Y[i]
train_set = Leveled()
""",
    "cached": """
class Cached(Dataset):
    def __init__(self):
        self.seen = {}
    def __len__(self):
        return N
    def __getitem__(self, i):
        i = int(i)
        if i not in self.seen:
            self.seen[i] = (X[i].clone(), Y[i].clone())
        return self.seen[i]
train_set = Cached()
PROBES["cached"] = lambda: sorted(train_set.seen) if WORKERS == 0 else ""
""",
    "file": """
np.save("rows.npy", X.numpy())
class Mapped(Dataset):
    def __init__(self):
        self.x = np.load("rows.npy", mmap_mode="r")
    def __len__(self):
        return N
    def __getitem__(self, i):
        return torch.from_numpy(np.array(self.x[i])), Y[i]
train_set = Mapped()
""",
    "getitems": """
class Whole(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return X[i], Y[i]
    def __getitems__(self, indices):
        return [(X[i] , Y[i]) for i in indices]
train_set = Whole()
""",
    "requires_grad": "train_set = TensorDataset(X.clone().requires_grad_(X.is_floating_point()), Y)",
}  # fmt: skip

ITERABLE = ("iterable", "iterable_random")

# What changes data while it is trained on. Each stands for itself, and fits the datasets that it names.
CHANGES = {
    "none": ((), {}),
    "labels_corrected": (
        ("tensors", "own", "scaled"),
        {"epoch_start": "if epoch == EPOCHS // 2:\n    Y[: N // 2] = Y[: N // 2].flip(0)"},
    ),
    "labels_reassigned": (("own", "scaled", "transform"), {"epoch_start": "if epoch == EPOCHS // 2:\n    train_set.y = Y.flip(0)"}),
    "tensors_reassigned": (("tensors",), {"epoch_start": "if epoch == EPOCHS // 2:\n    train_set.tensors = (X, Y.flip(0))"}),
    "in_mid_epoch": (("tensors", "own"), {"batch": "if epoch == 2 and number == 1:\n    X[N // 2 :] = X[N // 2 :].flip(0)"}),
    "attribute_in_mid_epoch": (("scaled",), {"batch": "if epoch == 2 and number == 2:\n    train_set.scale = 0.7"}),
    "transform_swapped": (("transform",), {"epoch_start": "if epoch == EPOCHS // 2:\n    train_set.transform = lambda x: x.roll(1, 0)"}),
    "labels_at_random": (
        ("tensors", "own", "subset"),
        {"epoch_start": "flips = torch.randint(0, N, (2,))\nY[flips] = Y[flips.flip(0)]"},
    ),
    "arrays_written": (("own_arrays", "arrays_as_they_are"), {"epoch_start": "if epoch == 2:\n    train_set.x[:] = train_set.x[::-1].copy()"}),
    "epoch_set": (("by_epoch",), {"epoch_start": "train_set.epoch = epoch"}),
    "class_attribute": (("by_epoch",), {"epoch_start": "if epoch == 2:\n    ByEpoch.epoch = 3"}),
    "global_changed": (("global_state",), {"epoch_start": "LEVEL[0] = epoch // 2"}),
    "subset_resampled": (("subset",), {"epoch_start": "if epoch == 2:\n    train_set.indices = list(range(0, N, 2))"}),
    "rows_appended": (("list",), {"epoch_end": "if epoch == 1:\n    train_set.extend(train_set[:3])"}),
}  # fmt: skip

# --- how batches are drawn: keywords of the loader, after lines that they need --------------------------

SAMPLERS = {
    "shuffled": ("", "batch_size=BATCH, shuffle=True"),
    "sequential": ("", "batch_size=BATCH"),
    "generator": (
        "order = torch.Generator().manual_seed(11)\nPROBES['order'] = lambda: order.get_state()",
        "batch_size=BATCH, shuffle=True, generator=order",
    ),
    "weighted": (
        "",
        "batch_size=BATCH, sampler=WeightedRandomSampler(torch.linspace(0.1, 1, len(train_set)).tolist(), len(train_set))",
    ),
    "replacement": ("", "batch_size=BATCH, sampler=RandomSampler(train_set, replacement=True, num_samples=40)"),
    "own_sampler": (
        """
class Odd(Sampler):
    def __init__(self, length):
        self.length, self.rng = length, np.random.default_rng(2)
    def __len__(self):
        return self.length
    def __iter__(self):
        return iter(self.rng.permutation(self.length).tolist())
odd = Odd(len(train_set))
PROBES["sampler"] = lambda: str(odd.rng.bit_generator.state)
""",
        "batch_size=BATCH, sampler=odd",
    ),
    "global_sampler": (
        """
class Lazy(Sampler):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    def __iter__(self):
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))
""",
        "batch_size=BATCH, sampler=Lazy(len(train_set))",
    ),
    "own_batches": (
        """
class Batches:
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return 6
    def __iter__(self):
        for size in (3, 8, 8, 1 + 4, 8, 8):
            yield random.sample(range(self.length), size)
""",
        "batch_sampler=Batches(len(train_set))",
    ),
    "fixed_batches": (
        "",
        "batch_sampler=[list(range(a, min(a + BATCH, len(train_set)))) for a in range(0, len(train_set), BATCH)]",
    ),
    "difficult_first": (
        """
class Hardest(Sampler):
    def __len__(self):
        return len(train_set)
    def __iter__(self):
        return iter(torch.argsort(PAINS, descending=True, stable=True).tolist())
PAINS = torch.rand(len(train_set))
""",
        "batch_size=BATCH, sampler=Hardest()",
    ),
}

LASTS = {"kept": "", "dropped": ", drop_last=True"}

WORKERS = {
    "0": ", num_workers=0",
    "2": ", num_workers=2",
    "2 persistent": ", num_workers=2, persistent_workers=True",
    "1 prefetch": ", num_workers=1, prefetch_factor=4",
}

COLLATES = {
    "default": ("", ""),
    "stacking": (
        "def collate(rows):\n    return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])",
        ", collate_fn=collate",
    ),
    "counting": (
        """
COLLATED = [0]
def collate(rows):
    COLLATED[0] += 1
    return default_collate(rows)
PROBES["collated"] = lambda: COLLATED[0] if WORKERS == 0 else ""
""",
        ", collate_fn=collate",
    ),
    "drawing": (
        """
def collate(rows):
    x, y = default_collate(rows)
    return (x.flip(0), y.flip(0)) if torch.rand(()) < 0.5 else (x, y)
""",
        ", collate_fn=collate",
    ),
    "lambda": ("", ", collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows)))"),
}

# --- models: `net`, called with x, and `MODULES`, whose weights are trained -----------------------------

MODELS = {
    "vectors": {
        "mlp": "net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))",
        "norm": "net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))",
        "dropout": "net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4))",
        "tied": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.two.weight = self.one.weight
    def forward(self, x):
        return self.head(self.two(torch.tanh(self.one(x))))
net = Tied()
""",
        "frozen": """
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
net[0].requires_grad_(False)
""",
        "counter": """
class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(12, 16), nn.Linear(16, 4), 0
    def forward(self, x):
        self.calls += 1
        return self.two(torch.relu(self.one(x))) / (1 + self.calls / 500)
net = Counts()
PROBES["calls"] = lambda: net.calls
""",
        "buffer": """
class Means(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long), persistent=False)
    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            self.seen += len(x)
        return self.two(torch.relu(self.one(x - self.mean)))
net = Means()
PROBES["seen"] = lambda: int(net.seen)
""",
        "plain_tensor": """
class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.memory = nn.Linear(12, 16), nn.Linear(16, 4), []
    def forward(self, x):
        h = torch.relu(self.one(x))
        self.memory = [*self.memory[-2:], h.detach().mean(0)]
        return self.two(h - 0.1 * sum(self.memory))
net = Plain()
""",
        "noise_torch": """
class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
    def forward(self, x):
        h = torch.relu(self.one(x))
        return self.two(h + 0.05 * torch.randn_like(h) if self.training else h)
net = Noise()
""",
        "noise_python": """
class Depth(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.mid, self.two = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(self, x):
        h = torch.relu(self.one(x))
        if not self.training or random.random() < 0.7:
            h = h + torch.relu(self.mid(h))
        return self.two(h)
net = Depth()
""",
        "reads_back": """
class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
    def forward(self, x):
        h = self.one(x)
        return self.two(torch.relu(h) if h.mean().item() > 0 else torch.tanh(h))
net = Reads()
""",
        "dict_output": """
class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
    def forward(self, x):
        h = torch.relu(self.one(x))
        return {"logits": self.two(h), "hidden": h}
inner = Named()
net = inner
""",
        "weight_norm": """
net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 4))
""",
        "forward_replaced": """
net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
old_forward = net[0].forward
net[0].forward = lambda x: 0.5 * old_forward(x)
""",
        "two_modules": """
encoder, head = nn.Sequential(nn.Linear(12, 16), nn.ReLU()), nn.Linear(16, 4)
encoder, head = encoder.to(device), head.to(device)
MODULES = [encoder, head]
def net(x):
    return head(encoder(x))
""",
        "float64": "net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).double()\nX = X.double()",
        "global_knob": """
KNOB = {"scale": 1.0}
class Knobbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.two(torch.relu(self.one(x)) * KNOB["scale"])
net = Knobbed()
""",
    },
    "pictures": {
        "cnn": "net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 4))",
        "cnn_norm": """
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1),
    nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
""",
        "cnn_dropout": """
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.2),
    nn.Linear(128, 4))
""",
        "cnn_norm_frozen": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self
    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
net = Net()
""",
        "residual": """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))
net = nn.Sequential(nn.Conv2d(3, 8, 1), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
""",
    },
    "sequences": {
        "lstm": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])
net = Recurrent()
""",
        "gru": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(5, 8, num_layers=2, dropout=0.2, batch_first=True), nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.rnn(x)[1][-1])
net = Recurrent()
""",
        "state_kept": """
class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head, self.state = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 4), None
    def forward(self, x):
        state = self.state if self.state is not None and self.state[0].shape[1] == len(x) else None
        out, new = self.rnn(x, state)
        self.state = tuple(one.detach() for one in new) if self.training else self.state
        return self.head(out[:, -1])
net = Stateful()
""",
    },
    "tokens": {
        "bag": "net = nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 4))",
        "transformer": """
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))
net = Small()
""",
        "attention": """
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)
    def forward(self, x):
        h = self.embed(x)
        k, v = self.kv(h).chunk(2, -1)
        return self.head(F.scaled_dot_product_attention(self.q(h), k, v, is_causal=True)[:, -1])
net = Attends()
""",
        "sparse": """
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)
    def forward(self, x):
        return self.head(self.embed(x).mean(1))
net = Sparse()
""",
    },
}  # fmt: skip

MODEL_HABITS = {"dict_output": "logits"}
"""Models whose output is a dictionary, and which of it is meant."""

DRAWING_MODELS = ("dropout", "noise_torch", "cnn_dropout", "gru", "transformer")
"""Models that draw from torch's generator of the device while they train."""

# --- losses: `criterion(output, y)`; those of numbers want Y as numbers ----------------------------------

LOSSES = {
    "module": ("classes", "criterion = nn.CrossEntropyLoss()"),
    "functional": ("classes", "criterion = F.cross_entropy"),
    "custom": (
        "classes",
        "def criterion(output, y):\n    return -(F.log_softmax(output, 1).gather(1, y[:, None])).mean() + 1e-3 * output.pow(2).mean()",
    ),
    "weighted": ("classes", "criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.5]).to(device))"),
    "smoothing": ("classes", "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)"),
    "summed": ("classes", "def criterion(output, y):\n    return F.cross_entropy(output, y, reduction='sum') / 8"),
    "by_sample": ("classes", "def criterion(output, y):\n    return F.cross_entropy(output, y, reduction='none').sort()[0][1:].mean()"),
    "learned": (
        "classes",
        """
class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.heat = nn.Parameter(torch.ones(()))
    def forward(self, output, y):
        return F.cross_entropy(output * self.heat, y)
criterion = Warm().to(device)
MODULES.append(criterion)
""",
    ),
    "mse": ("numbers", "criterion = nn.MSELoss()"),
    "huber": ("numbers", "criterion = nn.SmoothL1Loss(beta=0.5)"),
    "l1": ("numbers", "criterion = F.l1_loss"),
}  # fmt: skip

# --- optimizers: `optimizer`, one or several in `OPTIMIZERS` --------------------------------------------

OPTIMIZERS = {
    "sgd": "optimizer = torch.optim.SGD(PARAMETERS, lr=0.05)",
    "momentum": "optimizer = torch.optim.SGD(PARAMETERS, lr=0.02, momentum=0.9, weight_decay=1e-4)",
    "nesterov": "optimizer = torch.optim.SGD(PARAMETERS, lr=0.02, momentum=0.9, nesterov=True)",
    "adam": "optimizer = torch.optim.Adam(PARAMETERS, lr=3e-3)",
    "adamw": "optimizer = torch.optim.AdamW(PARAMETERS, lr=3e-3, weight_decay=0.05)",
    "amsgrad": "optimizer = torch.optim.Adam(PARAMETERS, lr=3e-3, amsgrad=True, eps=1e-4)",
    "rmsprop": "optimizer = torch.optim.RMSprop(PARAMETERS, lr=1e-3, eps=1e-4)",
    "adagrad": "optimizer = torch.optim.Adagrad(PARAMETERS, lr=0.02)",
    "nadam": "optimizer = torch.optim.NAdam(PARAMETERS, lr=2e-3)",
    "radam": "optimizer = torch.optim.RAdam(PARAMETERS, lr=2e-3)",
    "adamax": "optimizer = torch.optim.Adamax(PARAMETERS, lr=2e-3)",
    "adadelta": "optimizer = torch.optim.Adadelta(PARAMETERS, lr=0.5)",
    "foreach": "optimizer = torch.optim.AdamW(PARAMETERS, lr=3e-3, foreach=True)",
    "fused": "optimizer = torch.optim.AdamW(PARAMETERS, lr=3e-3, fused=True)",
    "groups": """
optimizer = torch.optim.AdamW([
    {"params": [p for p in PARAMETERS if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in PARAMETERS if p.ndim <= 1], "weight_decay": 0.0, "lr": 1e-2, "name": "flat"},
], lr=3e-3)
""",
    "two": """
optimizer = torch.optim.SGD(PARAMETERS[::2], lr=0.02, momentum=0.9)
OPTIMIZERS = [optimizer, torch.optim.Adam(PARAMETERS[1::2], lr=3e-3)]
""",
    "own_counter": """
class Counted(torch.optim.Adam):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.made = 0
        for group in self.param_groups:
            group["counted"] = 0
    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            group["counted"] += 1
            group["lr"] = 3e-3 / (1 + group["counted"] / 50)
        return super().step(closure)
optimizer = Counted(PARAMETERS, lr=3e-3)
PROBES["made"] = lambda: optimizer.made
""",
    "own_signs": """
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + 0.1 * p.grad
                    p.add_(torch.tanh(state["mean"] * 30), alpha=-group["lr"])
optimizer = Signs(PARAMETERS, lr=3e-3)
""",
    "step_hooks": """
optimizer = torch.optim.Adam(PARAMETERS, lr=3e-3)
HOOKED = [0]
def count_step(*_):
    HOOKED[0] += 1
optimizer.register_step_pre_hook(count_step)
optimizer.register_step_post_hook(count_step)
PROBES["hooked"] = lambda: HOOKED[0]
""",
    "lr_tensor": "optimizer = torch.optim.Adam(PARAMETERS, lr=torch.tensor(3e-3), foreach=False)",
    "closure": "optimizer = torch.optim.SGD(PARAMETERS, lr=0.02, momentum=0.9)",
    "lbfgs": "optimizer = torch.optim.LBFGS(PARAMETERS, lr=0.3, max_iter=3, history_size=4)",
    "by_hand": "optimizer = None\nOPTIMIZERS = []",
}
CLOSURES = ("closure", "lbfgs")
SPARSE_OPTIMIZERS = ("sgd", "adagrad")

SCHEDULES = {
    "none": {},
    "steps": {
        "before": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)",
        "epoch_end": "schedule.step()",
    },
    "one_cycle": {
        "before": "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=1000)",
        "after_step": "schedule.step()",
    },
    "plateau": {
        "before": "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        "epoch_end": "schedule.step(total / max(1, seen))",
    },
    "lambda": {
        "before": "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10))",
        "after_step": "schedule.step()",
    },
    "cosine": {
        "before": "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)",
        "epoch_end": "schedule.step()",
    },
    "by_hand": {"epoch_end": "for group in optimizer.param_groups:\n    group['lr'] *= 0.8"},
    "by_hand_steps": {"batch": "optimizer.param_groups[0]['lr'] = 0.01 / (1 + updates / 20)"},
}

CLIPS = {
    "none": "",
    "norm": "nn.utils.clip_grad_norm_(PARAMETERS, 0.5)",
    "value": "nn.utils.clip_grad_value_(PARAMETERS, 0.05)",
    "norm_printed": "norm = nn.utils.clip_grad_norm_(PARAMETERS, 1.0)\nif updates % 7 == 0:\n    print('norm', repr(norm.item()))",
    "by_hand": "for p in PARAMETERS:\n    if p.grad is not None:\n        p.grad.clamp_(-0.1, 0.1)",
}  # fmt: skip

ACCUMULATE = {"1": 1, "2": 2, "3": 3}

AMPS = {"none": "", "autocast": "bf16", "scaler": "scaled"}

REPORTS = {
    "item": {"after": "value = loss.item()\ntotal += value * len(x)\nseen += len(x)\nprint('loss', updates, repr(value))"},
    "kept": {
        "before": "kept_losses = []",
        "after": "kept_losses.append(loss.detach())\nseen += len(x)",
        "epoch_end": "total = torch.stack(kept_losses).sum().item()\nprint('losses', [repr(one.item()) for one in kept_losses])\nkept_losses.clear()",
    },
    "running": {
        "epoch_start": "running = torch.zeros((), device=device)",
        "after": "running += loss.detach() * len(x)\nseen += len(x)",
        "epoch_end": "total = running.item()\nprint('mean', repr(total / max(1, seen)))",
    },
    "accuracy": {
        "epoch_start": "right = 0",
        "after": "total += loss.item() * len(x)\nseen += len(x)\nright += (output.argmax(1) == (y if y.ndim == 1 else y.argmax(1))).sum().item()",
        "epoch_end": "print('epoch', epoch, repr(total / max(1, seen)), right, seen)",
    },
}  # fmt: skip

EVALUATIONS = {
    "none": {},
    "no_grad": {"epoch_end": "evaluate(torch.no_grad())"},
    "inference": {"epoch_end": "evaluate(torch.inference_mode())"},
    "with_grad": {"epoch_end": "evaluate(contextlib.nullcontext())"},
    "in_mid_epoch": {"after": "if number == 2:\n    evaluate(torch.no_grad())"},
    "in_training_mode": {"epoch_end": "evaluate(torch.no_grad(), training=True)"},
    "new_loader": {"epoch_end": "test_loader = DataLoader(test_set, batch_size=16)\nevaluate(torch.no_grad())"},
    "on_training_data": {"epoch_end": "evaluate(torch.no_grad(), loader)"},
    "before_training": {"before_loop": "evaluate(torch.no_grad())", "epoch_end": "evaluate(torch.no_grad())"},
}

CHECKPOINTS = {
    "none": {},
    "saved": {"epoch_end": "torch.save(state(), f'checkpoint-{epoch}.pt')"},
    "loaded": {"epoch_end": "if epoch == 1:\n    torch.save(state(), 'checkpoint.pt')\nif epoch == 3:\n    load(torch.load('checkpoint.pt', weights_only=True))"},
    "best_restored": {
        "before": "best, best_state = float('inf'), None",
        "epoch_end": "if total < best:\n    best, best_state = total, copy.deepcopy(state())",
        "end": "load(best_state)",
    },
    "reloaded_each_epoch": {"epoch_end": "load(copy.deepcopy(state()))"},
    "weights_loaded": {
        "before": "first = [copy.deepcopy(one.state_dict()) for one in MODULES]",
        "epoch_end": "if epoch == 2:\n    for one, weights in zip(MODULES, first):\n        one.load_state_dict(weights)",
    },
    "optimizer_anew": {"epoch_end": "if epoch == 1 and len(OPTIMIZERS) == 1:\n    kept = optimizer.state_dict()\n    optimizer = type(optimizer)(PARAMETERS, lr=1e-3)\n    optimizer.load_state_dict(kept)\n    OPTIMIZERS = [optimizer]"},
}  # fmt: skip

# --- odd habits: any number of them ----------------------------------------------------------------------

HABITS: dict[str, dict[str, str]] = {
    "zero_not_none": {"zero": "optimizer.zero_grad(set_to_none=False)"},
    "zero_by_module": {"zero": "for one in MODULES:\n    one.zero_grad()"},
    "zero_by_hand": {"zero": "for p in PARAMETERS:\n    p.grad = None"},
    "retain_graph": {"backward": "retain_graph=True"},
    "reads_gradients": {"after_backward": "if updates % 5 == 0:\n    print('grad', repr(sum(p.grad.double().abs().sum().item() for p in PARAMETERS if p.grad is not None)))"},
    "keeps_gradients": {
        "before": "kept_gradients = []",
        "after_backward": "kept_gradients.append(next((p.grad for p in PARAMETERS if p.grad is not None), None))",
        "end": "print('kept', [repr(g.sum().item()) for g in kept_gradients[-3:] if g is not None and not g.is_sparse])",
    },
    "prints_weights": {"epoch_end": "print('weights', *(repr(p.detach().norm().item()) for p in PARAMETERS))"},
    "draws_torch": {"batch": "print('drawn', torch.rand(2).tolist())"},
    "draws_numpy": {"batch": "print('drawn', np.random.rand(2).tolist())"},
    "draws_python": {"batch": "print('drawn', random.random())"},
    "draws_between": {"epoch_end": "print('drawn', torch.randn(1).item(), np.random.randint(1000), random.randint(0, 9))"},
    "mixes_batch": {"batch": "mixed = torch.randperm(len(x))\nx = 0.9 * x + 0.1 * x[mixed] if x.is_floating_point() else x"},
    "writes_batch": {"batch": "if x.is_floating_point() and not x.requires_grad:\n    x.mul_(0.9)\nelif not x.is_floating_point():\n    x.clamp_(max=15)"},
    "keeps_batches": {
        "before": "kept_batches = []",
        "batch": "kept_batches.append((x, y))",
        "epoch_end": "print('batches', [round(x.double().sum().item(), 9) for x, _ in kept_batches[-4:]])",
    },
    "replays_batches": {
        "before": "buffer = []",
        "batch": "buffer.append((x, y))\nif updates % 3 == 2 and len(buffer) > 2:\n    x, y = buffer[random.randrange(len(buffer))]",
    },
    "toggles_mode": {"batch": "if number % 4 == 3:\n    mode(False)\n    mode(True)"},
    "trains_in_eval": {"epoch_start": "mode(epoch % 2 == 0)"},
    "freezes_later": {"epoch_start": "if epoch == 2:\n    PARAMETERS[0].requires_grad_(False)\nif epoch == 4:\n    PARAMETERS[0].requires_grad_(True)"},
    "average": {
        "before": "averages = [copy.deepcopy(one) for one in MODULES]",
        "after_step": "with torch.no_grad():\n    for mean, one in zip(averages, MODULES):\n        for a, b in zip(mean.parameters(), one.parameters()):\n            a.mul_(0.9).add_(b, alpha=0.1)",
        "end": "PROBES['average'] = lambda: [one.state_dict() for one in averages]",
    },
    "deepcopies_model": {"epoch_end": "twins = [copy.deepcopy(one) for one in MODULES]\nPROBES['twins'] = lambda: [one.state_dict() for one in twins]"},
    "loader_anew": {"epoch_start": "loader = make_loader()"},
    "batch_grows": {"epoch_start": "if epoch == 2:\n    BATCH = 12\n    loader = make_loader()"},
    "catches_errors": {"before_forward": "if number == 3:\n    raise ValueError('a bad batch')", "guard": "ValueError"},
    "catches_in_forward": {"before_forward": "if number == 1:\n    try:\n        net(x[:, :2])\n    except Exception as error:\n        print('caught', type(error).__name__)"},
    "skips_batches": {"before_forward": "if number % 5 == 4:\n    continue"},
    "breaks_epoch": {"after": "if epoch == 1 and number == 3:\n    break"},
    "stops_early": {"epoch_end": "if epoch >= 3 and total / max(1, seen) < 10:\n    print('stopped')\n    break"},
    "compiles": {"before": "net = torch.compile(net, backend='eager')"},
    "peeks": {"before_loop": "print('peek', repr(next(iter(loader))[0].double().sum().item()) if not isinstance(next(iter(loader)), dict) else '')"},
    "loops_over_data_inside": {"after": "if epoch == 1 and number == 2:\n    print('rows', sum(1 for _ in loader))"},
    "decays_by_hand": {"after_step": "with torch.no_grad():\n    for p in PARAMETERS:\n        p.mul_(0.999)"},
    "clamps_weights": {"after_step": "for p in PARAMETERS:\n    p.data.clamp_(-1, 1)"},
    "replaces_data": {"epoch_start": "if epoch == 2:\n    for p in PARAMETERS:\n        p.data = p.data.clone()"},
    "hooks_forward": {
        "before": "NORMS = []\nMODULES[0].register_forward_hook(lambda module, args, output: NORMS.append(1))",
        "end": "print('hooked', len(NORMS))",
    },
    "hooks_backward": {"before": "PARAMETERS[-1].register_hook(lambda gradient: gradient * 0.5)"},
    "hooks_accumulated": {
        "before": "ACCUMULATED = [0]\ndef accumulated(p):\n    ACCUMULATED[0] += 1\nPARAMETERS[-1].register_post_accumulate_grad_hook(accumulated)",
        "end": "print('accumulated', ACCUMULATED[0])",
    },
    "global_hook": {
        "before": "CALLED = [0]\ndef called(module, args):\n    CALLED[0] += 1\nnn.modules.module.register_module_forward_pre_hook(called)",
        "end": "print('called', CALLED[0])",
    },
    "gradient_noise": {"after_backward": "for p in PARAMETERS:\n    if p.grad is not None and not p.grad.is_sparse:\n        p.grad.add_(1e-3 * torch.randn_like(p.grad))"},
    "penalty": {"loss": "loss = loss + 1e-3 * sum(p.pow(2).sum() for p in PARAMETERS)"},
    "second_forward": {"loss": "loss = loss + 0.1 * criterion(pick(net(x)), y)"},
    "forward_without_grad": {"batch": "with torch.no_grad():\n    pick(net(x))"},
    "chunks": {"loss": "half = len(x) // 2\nif half:\n    loss = loss + 0.1 * criterion(pick(net(x[:half].clone())), y[:half])"},
    "group_added": {
        "before": "extra = nn.Parameter(torch.zeros(4, device=device, dtype=PARAMETERS[0].dtype))\nMODULES.append(nn.ParameterList([extra]))",
        "epoch_start": "if epoch == 2:\n    optimizer.add_param_group({'params': [extra]})",
        "loss": "loss = loss + (extra - 1).pow(2).mean()",
    },
    "layer_replaced": {"epoch_start": "if epoch == 2 and isinstance(net, nn.Sequential) and isinstance(net[-1], nn.Linear):\n    new = nn.Linear(net[-1].in_features, 4).to(device, PARAMETERS[0].dtype)\n    net[-1] = new\n    optimizer.add_param_group({'params': list(new.parameters())})"},
    "dropout_changes": {"epoch_start": "for one in MODULES:\n    for layer in one.modules():\n        if isinstance(layer, nn.Dropout):\n            layer.p = 0.1 * epoch"},
    "smoothing_changes": {"epoch_start": "if epoch == 2 and isinstance(criterion, nn.CrossEntropyLoss):\n    criterion.label_smoothing = 0.2"},
    "knob_turned": {"batch": "if 'KNOB' in dir() and updates == 13:\n    KNOB['scale'] = 0.6"},
    "writes_files": {"epoch_end": "with open('log.txt', 'a') as file:\n    print(epoch, repr(total), file=file)"},
    "prints_stderr": {"epoch_end": "print('epoch', epoch, file=sys.stderr)"},
    "warns": {"after_step": "if updates == 9:\n    warnings.warn('the weights are odd')"},
    "collects_garbage": {"epoch_end": "gc.collect()"},
    "exits": {"end_of_all": "sys.exit(3)"},
    "raises_at_end": {"end_of_all": "raise RuntimeError('the end')"},
    "anomaly": {"before": "torch.autograd.set_detect_anomaly(True)"},
    "reads_state": {"epoch_end": "print('state', [sorted(one.state_dict()['state'].get(0, {})) for one in OPTIMIZERS], [sorted(g) for one in OPTIMIZERS for g in one.param_groups])"},
    "asks_length": {"epoch_start": "print('batches', len(loader))"},
    "enumerates_by_hand": {"iterate": "by hand"},
    "islice": {"iterate": "islice"},
    "zips": {"iterate": "zip"},
    "endless": {"iterate": "endless"},
    "backward_inputs": {"backward": "inputs=[p for p in PARAMETERS if p.requires_grad]"},
    "grad_by_autograd": {"backward": "by autograd.grad"},
    "skips_updates": {"step_if": "loss.item() < 50"},
    "two_steps": {"after_step": "if updates % 9 == 8 and not SPARSE:\n    optimizer.step()"},
    "changes_hyper": {"epoch_start": "if epoch == 2:\n    for group in optimizer.param_groups:\n        if 'betas' in group:\n            group['betas'] = (0.8, 0.99)\n        if 'momentum' in group:\n            group['momentum'] = 0.7\n        if 'weight_decay' in group:\n            group['weight_decay'] = 0.01"},
    "keeps_outputs": {
        "before": "kept_outputs = []",
        "after": "kept_outputs.append(output.detach())",
        "epoch_end": "print('outputs', [repr(one.double().sum().item()) for one in kept_outputs[-3:]])",
    },
    "pains": {"after": "if 'PAINS' in dir():\n    PAINS.mul_(0.95).add_(0.01 * number)"},
    "chdir": {"before": "os.makedirs('elsewhere', exist_ok=True)\nos.chdir('elsewhere')"},
    "seeds_each_epoch": {"epoch_start": "torch.manual_seed(epoch)"},
    "grad_disabled_outside": {"epoch_start": "torch.set_grad_enabled(True)"},
    "state_edited": {"epoch_start": "if epoch == 2:\n    for one in OPTIMIZERS:\n        for kept in one.state.values():\n            for key, value in kept.items():\n                if torch.is_tensor(value) and value.ndim:\n                    value.mul_(0.5)"},
    "default_dtype_kept": {"end": "print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())"},
    "input_gradient": {
        "batch": "x = x.clone().requires_grad_() if x.is_floating_point() else x",
        "loss": "if x.requires_grad:\n    loss = loss + 0.01 * torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).sum()",
    },
    "second_loader": {
        "before": "others = DataLoader(TensorDataset(X[:20].clone()), batch_size=4, shuffle=True)",
        "epoch_start": "stream = itertools.cycle(others)",
        "loss": "loss = loss + 0.01 * pick(net(next(stream)[0].to(device))).pow(2).mean()",
    },
    "averaged_model": {
        "before": "swa = torch.optim.swa_utils.AveragedModel(MODULES[0])",
        "epoch_end": "swa.update_parameters(MODULES[0])",
        "end": "PROBES['swa'] = lambda: swa.state_dict()",
    },
    "functional_call": {"loss": "if isinstance(net, nn.Module):\n    weights = {name: p * 1.01 for name, p in net.named_parameters()}\n    loss = loss + 0.1 * criterion(pick(torch.func.functional_call(net, weights, (x,))), y)"},
    "checkpoints_forward": {"loss": "loss = loss + 0.1 * criterion(pick(torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)), y)"},
    "reads_attributes": {"epoch_end": "torchs = {'_need_device_dtype_check_for_fused'}  # which torch itself sets in a fused step\nprint([sorted(vars(one)) for one in MODULES], [sorted(vars(one).keys() - torchs) for one in OPTIMIZERS], sorted(vars(loader)))"},
    "reads_batch": {"batch": "print(type(batch).__name__, type(x).__name__, x.dtype, x.stride(), x.storage_offset(), x.is_leaf, x._version, x.untyped_storage().nbytes(), y.dtype, y.stride())"},
    "pickles_model": {"epoch_end": "if type(net) is nn.Sequential and not net._forward_hooks:\n    twin = pickle.loads(pickle.dumps(net))\n    print('pickled', sorted(twin.state_dict()), repr(next(twin.parameters()).sum().item()))"},
    "hook_removed": {
        "before": "handle = MODULES[-1].register_forward_hook(lambda module, args, output: None)",
        "epoch_start": "if epoch == 2:\n    handle.remove()",
    },
    "inference_inside": {"batch": "with torch.inference_mode():\n    teacher = pick(net(x))", "loss": "loss = loss + 0.01 * (output - teacher.clone()).pow(2).mean()"},
    "detached_target": {"loss": "loss = loss + 0.01 * (output - output.detach().roll(1, 0)).pow(2).mean()"},
    "per_sample": {"after_backward": "if updates == 8:\n    for p in PARAMETERS:\n        if p.grad is not None and not p.grad.is_sparse:\n            p.grad = p.grad.clone() * 0.5"},
    "optimizer_twice": {"epoch_start": "if epoch == 3 and len(OPTIMIZERS) == 1 and type(optimizer) is torch.optim.Adam:\n    optimizer = torch.optim.SGD(PARAMETERS, lr=0.01)\n    OPTIMIZERS = [optimizer]"},
    "iterates_twice": {"after": "if epoch == 1 and number == 1:\n    print('two', sum(len(y) for _, y in [unpack(one) for one in itertools.islice(loader, 2)]))"},
    "closure_lr": {"epoch_start": "if optimizer is not None and epoch == 1:\n    for group in optimizer.param_groups:\n        group['lr'] = float(group['lr']) * 0.5"},
}  # fmt: skip

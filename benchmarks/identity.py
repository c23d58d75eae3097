"""Whether a training is ever taken for another one: each thing that decides a training is changed alone.

    python -m benchmarks.identity [--only WORDS] [--json FILE]

Each value runs in processes of its own. For each variation the first value is trained and kept (`fit(reuse=True)`),
trained again, which may be loaded, and then the second value is trained. `wrong` is a second value that was handed
the weights of the first although training gives others. `resume` says whether the second value may go on with the run
of the first. Exit code 1 where a reuse is wrong, or a resume takes in a change that it should refuse.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from hotlap import Job, StoreError, fit

Changes = dict[str, Any]
VARIATIONS: dict[str, Callable[[float, Path], Changes]] = {}
"""What is changed → what it makes of a job, for the value 1.0 or 3.0, with a folder of its own."""
RESTORED = {
    "epochs", "first weights", "state that the optimizer brings", "random.Random held by the model",
    "torch.Generator held by the model", "counter held by the optimizer",
}  # fmt: skip
"""What a resume may go on with: how long, and what the checkpoint puts back."""
UNSEEN = {
    "numpy generator held by the dataset", "parsed arguments held by the model", "file that the dataset reads",
    "folder that the dataset reads", "file named in the code", "autocast around the training",
    "function of torch.nn.functional that was replaced", "environment variable by a computed name",
    "text that is evaluated", "module imported in the forward pass", "iterator held by the model",
    "default dtype of torch",
}  # fmt: skip
"""What a resume does not look at: it is for the user to know that files, arguments and the process are the same."""


def variation(name: str) -> Callable[[Callable[[float, Path], Changes]], Callable[[float, Path], Changes]]:
    """Add a variation under its name."""

    def added(make: Callable[[float, Path], Changes]) -> Callable[[float, Path], Changes]:
        VARIATIONS[name] = make
        return make

    return added


# --- the training ---------------------------------------------------------------------------------


def data(rows: int = 24) -> tuple[Tensor, Tensor]:
    """Points and their classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 4, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def network(*more: nn.Module) -> nn.Sequential:
    """A small network, whose weights are the same every time; `more` comes before its last layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *more, nn.Linear(6, 3))


class Rows(Dataset[Any]):
    """Points one by one, scaled by what a subclass says."""

    def __init__(self) -> None:
        self.x, self.y = data()

    def scale(self) -> float:
        """By how much."""
        return 1.0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * self.scale(), self.y[index]


class Scaling(nn.Module):
    """A layer that scales by what a subclass says."""

    def scale(self) -> float:
        """By how much."""
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return x * self.scale()


def job(changes: Changes) -> Job:
    """The training with some changes."""
    changes = {key: part for key, part in changes.items() if not key.startswith("_")}
    model = changes.pop("model", None) or network()
    optimizer = changes.pop("optimizer", None) or SGD(model.parameters(), lr=0.2)
    base: Changes = {"data": data(), "loss": nn.CrossEntropyLoss(), "batch_size": 6, "epochs": 2, "device": "cpu"}
    if isinstance(changes.get("data"), DataLoader):
        del base["batch_size"]
    return Job(**{**base, "model": model, "optimizer": optimizer, **changes})


# --- settings -------------------------------------------------------------------------------------

for _field, _values in {
    "batch_size": (6, 4),
    "epochs": (2, 3),
    "seed": (0, 1),
    "clip": (0.1, 0.3),
    "accumulate": (1, 2),
    "order": ("shuffled", "as given"),
    "drop_last": (False, True),
}.items():
    VARIATIONS[_field] = lambda k, _, field=_field, values=_values: {  # type: ignore[misc]
        field: values[k != 1.0],
        **({"batch_size": 5} if field == "drop_last" else {}),
    }


@variation("learning rate")
def _(k: float, _: Path) -> Changes:
    model = network()
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.1 * k)}


@variation("weight decay of one group")
def _(k: float, _: Path) -> Changes:
    model = network()
    first, *rest = model.parameters()
    return {"model": model, "optimizer": SGD([{"params": [first], "weight_decay": 0.1 * k}, {"params": rest}], lr=0.2)}


@variation("parameters that the optimizer has")
def _(k: float, _: Path) -> Changes:
    model = network()
    first, *rest = model.parameters()
    return {"model": model, "optimizer": SGD([first, *rest] if k == 1.0 else rest, lr=0.2)}


@variation("label smoothing")
def _(k: float, _: Path) -> Changes:
    return {"loss": nn.CrossEntropyLoss(label_smoothing=0.1 * k)}


@variation("class weights of the loss")
def _(k: float, _: Path) -> Changes:
    return {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, k, 1.0]))}


@variation("schedule")
def _(k: float, _: Path) -> Changes:
    return {"schedule": lambda optimizer: StepLR(optimizer, 2, gamma=0.3 * k)}


@variation("function in a schedule")
def _(k: float, _: Path) -> Changes:
    return {"schedule": lambda optimizer: LambdaLR(optimizer, lambda step: k / (1 + step))}


@variation("validation data that chooses the best weights")
def _(k: float, _: Path) -> Changes:
    x, y = data(12)
    return {"valid": (x * (-1) ** int(k > 1), y), "patience": 9, "epochs": 4}


@variation("metric that chooses the best weights")
def _(k: float, _: Path) -> Changes:
    def metric(output: Tensor, target: Tensor) -> Tensor:
        return output[:, 0] * (2.0 - k)

    return {"valid": data(12), "metrics": {"m": metric}, "monitor": "m", "better": "lower", "patience": 9, "epochs": 4}


# --- data -----------------------------------------------------------------------------------------


@variation("one label")
def _(k: float, _: Path) -> Changes:
    x, y = data()
    y[-1] = (y[-1] + int(k)) % 3
    return {"data": (x, y)}


@variation("one number in the last row")
def _(k: float, _: Path) -> Changes:
    x, y = data()
    x[-1, -1] = k
    return {"data": (x, y)}


FACTOR = 1.0


class ByGlobal(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * FACTOR, self.y[index]


@variation("global read by the dataset")
def _(k: float, _: Path) -> Changes:
    globals()["FACTOR"] = k
    return {"data": ByGlobal()}


class ByClass(Rows):
    factor = 1.0

    def scale(self) -> float:
        return self.factor


@variation("class attribute read by the dataset")
def _(k: float, _: Path) -> Changes:
    ByClass.factor = k
    return {"data": ByClass()}


class ByAttribute(Rows):
    def __init__(self, k: Any) -> None:
        super().__init__()
        self.k = k

    def scale(self) -> float:
        return float(self.k)


@variation("attribute of the dataset")
def _(k: float, _: Path) -> Changes:
    return {"data": ByAttribute(k)}


@variation("attribute of a dataset within a Subset")
def _(k: float, _: Path) -> Changes:
    return {"data": Subset(ByAttribute(k), range(20))}


@variation("indices of a Subset")
def _(k: float, _: Path) -> Changes:
    return {"data": Subset(Rows(), [*range(19), 19 + int(k)])}


class BySet(Rows):
    def __init__(self, chosen: set[int]) -> None:
        super().__init__()
        self.chosen = chosen

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * (2.0 if index in self.chosen else 1.0), self.y[index]


@variation("set held by the dataset")
def _(k: float, _: Path) -> Changes:
    return {"data": BySet({1, 2, int(5 * k)})}


class ByWords(Rows):
    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.words = words

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], len(self.words[index])


@variation("array of words held by the dataset")
def _(k: float, _: Path) -> Changes:
    return {"data": ByWords(np.array(["ab" if n % int(k + 1) else "" for n in range(24)], dtype=object))}


class ByTransform(Rows):
    def __init__(self, transforms: list[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.transforms = transforms

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return functools.reduce(lambda x, f: f(x), self.transforms, self.x[index]), self.y[index]


@variation("closure in a list of transforms")
def _(k: float, _: Path) -> Changes:
    return {"data": ByTransform([torch.tanh, lambda x: x * k])}


class ByGenerator(Rows):
    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng = rng

    def scale(self) -> float:
        return float(self.rng.random())


@variation("numpy generator held by the dataset")
def _(k: float, _: Path) -> Changes:
    return {"data": ByGenerator(np.random.default_rng(int(k)))}


class ByFile(Rows):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = str(file)

    def scale(self) -> float:
        return float(Path(self.file).read_text())


def written(place: Path, k: float) -> Path:
    """A file that holds a number; the same number again leaves it as it is."""
    if not place.exists() or place.read_text() != str(k):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(str(k))
    return place


@variation("file that the dataset reads")
def _(k: float, folder: Path) -> Changes:
    return {"data": ByFile(written(folder / "scale.txt", k))}


class ByFolder(Rows):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def scale(self) -> float:
        return float((self.folder / "deep" / "scale.txt").read_text())


@variation("folder that the dataset reads")
def _(k: float, folder: Path) -> Changes:
    written(folder / "deep" / "scale.txt", k)
    return {"data": ByFolder(folder)}


class ByVariable(Rows):
    def scale(self) -> float:
        return float(os.environ.get("IDENTITY_SCALE", "1"))


@variation("environment variable read by the dataset")
def _(k: float, _: Path) -> Changes:
    os.environ["IDENTITY_SCALE"] = str(k)
    return {"data": ByVariable()}


@variation("weights of a WeightedRandomSampler")
def _(k: float, _: Path) -> Changes:
    weights = [1.0] * 12 + [k * k] * 12
    sampler = WeightedRandomSampler(weights, 24)
    return {"data": DataLoader(TensorDataset(*data()), batch_size=6, sampler=sampler)}


class Starting:
    """Indices from a place on."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return iter([(self.start + n) % 24 for n in range(18)])

    def __len__(self) -> int:
        return 18


@variation("attribute of a sampler")
def _(k: float, _: Path) -> Changes:
    return {"order": Starting(int(k))}


@variation("attribute of a sampler within a batch sampler")
def _(k: float, _: Path) -> Changes:
    batches: Any = BatchSampler(Starting(int(k)), 6, drop_last=False)  # type: ignore[arg-type]
    return {"data": DataLoader(TensorDataset(*data()), batch_sampler=batches)}


@variation("closure of collate")
def _(k: float, _: Path) -> Changes:
    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in rows]) * k, torch.stack([y for _, y in rows])

    return {"data": DataLoader(Rows(), batch_size=6, collate_fn=collate)}


@variation("default of prepare")
def _(k: float, _: Path) -> Changes:
    def prepare(batch: Any, *, by: float = k) -> Any:
        return batch[0] * by, batch[1]

    return {"prepare": prepare}


# --- the model ------------------------------------------------------------------------------------


@variation("frozen layer")
def _(k: float, _: Path) -> Changes:
    model = network()
    model[0].requires_grad_(k == 1.0)
    return {"model": model, "optimizer": SGD(model.parameters(), lr=0.2)}


@variation("layer in evaluation mode")
def _(k: float, _: Path) -> Changes:
    model = network(nn.Dropout(0.5))
    model[2].train(k == 1.0)
    return {"model": model}


@variation("dropout rate")
def _(k: float, _: Path) -> Changes:
    return {"model": network(nn.Dropout(0.2 * k))}


@variation("first weights")
def _(k: float, _: Path) -> Changes:
    model = network()
    nn.init.constant_(model[0].bias, k)
    return {"model": model}


class Holding(Scaling):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def scale(self) -> float:
        held = self.held
        return held[-1]() if isinstance(held, list) else held() if callable(held) else held


def thrice(k: float) -> float:
    """As it is."""
    return k


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self) -> float:
        return self.k


for _name, _hold in {
    "number held by a layer": lambda k: k,
    "lambda held by a layer": lambda k: (lambda: 1.0) if k == 1.0 else (lambda: 3.0),
    "closure held by a layer": lambda k: lambda: k,
    "partial held by a layer": lambda k: functools.partial(thrice, k),
    "list of functions held by a layer": lambda k: [torch.relu, lambda: k],
    "object with slots held by a layer": Slotted,
    "method of an object held by a layer": lambda k: Slotted(k).__call__,
    "plain tensor held by a layer": lambda k: torch.tensor(k),
    "array held by a layer": lambda k: np.float64(k),
}.items():
    VARIATIONS[_name] = lambda k, _, hold=_hold: {"model": network(Holding(hold(k)))}  # type: ignore[misc]


class Drawing(Scaling):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def scale(self) -> float:
        if isinstance(self.rng, torch.Generator):
            return float(torch.rand((), generator=self.rng))
        return float(self.rng.random() if hasattr(self.rng, "random") else next(self.rng))


@variation("random.Random held by the model")
def _(k: float, _: Path) -> Changes:
    return {"model": network(Drawing(random.Random(int(k))))}


@variation("torch.Generator held by the model")
def _(k: float, _: Path) -> Changes:
    return {"model": network(Drawing(torch.Generator().manual_seed(int(k))))}


@variation("iterator held by the model")
def _(k: float, _: Path) -> Changes:
    return {"model": network(Drawing(k / n for n in range(1, 1000)))}


@variation("forward hook")
def _(k: float, _: Path) -> Changes:
    model = network()
    model[1].register_forward_hook(lambda module, given, output: output * k)
    return {"model": model}


@variation("forward hook that is there or not")
def _(k: float, _: Path) -> Changes:
    model = network()
    if k > 1:
        model[1].register_forward_hook(lambda module, given, output: output * 2)
    return {"model": model}


@variation("hook on a gradient")
def _(k: float, _: Path) -> Changes:
    model = network()
    model[0].weight.register_hook(lambda grad: grad * k)
    return {"model": model}


@variation("forward replaced on the instance")
def _(k: float, _: Path) -> Changes:
    model = network()
    model[1].forward = lambda x: torch.tanh(x) * k
    return {"model": model}


@variation("forward replaced in a class of torch")
def _(k: float, _: Path) -> Changes:
    model = network(nn.Hardtanh())
    nn.Hardtanh.forward = lambda self, x: x * k  # type: ignore[method-assign]
    return {"model": model}


@variation("function of torch.nn.functional that was replaced")
def _(k: float, _: Path) -> Changes:
    def softsign(x: Tensor) -> Tensor:
        return x * k

    nn.functional.softsign = softsign
    return {"model": network(nn.Softsign())}


class ByVariableLayer(Scaling):
    def scale(self) -> float:
        return float(os.environ["IDENTITY_SCALE"])


@variation("environment variable read by a layer")
def _(k: float, _: Path) -> Changes:
    os.environ["IDENTITY_SCALE"] = str(k)
    return {"model": network(ByVariableLayer())}


class ByComputedName(Scaling):
    def scale(self) -> float:
        return float(os.environ["_".join(("IDENTITY", "SCALE"))])


@variation("environment variable by a computed name")
def _(k: float, _: Path) -> Changes:
    os.environ["IDENTITY_SCALE"] = str(k)
    return {"model": network(ByComputedName())}


class ByText(Scaling):
    def scale(self) -> float:
        return float(eval("FAC" + "TOR"))


@variation("text that is evaluated")
def _(k: float, _: Path) -> Changes:
    globals()["FACTOR"] = k
    return {"model": network(ByText())}


CONFIG = types.SimpleNamespace(train=types.SimpleNamespace(k=1.0))


class ByConfig(Scaling):
    def scale(self) -> float:
        return float(CONFIG.train.k)


@variation("nested settings read by a layer")
def _(k: float, _: Path) -> Changes:
    CONFIG.train.k = k
    return {"model": network(ByConfig())}


class ByArguments(Scaling):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args

    def scale(self) -> float:
        return float(self.args.k)


@variation("parsed arguments held by the model")
def _(k: float, _: Path) -> Changes:
    return {"model": network(ByArguments(argparse.Namespace(k=k)))}


def imported(folder: Path, name: str, text: str) -> types.ModuleType:
    """A module with this text, imported anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    return importlib.import_module(name)


@variation("function of another file")
def _(k: float, folder: Path) -> Changes:
    module = imported(folder, "identity_helper", f"def scaled(x):\n    return x * {k}\n")
    return {"prepare": lambda batch: (module.scaled(batch[0]), batch[1])}


class Importing(Scaling):
    def scale(self) -> float:
        import identity_settings  # type: ignore[import-not-found]

        return float(identity_settings.K)


@variation("module imported in the forward pass")
def _(k: float, folder: Path) -> Changes:
    imported(folder, "identity_settings", f"K = {k}\n")
    return {"model": network(Importing())}


class ByNamedFile(Scaling):
    def scale(self) -> float:
        return float(Path("identity_scale.txt").read_text())


@variation("file named in the code")
def _(k: float, folder: Path) -> Changes:
    written(folder / "identity_scale.txt", k)
    os.chdir(folder)
    return {"model": network(ByNamedFile())}


# --- the optimizer and the process ----------------------------------------------------------------


class Own(SGD):
    """Scales gradients by an attribute, a setting of its groups and a count of its own."""

    def __init__(self, parameters: Any, lr: float, k: float = 1.0, count: int = 0) -> None:
        super().__init__(parameters, lr=lr)
        self.k, self.count = k, count

    def step(self, closure: Any = None) -> Any:
        """A step."""
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.k * group.get("factor", 1.0) / (1 + self.count % 3))
        return super().step(closure)


@variation("attribute of the optimizer")
def _(k: float, _: Path) -> Changes:
    model = network()
    return {"model": model, "optimizer": Own(model.parameters(), 0.2, k)}


@variation("counter held by the optimizer")
def _(k: float, _: Path) -> Changes:
    model = network()
    return {"model": model, "optimizer": Own(model.parameters(), 0.2, count=int(k))}


@variation("setting of a group that torch does not know")
def _(k: float, _: Path) -> Changes:
    model = network()
    return {"model": model, "optimizer": Own([{"params": [*model.parameters()], "factor": k}], 0.2)}


@variation("hook of the optimizer")
def _(k: float, _: Path) -> Changes:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2)

    def before(one: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in one.param_groups[0]["params"]:
            parameter.grad.mul_(k)

    optimizer.register_step_pre_hook(before)
    return {"model": model, "optimizer": optimizer}


@variation("state that the optimizer brings")
def _(k: float, _: Path) -> Changes:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, 0.1 * k)
    return {"model": model, "optimizer": optimizer}


@variation("autocast around the training")
def _(k: float, _: Path) -> Changes:
    return {"_around": lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=k > 1)}


class Making(Scaling):
    def forward(self, x: Tensor) -> Tensor:
        return x + (torch.full((), 0.1).double() * 1e7 % 1).to(x.dtype)


@variation("default dtype of torch")
def _(k: float, _: Path) -> Changes:
    changes = {"model": network(Making()), "data": data()}
    torch.set_default_dtype(torch.float32 if k == 1.0 else torch.float64)
    return changes


# --- running them ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one variation."""

    name: str
    matters: bool
    """Whether training gives other weights for the second value."""
    again: str
    """What the first value got when it was trained again: `loaded` or why not."""
    reused: bool
    """Whether the second value was handed a model from the cache."""
    mistaken: bool
    """Whether that was another one than training gives."""
    resume: str
    """`refused`, `accepted` or `restored`, where the checkpoint puts back what differs."""

    @property
    def wrong(self) -> bool:
        """Whether a training was taken for another one."""
        refuses = self.name not in RESTORED | UNSEEN
        return self.mistaken or (self.matters and refuses and self.resume != "refused")


def weights_of(model: nn.Module) -> str:
    """A hash of all weights."""
    flat = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def apart(work: Callable[[], Any], place: Path) -> Any:
    """What `work` returns in a process of its own: a copy of this one, which has imported all that takes long."""
    answer = place / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer.write_text(json.dumps(work()))
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a training failed with status {status}")
    return json.loads(answer.read_text())


def trained(name: str, k: float, place: Path, **how: Any) -> dict[str, Any]:
    """Train one value; what came of it."""
    changes = VARIATIONS[name](k, place / "files")
    around = changes.pop("_around", None)
    said: list[str] = []
    from hotlap.fitting import progress

    progress.Voice.say = lambda self, line: said.append(line)  # type: ignore[method-assign]
    try:
        with around() if around is not None else torch.enable_grad():
            run = fit(job(changes), plan="off", progress=False, **how)
    except StoreError as error:
        return {"refused": str(error)}
    why = next((line.partition("since ")[2] for line in said if "reuse:" in line), "")
    return {"weights": weights_of(run.model), "loaded": "trained before" in run.stopped, "why": why}


def tried(name: str, place: Path) -> Row:
    """All trainings of one variation, each in its own process."""
    place.mkdir(parents=True)
    (place / "files").mkdir()

    def each(k: float, *hows: dict[str, Any]) -> list[dict[str, Any]]:
        """In a process of their own."""
        found: list[dict[str, Any]] = apart(lambda: [trained(name, k, place, **how) for how in hows], place)
        return found

    (first,) = each(1.0, {"reuse": True, "out": place / "first"})
    (again,) = each(1.0, {"reuse": True, "out": place / "again"})
    assert again["weights"] == first["weights"], f"{name}: the same training twice gives other weights"
    shutil.copytree(place / "first", place / "resumed")
    other, truth, resumed = each(
        3.0, {"reuse": True, "out": place / "other"}, {"out": place / "truth"}, {"resume": place / "resumed"}
    )
    resume = "refused" if "refused" in resumed else "restored" if name in RESTORED else "accepted"
    return Row(
        name=name,
        matters=truth["weights"] != first["weights"],
        again="loaded" if again["loaded"] else again["why"] or "trained again",
        reused=other["loaded"],
        mistaken=other["loaded"] and other["weights"] != truth["weights"],
        resume=resume,
    )


def warm_up(folder: Path) -> None:
    """Train once, so that what a process imports and finds out about its machine is there in every copy of it."""
    for how in ({"out": folder / "warm", "reuse": True}, {"resume": folder / "warm"}):
        fit(job({"data": Rows(), "seed": 99}), plan="off", progress=False, **how)  # type: ignore[arg-type]


def matrix(names: list[str]) -> Iterator[Row]:
    """The rows of these variations."""
    with tempfile.TemporaryDirectory(prefix="hotlap-identity-") as folder:
        os.environ["HOTLAP_CACHE"] = str(Path(folder, "cache"))
        warm_up(Path(folder))
        for number, name in enumerate(names):
            yield tried(name, Path(folder, str(number)))


def main() -> int:
    """Print the matrix."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="variations whose name holds these words")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'changed alone':52} {'matters':8} {'reuse':10} {'resume':9} the same training again")
    for row in matrix([name for name in VARIATIONS if options.only in name]):
        rows.append(row)
        reuse = "WRONG" if row.mistaken else "loaded" if row.reused else "trained"
        resume = row.resume.upper() if row.wrong and not row.mistaken else row.resume
        print(f"{row.name:52} {'yes' if row.matters else 'no':8} {reuse:10} {resume:9} {row.again}", flush=True)
    wrong = [row for row in rows if row.wrong]
    loaded = sum(row.again == "loaded" for row in rows)
    print(f"{len(rows)} variations, {sum(row.matters for row in rows)} of them change the weights: {len(wrong)} wrong")
    print(f"the same training again: {loaded} loaded, {len(rows) - loaded} trained anew with the reason")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

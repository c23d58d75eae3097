"""Trainings that can be said as a Job: a plain loop, and the same by `hotlap.fit` or a `hotlap.Rig`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.differential import parts
from benchmarks.differential.script import indented

DATA = {
    "tuple": "data = (X, Y)",
    "arrays": "data = (X.numpy(), Y.numpy())",
    "tensors": "data = TensorDataset(X, Y)",
    "own": parts.DATASETS["own"].replace("train_set", "data"),
    "own_arrays": parts.DATASETS["own_arrays"].replace("train_set", "data"),
    "list": "data = [(X[i], Y[i]) for i in range(N)]",
    "named": "data = {'x': X, 'y': Y}",
    "loader": "data = DataLoader(TensorDataset(X, Y), batch_size=BATCH, shuffle=SHUFFLED, drop_last=DROPS)",
    "loader_own": parts.DATASETS["own"].replace("train_set = Rows(X, Y)", "rows = Rows(X, Y)")
    + "data = DataLoader(\n    rows, batch_size=BATCH, shuffle=SHUFFLED, drop_last=DROPS,\n"
    "    collate_fn=lambda some: default_collate(some))",
}  # fmt: skip

OPTIMIZERS = [
    name for name in parts.OPTIMIZERS if name not in ("closure", "lbfgs", "by_hand", "two", "lr_tensor", "own_counter")
]
"""A schedule or counter of an optimizer that is handed over is its own; these are for one that `fit` steps."""

SCHEDULES = {
    "none": "None",
    "steps": "lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)",
    "one_cycle": "lambda o, updates: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=updates + 1)",
    "lambda": "lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1, (step + 1) / 10))",
}
PER_EPOCH = ("steps",)

LOSSES = ("module", "weighted", "smoothing", "mse", "huber", "learned", "functional", "custom")
FUNCTIONS = ("functional", "custom")
"""Losses that a Job takes as f(model, batch)."""

FIELDS: dict[str, tuple[str, ...]] = {
    "door": ("fit", "rig"),
    "samples": ("52", "64", "77"),
    "batch": ("8", "16"),
    "epochs": ("4", "5"),
    "inputs": tuple(parts.INPUTS),
    "data": tuple(DATA),
    "order": ("shuffled", "as given"),
    "last": ("kept", "dropped"),
    "loss": LOSSES,
    "optimizer": tuple(OPTIMIZERS),
    "given": ("made", "made by"),
    "schedule": tuple(SCHEDULES),
    "clip": ("None", "0.5"),
    "accumulate": ("1", "2", "3"),
    "valid": ("no", "yes"),
    "patience": ("None", "1"),
    "batches": ("as they are", "prepared", "augmented"),
}
PLAIN_SHARE = {"inputs": 0.4, "last": 0.7, "clip": 0.6, "accumulate": 0.7, "patience": 0.8, "batches": 0.7, "door": 0.6}
NO_MODELS = ("two_modules", "float64", "counter", "plain_tensor", "state_kept")
"""Models that are no single module, or whose own state a plain evaluation and `fit`'s would move differently."""
NORMED = ("norm", "cnn_norm", "cnn_norm_frozen", "buffer", "noise_python", "reads_back")
"""Models that look at a whole batch, or draw once for it: pieces of it are something else to them."""


@dataclass(frozen=True)
class JobSketch:
    """The parts of one training."""

    seed: int
    choices: Mapping[str, str]
    model: str
    long: bool = False
    switches: tuple[int, ...] = ()
    """Steps at which a Rig goes over to the plan, and back."""
    habits: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> str:
        return self.choices[name]

    def simpler(self) -> Iterator[JobSketch]:
        """This training with one part left out, in every way that there is."""
        for name, options in FIELDS.items():
            if name == "door" or self[name] == options[0]:
                continue
            model = next(iter(parts.MODELS["vectors"])) if name == "inputs" else self.model
            yield sensible(dataclasses.replace(self, choices={**self.choices, name: options[0]}, model=model))
        plainest = next(iter(parts.MODELS[self["inputs"]]))
        if self.model != plainest:
            yield dataclasses.replace(self, model=plainest)
        if self.switches:
            yield dataclasses.replace(self, switches=())

    @property
    def draws(self) -> bool:
        """Whether it draws from the device's generator while it trains."""
        return self.model in parts.DRAWING_MODELS or self["batches"] == "augmented"

    def __str__(self) -> str:
        own = [f"{name}={value}" for name, value in self.choices.items() if value != FIELDS[name][0]]
        return ", ".join([f"model={self.model}", *own, *(["switches"] if self.switches else [])])


def job_sketch(seed: int) -> JobSketch:
    """The training of a seed, always the same."""
    draw = random.Random(f"job {seed}")
    choices = {}
    for name, options in FIELDS.items():
        share = PLAIN_SHARE.get(name)
        plain = share is not None and draw.random() < share
        choices[name] = options[0] if plain else draw.choice(options)
    models = [name for name in parts.MODELS[choices["inputs"]] if name not in NO_MODELS]
    switches = (3, 11) if choices["door"] == "rig" and draw.random() < 0.5 else ()
    return sensible(JobSketch(seed, choices, draw.choice(models), draw.random() < 0.25, switches))


def sensible(one: JobSketch) -> JobSketch:
    """The training without the parts that cannot go together."""
    choices = dict(one.choices)
    if choices["patience"] != "None":
        choices["valid"] = "yes"
    if choices["door"] == "rig":
        choices["patience"] = "None"
    if choices["inputs"] == "tokens" and choices["batches"] == "augmented":
        choices["batches"] = "prepared"
    if choices["data"].startswith("loader"):
        choices["data"] = choices["data"] if choices["accumulate"] == "1" else "tensors"
    if choices["optimizer"] in ("adagrad", "adadelta") and choices["schedule"] == "one_cycle":
        choices["schedule"] = "lambda"
    if one.model == "sparse":
        choices["optimizer"] = choices["optimizer"] if choices["optimizer"] in parts.SPARSE_OPTIMIZERS else "sgd"
        choices["clip"] = "None"
    if choices["optimizer"] == "groups" and choices["given"] == "made by":
        choices["given"] = "made"
    return dataclasses.replace(one, choices=choices)


def ways(one: JobSketch, device: str, draw: random.Random) -> list[dict[str, Any] | str]:
    """Plans for it: words, or choices in the plan that it describes itself."""
    gather: dict[str, Any] = {"kind": "gather", "workers": 0}
    others: list[dict[str, Any]] = [{"optimizer": "fused"}, {"precision": "bf16"}]
    feeds: list[dict[str, Any]] = [gather, {"kind": "resident", "workers": 0}, {"kind": "loader", "workers": 2}]
    if one["inputs"] == "pictures":
        others.append({"layout": "channels_last"})
    if one.model not in (*NORMED, *parts.DRAWING_MODELS) and one["batches"] != "augmented":
        others += [{"micro_batch": 3}, {"micro_batch": 4}]
    if one.model == "residual":
        others.append({"checkpoint": 1})
    if device == "cuda":
        others += [{"mode": "captured"}] * 4
        others += [{"mode": "captured", "kind": "resident", "workers": 0, "replay_steps": 4}, {"precision": "tf32"}]
        feeds.append({"kind": "stream", "workers": 0})
    found: list[dict[str, Any] | str] = [draw.choice(feeds)]
    chosen = dict(draw.choice(others))
    found.append(chosen | (draw.choice(feeds[:2]) if draw.random() < 0.4 and "kind" not in chosen else {}))
    if one["door"] == "fit":
        found.append("auto" if one.long else draw.choice(["off", "max"]))
    return found


# --- the text --------------------------------------------------------------------------------------------

HEAD = """
import copy, os, random, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from hotlap.data.order import mix, seed_host
torch.manual_seed({seed})
np.random.seed({seed} % 1000)
random.seed({seed})
device = torch.device("{device}")
N, BATCH, EPOCHS, SEED, ACCUMULATE, CLIP = {samples}, {batch}, {epochs}, {seed}, {accumulate}, {clip}
SHUFFLED, DROPS, PATIENCE = {shuffled}, {drops}, {patience}
PROBES, MODULES = {{}}, []
"""

MIDDLE = """
def pick(output):
    return output["logits"] if isinstance(output, dict) else output

def rows_of(batch):
    return (batch["x"], batch["y"]) if isinstance(batch, dict) else batch

def prepare(batch):
    x, y = rows_of(batch)
    x = x * 0.5 if x.is_floating_point() else x
    return {"x": x, "y": y} if isinstance(batch, dict) else (x, y)

def augment(batch):
    x, y = rows_of(batch)
    x = x + 0.05 * torch.randn_like(x)
    return {"x": x, "y": y} if isinstance(batch, dict) else (x, y)

def forward(model, batch):
    x, y = rows_of(batch)
    return pick(model(x)), y

def by_function(model, batch):
    return criterion(*forward(model, batch))
"""

FINISH = """
torch.save({
    "weights": [one.state_dict() for one in MODULES],
    "optimizer": optimizer.state_dict()["state"],
    "rates": [group["lr"] for group in optimizer.param_groups],
    "moved": moved,
    "torch": torch.get_rng_state(),
    "python": repr(random.getstate()),
    "numpy": repr(np.random.get_state()),
}, "final.pt")
for line in told:
    print(line)
"""

PLAIN = """
net = net.to(device)
made_schedule = {schedule}
batches_an_epoch = N // BATCH if DROPS else -(-N // BATCH)
updates_an_epoch = -(-batches_an_epoch // ACCUMULATE)
moves = EPOCHS if {per_epoch} else EPOCHS * updates_an_epoch
schedule = None if made_schedule is None else made_schedule(*(optimizer, moves)[: made_schedule.__code__.co_argcount])
before = torch.get_rng_state()
{seeding}
told, moved, best, bad = [], 0, None, 0
weights_of = getattr(criterion, "weight", None)

def evaluate():
    for one in MODULES:
        one.eval()
    total, right, count = 0.0, 0, 0.0
    with torch.no_grad():
        for first in range(0, len(VX), 16):
            x, y = VX[first : first + 16].to(device), VY[first : first + 16].to(device)
            {prepare_valid}
            output = pick(net(x))
            weight = len(y) if weights_of is None or y.is_floating_point() else weights_of[y].sum().item()
            total += criterion(output, y).item() * weight
            count += weight
    for one in MODULES:
        one.train()
    return total / count

for epoch in range(EPOCHS):
    generator = torch.Generator().manual_seed(mix(SEED, epoch))
    order = torch.randperm(N, generator=generator) if SHUFFLED else torch.arange(N)
    pieces = [piece for piece in order.split(BATCH) if len(piece) == BATCH or not DROPS]
    summed, seen = 0.0, 0.0
    for first in range(0, len(pieces), ACCUMULATE):
        window = pieces[first : first + ACCUMULATE]
        def weight_of(piece):
            y = Y[piece].to(device)
            return float(len(y)) if weights_of is None or y.is_floating_point() else weights_of[y].sum().item()
        weights = [weight_of(piece) for piece in window]
        optimizer.zero_grad()
        for piece, weight in zip(window, weights):
            x, y = X[piece].to(device), Y[piece].to(device)
            {prepare}
            loss = criterion(pick(net(x)), y)
            (loss if len(window) == 1 else loss * (weight / sum(weights))).backward()
            summed += loss.item() * weight
            seen += weight
        if CLIP is not None:
            nn.utils.clip_grad_norm_(PARAMETERS, CLIP)  # the model's order, in which their squares are added
        optimizer.step()
        moved += 1
        if schedule is not None and not {per_epoch}:
            schedule.step()
        {each_step}
    if schedule is not None and {per_epoch}:
        schedule.step()
    {each_epoch}
{restored}
"""

DOOR = """
import hotlap
import hotlap.tuner.laps as laps
from hotlap.core.errors import PlanError
laps.LAP_S = 0.004
plan = {plan}
settings = dict({settings})
told = []
"""

FIT = """
job = hotlap.Job(
    model=net, data=data, optimizer={optimizer}, epochs=EPOCHS, seed=SEED, accumulate=ACCUMULATE, clip=CLIP,
    patience=PATIENCE, device="{device}", **settings, **{extra})
before = torch.get_rng_state()
try:
    run = hotlap.fit(job, plan=plan, tune_s=5, out="../run", progress=False, save_every=0)
except PlanError as error:
    print("hotlap  hotlap leaves the script alone:", error, file=sys.stderr)
    run = hotlap.fit(job, plan="off", out="../run-2", progress=False, save_every=0)
assert torch.equal(before, torch.get_rng_state()), "fit has drawn from the caller's generator"
for record in run.history:
    told.append(f"epoch {{record['train_loss']:.12g}} {{record.get('valid_loss') or 0.0:.12g}}")
moved = run.updates
"""

RIG = """
from pathlib import Path
rig = hotlap.Rig(net, {optimizer}, device="{device}", clip=CLIP, updates=MOVES, **settings)
given = dict(epochs=EPOCHS, seed=SEED, accumulate=ACCUMULATE, **{extra})
windows = rig.feed(data, **given)
own = rig.plan
switches = {switches}
def turn(choices):
    try:
        rig.use(own.but(**choices))
    except PlanError as error:
        print("hotlap  hotlap leaves the script alone:", error, file=sys.stderr)
if not switches:
    turn(plan)
for number, window in enumerate(windows):
    if switches and number in switches:
        turn(plan if number == switches[0] else {{}})
    loss = rig.step(window)
    told.append(f"loss {{loss.item():.12g}}")
moved = rig.updates
rig.close()
rig.restore_layout()
Path("../run").mkdir(exist_ok=True)
Path("../run/ledger.jsonl").write_text(rig.ledger.to_lines())
"""


def common(one: JobSketch, device: str) -> str:
    """What the plain loop and hotlap have in common: data, model, loss, optimizer."""
    kind, loss = parts.LOSSES[one["loss"]]
    targets = {
        "classes": "Y = X.flatten(1)[:, :4].argmax(1)",
        "numbers": "Y = torch.tanh(X.flatten(1)[:, :4]) if X.is_floating_point() else torch.randn(N, 4)",
    }
    head = HEAD.format(
        seed=one.seed,
        device=device,
        samples=one["samples"],
        batch=one["batch"],
        epochs=int(one["epochs"]) * (5 if one.long else 1),
        accumulate=one["accumulate"],
        clip=one["clip"],
        shuffled=one["order"] == "shuffled",
        drops=one["last"] == "dropped",
        patience=one["patience"],
    )
    return "\n".join(
        text.strip("\n")
        for text in (
            f"# {one}\n{head}",
            parts.INPUTS[one["inputs"]],
            parts.MODELS[one["inputs"]][one.model],
            "MODULES = [net]\nnet = net.to(device).train()",
            targets[kind],
            "VX, VY = X[:30].clone(), Y[:30].clone()",
            loss,
            MIDDLE,
            "PARAMETERS = [p for one in MODULES for p in one.parameters()]",
            parts.OPTIMIZERS[one["optimizer"]],
            "weight = getattr(criterion, 'weight', None)",
        )
    )


def plain_text(one: JobSketch, device: str) -> str:
    """The plain loop."""
    by = {"as they are": "", "prepared": "x, y = prepare((x, y))", "augmented": "x, y = augment((x, y))"}
    fit = one["door"] == "fit"
    each_epoch = "value = 0.0"
    if fit and one["valid"] == "yes":
        each_epoch = "value = evaluate()"
    each_epoch += "\ntold.append(f'epoch {summed / seen:.12g} {value:.12g}')" if fit else ""
    restored = ""
    if one["patience"] != "None":
        each_epoch += (
            "\nif best is None or value < best[0]:"
            "\n    best, bad = (value, copy.deepcopy([one.state_dict() for one in MODULES])), 0"
            "\nelse:\n    bad += 1\nif bad >= PATIENCE:\n    break"
        )
        restored = "for one, weights in zip(MODULES, best[1]):\n    one.load_state_dict(weights)"
    if fit:
        restored += "\nrandom.setstate(python_before)\nnp.random.set_state(numpy_before)\ntorch.set_rng_state(before)"
    seeding = (
        "python_before, numpy_before = random.getstate(), np.random.get_state()\nseed_host(mix(SEED))" if fit else ""
    )
    if fit and device == "cuda":
        seeding += "\ntorch.cuda.manual_seed(mix(SEED))"
    text = PLAIN
    for name, value in (
        ("schedule", SCHEDULES[one["schedule"]]),
        ("per_epoch", str(one["schedule"] in PER_EPOCH)),
        ("seeding", seeding),
        ("prepare_valid", by["prepared"] if one["batches"] == "prepared" else "pass"),
        ("prepare", by[one["batches"]] or "pass"),
        ("each_step", "" if fit else "told.append(f'loss {summed_now(window, weights, seen, summed):.12g}')"),
        ("each_epoch", each_epoch),
        ("restored", restored),
    ):
        lines = text.split("\n")
        text = "\n".join(
            indented(value, len(line) - len(line.lstrip()))
            if line.strip() == f"{{{name}}}"
            else line.replace(f"{{{name}}}", value)
            for line in lines
        )
    if not fit:
        text = text.replace(
            "        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n        at_first = (summed, seen)\n"
        ).replace("summed_now(window, weights, seen, summed)", "(summed - at_first[0]) / (seen - at_first[1])")
    return f"{common(one, device)}\n{text}\n{FINISH}"


def hotlap_text(one: JobSketch, device: str, plan: Any) -> str:
    """The same by `fit` or a Rig, under a plan."""
    loader = one["data"].startswith("loader")
    settings = {"loss": "criterion"}
    needs_forward = one["data"] == "named" or one.model in parts.MODEL_HABITS
    if one["loss"] in FUNCTIONS:
        settings["loss"] = "by_function"
    elif needs_forward:
        settings["forward"] = "forward"
    if one["schedule"] != "none":
        settings["schedule"] = SCHEDULES[one["schedule"]]
        settings["schedule_per"] = repr("epoch" if one["schedule"] in PER_EPOCH else "update")
    if one["batches"] != "as they are":
        settings["prepare" if one["batches"] == "prepared" else "augment"] = one["batches"][:-1].replace(
            "augmente", "augment"
        )
    words = ", ".join(f"{name}={value}" for name, value in settings.items())
    extra = "{}"
    if not loader:
        extra = "dict(batch_size=BATCH, order='shuffled' if SHUFFLED else 'as given', drop_last=DROPS)"
    optimizer = "optimizer"
    if one["given"] == "made by":
        kind = parts.OPTIMIZERS[one["optimizer"]].replace("PARAMETERS", "parameters")
        maker = f"def make_optimizer(parameters):\n    parameters = list(parameters)\n{indented(kind, 4)}\n"
        maker += "    return optimizer\n"
        optimizer = "make_optimizer"
    else:
        maker = ""
    door = DOOR.replace("{plan}", repr(plan)).replace("{settings}", words)
    if one["door"] == "fit":
        if one["valid"] == "yes":
            valid = "{'x': VX, 'y': VY}" if one["data"] == "named" else "(VX, VY)"
            door = door.replace("settings = dict(", f"settings = dict(valid={valid}, eval_batch=16, ")
        text = FIT.format(optimizer=optimizer, device=device, extra=extra)
        if one["given"] == "made by":
            text = text.replace("job = hotlap.Job(", "MADE = []\njob = hotlap.Job(").replace(
                "optimizer=make_optimizer", "optimizer=lambda p: MADE.append(make_optimizer(p)) or MADE[-1]"
            )
            text += "optimizer = MADE[-1]\n"
    else:
        steps = "EPOCHS * -(-(N // BATCH if DROPS else -(-N // BATCH)) // ACCUMULATE)"
        steps = "EPOCHS" if one["schedule"] in PER_EPOCH else steps
        text = f"MOVES = {steps}\n" + RIG.format(
            optimizer=optimizer, device=device, extra=extra, switches=repr(one.switches)
        )
        text += "optimizer = rig.optimizer\n"
    return f"{common(one, device)}\n{DATA[one['data']]}\n{maker}{door}\n{text}\n{FINISH}"

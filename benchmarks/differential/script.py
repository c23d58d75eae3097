"""A sketch names the parts of one script; `compose` writes the script."""

from __future__ import annotations

import dataclasses
import random
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.differential import parts

FIELDS: dict[str, tuple[str, ...]] = {
    "samples": ("52", "64", "77"),
    "batch": ("8", "16", "5"),
    "epochs": ("5", "6"),
    "inputs": tuple(parts.INPUTS),
    "dataset": tuple(parts.DATASETS),
    "change": tuple(parts.CHANGES),
    "sampler": tuple(parts.SAMPLERS),
    "last": tuple(parts.LASTS),
    "workers": tuple(parts.WORKERS),
    "collate": tuple(parts.COLLATES),
    "loss": tuple(parts.LOSSES),
    "optimizer": tuple(parts.OPTIMIZERS),
    "schedule": tuple(parts.SCHEDULES),
    "clip": tuple(parts.CLIPS),
    "accumulate": tuple(parts.ACCUMULATE),
    "amp": tuple(parts.AMPS),
    "report": tuple(parts.REPORTS),
    "evaluation": tuple(parts.EVALUATIONS),
    "checkpoint": tuple(parts.CHECKPOINTS),
    "loop": ("supervised", "gan", "twice"),
    "shape": ("module", "function"),
}
"""Every choice but the model, which depends on the inputs, and the habits. The first is the plainest."""

PLAIN_SHARE = {
    "inputs": 0.35, "dataset": 0.35, "change": 0.2, "sampler": 0.45, "workers": 0.85, "collate": 0.75, "last": 0.7,
    "schedule": 0.4, "clip": 0.6, "accumulate": 0.8, "amp": 0.85, "evaluation": 0.35, "checkpoint": 0.5, "loop": 0.85,
    "shape": 0.7,
}  # fmt: skip
"""How often a choice is the plainest; of the others each is as likely as any."""

MOST_HABITS = 4


@dataclass(frozen=True)
class Sketch:
    """The parts of one script."""

    seed: int
    choices: Mapping[str, str]
    model: str
    habits: tuple[str, ...] = ()
    long: bool = False
    """With so many epochs that a tuner has time to try something."""

    def __getitem__(self, name: str) -> str:
        return self.choices[name]

    def simpler(self) -> Iterator[Sketch]:
        """This sketch with one part left out, in every way that there is."""
        for habit in self.habits:
            yield dataclasses.replace(self, habits=tuple(one for one in self.habits if one != habit))
        for name, options in FIELDS.items():
            if self[name] == options[0]:
                continue
            choices = {**self.choices, name: options[0]}
            if name == "inputs":
                yield dataclasses.replace(self, choices=choices, model=next(iter(parts.MODELS["vectors"])))
            else:
                yield dataclasses.replace(self, choices=choices)
        plainest = next(iter(parts.MODELS[self["inputs"]]))
        if self.model != plainest:
            yield dataclasses.replace(self, model=plainest)

    @property
    def draws(self) -> bool:
        """Whether the model draws from the device's generator while it trains."""
        return self.model in parts.DRAWING_MODELS or "gradient_noise" in self.habits or self["loop"] == "gan"

    def pins(self, device: str) -> bool:
        """Whether its loader pins batches."""
        return device == "cuda" and self.seed % 3 == 0

    def __str__(self) -> str:
        own = [f"{name}={value}" for name, value in self.choices.items() if value != FIELDS[name][0]]
        return ", ".join([f"model={self.model}", *own, *self.habits])


def sketch(seed: int) -> Sketch:
    """The sketch of a seed, always the same."""
    draw = random.Random(seed)
    choices = {}
    for name, options in FIELDS.items():
        share = PLAIN_SHARE.get(name)
        plain = share is not None and draw.random() < share
        choices[name] = options[0] if plain else draw.choice(options)
    changes = [name for name, (fits, _) in parts.CHANGES.items() if choices["dataset"] in fits]
    choices["change"] = draw.choice(changes) if changes and choices["change"] != "none" else "none"
    models = list(parts.MODELS[choices["inputs"]])
    made = Sketch(
        seed,
        choices,
        model=draw.choice(models),
        habits=tuple(draw.sample(list(parts.HABITS), draw.randint(0, MOST_HABITS))),
        long=draw.random() < 0.25,
    )
    return sensible(made)


def sensible(one: Sketch) -> Sketch:
    """The sketch without the parts that cannot go together."""
    choices, habits = dict(one.choices), list(one.habits)

    def without(*names: str) -> None:
        habits[:] = [habit for habit in habits if habit not in names]

    if choices["dataset"] in parts.ITERABLE:
        choices["sampler"] = "sequential"
        without("asks_length", "batch_grows")
    if choices["dataset"] in ("arrays_as_they_are", "dicts") and choices["collate"] in ("stacking", "lambda"):
        choices["collate"] = "default"
    if choices["dataset"] == "dicts" and choices["collate"] == "drawing":
        choices["collate"] = "default"
    if choices["dataset"] == "requires_grad" and choices["workers"] != "0":
        choices["workers"] = "0"  # torch refuses to send such tensors between processes
    if choices["change"] == "in_mid_epoch" and choices["workers"] != "0":
        choices["change"] = "none"  # docs/limits.md: gathered batches show it at once, workers in the next epoch
    if choices["sampler"] in ("own_batches", "fixed_batches"):
        choices["last"] = "kept"
    if one.model == "sparse":
        choices["optimizer"] = choices["optimizer"] if choices["optimizer"] in parts.SPARSE_OPTIMIZERS else "sgd"
        choices["clip"] = "none"
        without("two_steps", "reads_gradients")
    if choices["inputs"] == "tokens" or one.model == "float64":
        without("mixes_batch")
    if choices["optimizer"] == "by_hand":
        choices["schedule"] = "none"
        choices["checkpoint"] = choices["checkpoint"] if choices["checkpoint"] != "optimizer_anew" else "none"
        without("zero_not_none", "group_added", "layer_replaced", "two_steps", "changes_hyper")
    if choices["optimizer"] in ("by_hand", *parts.CLOSURES):
        choices["accumulate"], choices["amp"] = "1", "none"
        without("skips_updates", "grad_by_autograd")
    if choices["optimizer"] in ("groups", "lbfgs", "own_signs", "two"):
        without("two_steps", "group_added", "layer_replaced")
        choices["checkpoint"] = choices["checkpoint"] if choices["checkpoint"] != "optimizer_anew" else "none"
    if choices["optimizer"] in ("adagrad", "adadelta", "lbfgs") and choices["schedule"] == "one_cycle":
        choices["schedule"] = "lambda"  # it has no momentum to cycle
    if choices["schedule"] != "none":
        without("group_added", "layer_replaced")
    if choices["amp"] == "scaler":
        choices["clip"] = choices["clip"] if choices["clip"] in ("none", "norm") else "norm"
        without("two_steps", "grad_by_autograd")
    if one.model == "float64":
        choices["amp"] = "none"
    if choices["loop"] == "gan":
        choices.update(inputs="vectors", accumulate="1", amp="none", report="item", schedule="none", clip="none")
        if choices["optimizer"] in ("by_hand", "two", *parts.CLOSURES):
            choices["optimizer"] = "adam"
        without(*(name for name, places in parts.HABITS.items() if {"loss", "backward", "step_if"} & set(places)))
        without("group_added", "layer_replaced", "two_steps", "forward_without_grad")
        if one.model not in parts.MODELS["vectors"]:
            one = dataclasses.replace(one, model="mlp")
    if one.model == "two_modules":
        without("hooks_forward", "layer_replaced", "compiles")
    if one.model == "sparse" or "retain_graph" in habits:
        without("functional_call", "input_gradient")
    if choices["inputs"] == "sequences" or choices["amp"] == "scaler":
        without("input_gradient")
    if choices["schedule"] != "none" or choices["checkpoint"] != "none" or "state_edited" in habits:
        without("optimizer_twice")
    if one.model == "dict_output" or "compiles" in habits:
        without("averaged_model", "functional_call")
    if choices["dataset"] == "requires_grad":
        without("reads_batch")
    if "grad_by_autograd" in habits:
        without("retain_graph", "backward_inputs", "hooks_accumulated")
    if "retain_graph" in habits:
        without("backward_inputs")
    iterates = [habit for habit in habits if "iterate" in parts.HABITS[habit]]
    without(*iterates[1:])
    zeros = [habit for habit in habits if "zero" in parts.HABITS[habit]]
    without(*zeros[1:])
    if "enumerates_by_hand" in habits or "endless" in habits:
        without("skips_batches", "breaks_epoch", "catches_errors")
    if "endless" in habits:
        without("loader_anew", "batch_grows")
    ends = [habit for habit in habits if "end_of_all" in parts.HABITS[habit]]
    without(*ends[1:])
    if choices["loop"] == "twice":
        without("chdir", "global_hook", "group_added", "layer_replaced")
    return dataclasses.replace(one, choices=choices, habits=tuple(habits))


# --- the text --------------------------------------------------------------------------------------------

HEAD = """
import contextlib, copy, gc, itertools, os, pickle, random, sys, warnings
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import torch.utils.checkpoint
from torch.utils.data import (
    ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, Subset, TensorDataset,
    WeightedRandomSampler, default_collate)
"""

SET_UP = """
torch.manual_seed({seed})
np.random.seed({seed} % 1000)
random.seed({seed})
device = torch.device("{device}")
N, BATCH, EPOCHS, WORKERS, SPARSE = {samples}, {batch}, {epochs}, {workers}, {sparse}
PROBES, MODULES, HERE = {{}}, [], os.getcwd()
"""

TARGETS = {
    "classes": "Y = X.flatten(1)[:, :4].argmax(1)",
    "numbers": "Y = torch.tanh(X.flatten(1)[:, :4]) if X.is_floating_point() else torch.randn(N, 4)",
}

HELPERS = """
def pick(output):
    return output["logits"] if isinstance(output, dict) else output

def mode(training):
    for one in MODULES:
        one.train(training)

def unpack(batch):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return x.to(device), y.to(device)

def state():
    return {"modules": [one.state_dict() for one in MODULES], "optimizers": [one.state_dict() for one in OPTIMIZERS]}

def load(saved):
    for one, kept in zip(MODULES, saved["modules"]):
        one.load_state_dict(kept)
    for one, kept in zip(OPTIMIZERS, saved["optimizers"]):
        one.load_state_dict(kept)

def evaluate(context, data=None, training=False):
    mode(training)
    summed, rows = 0.0, 0
    with context:
        for batch in data if data is not None else test_loader:
            x, y = unpack(batch)
            output = pick(net(x))
            summed += criterion(output, y).item() * len(x)
            rows += len(x)
    mode(True)
    print("evaluated", repr(summed / rows), rows)
"""

FINISH = """
os.chdir(HERE)
final = {
    "state": state(),
    "probes": {name: probe() for name, probe in PROBES.items()},
    "gradients": [None if p.grad is None else p.grad.to_dense() for p in PARAMETERS],
    "flags": [(p.requires_grad, p.is_leaf) for p in PARAMETERS] + [one.training for one in MODULES],
    "rates": [group["lr"] for one in OPTIMIZERS for group in one.param_groups],
    "torch": torch.get_rng_state(),
    "numpy": [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
    "python": repr(random.getstate()),
    "cuda": torch.cuda.get_rng_state_all() if device.type == "cuda" else [],
}
torch.save(final, "final{name}.pt")
print("done", updates)
"""

GAN = """
maker = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12)).to(device)
judge = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
MODULES += [maker, judge]
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.9))
judge_optimizer = torch.optim.RMSprop(judge.parameters(), lr=1e-3, eps=1e-4)
OPTIMIZERS += [maker_optimizer, judge_optimizer]
"""

GAN_STEP = """
real = x.to(torch.float32)
fake = maker(torch.randn(len(x), 6).to(device))
judge_optimizer.zero_grad()
judge_loss = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
judge_loss.backward()
judge_optimizer.step()
maker_optimizer.zero_grad()
maker_loss = F.softplus(-judge(fake)).mean()
maker_loss.backward()
maker_optimizer.step()
"""


def compose(one: Sketch, device: str = "cpu") -> str:
    """The script."""
    if one["loop"] == "twice":
        first = _body(one, device, name="-1")
        second = _body(one, device, name="-2")
        body = (
            f"def train_first():\n{_in(first)}\n\ndef train_second():\n{_in(second)}\n\ntrain_first()\ntrain_second()"
        )
        return f"# {one}\n{HEAD}\n{body}\n{_last(one)}"
    body = _body(one, device)
    if one["shape"] == "function":
        return f"# {one}\n{HEAD}\ndef main():\n{_in(body)}\n\nif __name__ == '__main__':\n    main()\n{_last(one, 4)}"
    return f"# {one}\n{HEAD}\n{body}\n{_last(one)}"


def _last(one: Sketch, indent: int = 0) -> str:
    return textwrap.indent("\n".join(_at(one, "end_of_all")), " " * indent) + "\n"


def _body(one: Sketch, device: str, name: str = "") -> str:
    choices = one.choices
    workers = int(choices["workers"].split()[0])
    kind, loss = parts.LOSSES[choices["loss"]]
    sampler_lines, keywords = parts.SAMPLERS[choices["sampler"]]
    if choices["dataset"] in parts.ITERABLE:
        sampler_lines, keywords = "", "batch_size=BATCH"
    collate_lines, collate = parts.COLLATES[choices["collate"]]
    keywords += parts.LASTS[choices["last"]] + parts.WORKERS[choices["workers"]] + collate
    if one.pins(device):
        keywords += ", pin_memory=True"
    optimizer = parts.OPTIMIZERS[choices["optimizer"]]
    epochs = int(choices["epochs"]) * (4 if one.long else 1)
    lines = [
        SET_UP.format(
            seed=one.seed, device=device, samples=choices["samples"], batch=choices["batch"], epochs=epochs,
            workers=workers, sparse=one.model == "sparse",
        ),
        parts.INPUTS[choices["inputs"]],
        parts.MODELS[choices["inputs"]][one.model],
        "if not MODULES:\n    net = net.to(device)\n    MODULES = [net]",
        TARGETS[kind],
        parts.DATASETS[choices["dataset"]],
        sampler_lines,
        collate_lines,
        f"def make_loader():\n    return DataLoader(train_set, {keywords})",
        "loader = make_loader()",
        "test_set = TensorDataset(X[:24].clone(), Y[:24].clone())\ntest_loader = DataLoader(test_set, batch_size=10)",
        loss,
        "PARAMETERS = [p for one in MODULES for p in one.parameters()]",
        "OPTIMIZERS = []",
        optimizer,
        "OPTIMIZERS = OPTIMIZERS or ([optimizer] if optimizer is not None else [])",
        HELPERS,
        GAN if choices["loop"] == "gan" else "",
        _scaler(one, device),
        *_at(one, "before"),
        "updates, total, seen = 0, 0.0, 0",
        *_at(one, "before_loop"),
        _loop(one, device),
        *_at(one, "end"),
        FINISH.replace("{name}", name),
    ]  # fmt: skip
    return "\n".join(line.strip("\n") for line in lines if line)


def _scaler(one: Sketch, device: str) -> str:
    if one["amp"] != "scaler":
        return ""
    return f"scaler = torch.amp.GradScaler('{device}', init_scale=1024.0)"


def _loop(one: Sketch, device: str) -> str:
    step = [
        "x, y = unpack(batch)",
        *_at(one, "batch"),
        *_at(one, "before_forward"),
        *_step(one, device),
        *_at(one, "after"),
    ]
    text = "\n".join(step)
    guard = [parts.HABITS[habit]["guard"] for habit in one.habits if "guard" in parts.HABITS[habit]]
    if guard:
        text = f"try:\n{_in(text)}\nexcept {guard[0]} as error:\n    print('caught', error)"
    epoch = [
        "total, seen = 0.0, 0",
        "mode(True)",
        *_at(one, "epoch_start"),
        _iteration(one, text),
        *_at(one, "epoch_end"),
    ]
    return f"for epoch in range(EPOCHS):\n{_in(chr(10).join(epoch))}"


def _iteration(one: Sketch, text: str) -> str:
    how = next((parts.HABITS[habit]["iterate"] for habit in one.habits if "iterate" in parts.HABITS[habit]), None)
    if how == "by hand":
        lines = "try:\n    batch = next(rows)\nexcept StopIteration:\n    break"
        return f"rows, number = iter(loader), -1\nwhile True:\n    number += 1\n{_in(lines)}\n{_in(text)}"
    if how == "endless":
        lines = (
            "try:\n    batch = next(endless)\n"
            "except (NameError, UnboundLocalError, StopIteration):\n"
            "    endless = iter(loader)\n    batch = next(endless)"
        )
        return f"for number in range(9):\n{_in(lines)}\n{_in(text)}"
    source = {
        None: "enumerate(loader)",
        "islice": "enumerate(itertools.islice(loader, 5))",
        "zip": "zip(range(1000), loader)",
    }[how]
    return f"for number, batch in {source}:\n{_in(text)}"


def _step(one: Sketch, device: str) -> list[str]:
    """From the batch to the update."""
    name = one["optimizer"]
    zero = next((places["zero"] for places in map(parts.HABITS.get, one.habits) if places and "zero" in places), None)
    zero = zero or "for one in OPTIMIZERS:\n    one.zero_grad()"
    forward = "output = pick(net(x))\nloss = criterion(output, y)\n" + "\n".join(_at(one, "loss"))
    if one["amp"] != "none":
        kind = "float16" if device == "cuda" and one["amp"] == "scaler" else "bfloat16"
        forward = f"with torch.autocast('{device}', dtype=torch.{kind}):\n{_in(forward)}"
    pieces = int(one["accumulate"])
    scaled = "loss" if pieces == 1 else f"(loss / {pieces})"
    if one["amp"] == "scaler":
        scaled = f"scaler.scale({scaled})"
    how = next((parts.HABITS[habit]["backward"] for habit in one.habits if "backward" in parts.HABITS[habit]), "")
    if how == "by autograd.grad":
        backward = (
            f"wanted = [p for p in PARAMETERS if p.requires_grad]\n"
            f"for p, g in zip(wanted, torch.autograd.grad({scaled}, wanted, allow_unused=True)):\n"
            "    p.grad = g if p.grad is None or g is None else p.grad + g"
        )
    else:
        backward = f"{scaled}.backward({how})"
    gan = [GAN_STEP] if one["loop"] == "gan" else []
    if name in parts.CLOSURES:
        inner = "\n".join([zero, forward, backward, "made.append((loss, output))", "return loss"])
        return [
            *gan,
            "made = []",
            f"def closure():\n{_in(inner)}",
            "optimizer.step(closure)",
            "loss, output = made[0]",
            *_at(one, "after_backward"),
            "updates += 1",
            *_at(one, "after_step"),
        ]
    clip = parts.CLIPS[one["clip"]]
    if name == "by_hand":
        update = "for p in PARAMETERS:\n    if p.grad is not None:\n        p.data.sub_(0.05 * p.grad.to_dense())"
        zero = "for p in PARAMETERS:\n    p.grad = None"
    elif one["amp"] == "scaler":
        clip = clip and f"scaler.unscale_(OPTIMIZERS[0])\n{clip}"
        update = "for one in OPTIMIZERS:\n    scaler.step(one)\nscaler.update()"
    else:
        update = "for one in OPTIMIZERS:\n    one.step()"
    for condition in _at(one, "step_if"):
        update = f"if {condition}:\n{_in(update)}"
    make = [clip, update, "updates += 1", *_at(one, "after_step")]
    if pieces == 1:
        return [*gan, zero, forward, backward, *_at(one, "after_backward"), *make]
    make_lines = _in("\n".join(line for line in (*make, zero) if line))
    return [*gan, forward, backward, *_at(one, "after_backward"), f"if (number + 1) % {pieces} == 0:\n{make_lines}"]


def _at(one: Sketch, place: str) -> list[str]:
    """What the parts of the loop have for one place."""
    changes: Mapping[str, str] = parts.CHANGES[one["change"]][1]
    if one["dataset"] not in parts.CHANGES[one["change"]][0]:
        changes = {}
    found = [
        changes,
        parts.REPORTS[one["report"]],
        parts.SCHEDULES[one["schedule"]],
        parts.EVALUATIONS[one["evaluation"]],
        parts.CHECKPOINTS[one["checkpoint"]],
        *(parts.HABITS[habit] for habit in one.habits),
    ]
    return [places[place] for places in found if place in places]


def indented(text: str, by: int) -> str:
    """Some lines, further in."""
    return textwrap.indent(text.strip("\n"), " " * by)


def _in(text: str) -> str:
    return indented(text, 4)

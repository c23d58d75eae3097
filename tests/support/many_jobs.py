"""Small trainings for `fit_many`, and what each comes to alone."""

import functools

import torch
from plain import class_data
from torch import nn

import hotlap
from hotlap import fit_many


class Network(nn.Sequential):
    def __init__(self, width=4, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 3))


def job(seed=0, **changes):
    model = Network(seed=seed).double()
    given = {
        "model": model,
        "data": class_data(),
        "valid": class_data(30, seed=9),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.Adam, lr=0.02),
        "batch_size": 10,
        "epochs": 3,
        "seed": seed,
        "device": "cpu",
    }
    return hotlap.Job(**{**given, **changes})


def many(jobs, out, **settings):
    return fit_many(jobs, out=out, **{"plan": "off", "progress": False, **settings})


def scores(runs):
    return [[record["valid_loss"] for record in run.history] for run in runs]


def alone(numbers):
    return [hotlap.fit(job(seed), plan="off", progress=False) for seed in numbers]

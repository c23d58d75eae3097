"""`--profile`: what a run is expected to take, from a few steps of its models, and what earlier runs scored."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hotlap import trees
from hotlap.core.console import SilentConsole
from hotlap.core.errors import StoreError
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.data.dataset import training_dataset
from hotlap.fitting.deadline import expected_evaluation_s
from hotlap.fitting.task import OFF, set_up
from hotlap.machine.device import choose_device
from hotlap.recipes.options import EPOCHS
from hotlap.recipes.recipe import Numbers, Prepared
from hotlap.store.cache import Cache, key_of

SCORES = "scores"
"""The cache's name for what runs under a profile scored."""
WARM_UP, STEPS, MOST_S = 2, 12, 5.0
"""Steps before those that are timed, all steps of a model, and the seconds after which hotlap makes no more."""
ROUNDS, TARGETS = 5, 8
"""Rounds and targets of boosted trees that are timed."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What the runs on the same held-out rows scored under each profile."""

    recipe: str
    target: str
    truth: Numbers

    def lines(self) -> list[str]:
        """A line for each profile of which a run is known."""
        found = [(name, self._entry(name)) for name in EPOCHS]
        return [f"known     {name}: {entry['words']}" for name, entry in found if entry is not None]

    def keep(self, profile: str, scores: Mapping[str, str], train_s: float, folder: Path) -> None:
        """Keep what a run scored; the latest one counts."""
        figures = ", ".join(f"{head} {figure}" for head, figure in scores.items())
        words = f"{figures}, trained in {show_seconds(train_s)} ({folder})"
        cache, facts = Cache(), {"recipe": self.recipe, "profile": profile}
        try:
            cache.replace(SCORES, self._key(profile), values={"words": words}, facts=facts)
        except StoreError:  # a cache that cannot be written loses a line of a later run
            return

    def _entry(self, profile: str) -> Mapping[str, str] | None:
        found = Cache().get(SCORES, self._key(profile))
        return None if found is None else found.values

    def _key(self, profile: str) -> str:
        return key_of(SCORES, self.recipe, self.target, self.truth, profile)


def expected_line(prepared: Prepared, profile: str, *, trials: int = 0) -> str:
    """What all trainings take at most at the pace of a few steps of each, on this machine as it is now."""
    with torch.random.fork_rng(devices=[]):
        seconds = {candidate.name: network_s(candidate.job()) for candidate in prepared.candidates}
        if trials:
            seconds = {f"{trials} trials": trials * max(seconds.values())}
        seconds |= {one.name: one.expected_s() for one in prepared.own if one.expected_s is not None}
    each = ", ".join(f"{name} {show_seconds(one)}" for name, one in seconds.items())
    return f"time      profile {profile}: about {show_seconds(sum(seconds.values()))} at most ({each}), without tuning"


def network_s(job: Job) -> float:
    """Seconds of a whole training, from a few of its steps and a part of an evaluation; the model is trained a bit."""
    device = choose_device(job.device)
    dataset = training_dataset(job, on_gpu=device.type == "cuda")
    rig = set_up(replace(job, schedule=None), dataset, OFF, device, SilentConsole(), save_every=0).rig
    try:
        took, began = list[float](), time.perf_counter()
        for window in rig.windows(steps=STEPS):
            before = time.perf_counter()
            rig.advance(window)
            rig.wait()
            took.append(time.perf_counter() - before)
            if time.perf_counter() - began > MOST_S:
                break
        step_s = statistics.median(took[WARM_UP:] or took)
        evaluation_s = expected_evaluation_s(rig, job) or 0.0
        epochs = job.epochs or 0
        return epochs * (len(dataset.order.epoch(0)) * step_s + evaluation_s)
    finally:
        rig.close()


def trees_s(job: trees.TreeJob) -> float:
    """Seconds of a whole training of trees, from a few rounds of a few targets."""
    few, rounds = min(TARGETS, job.targets), min(ROUNDS, job.rounds)
    part = replace(job, y=job.y[:, :few], rounds=rounds, valid=None, patience=None)
    with tempfile.TemporaryDirectory(prefix="hotlap-pace-") as folder:
        run = trees.fit(part, plan="off", out=Path(folder) / "run", progress=False)
    return run.train_s * (job.rounds / rounds) * (job.targets / few)

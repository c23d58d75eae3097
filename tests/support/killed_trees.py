"""Trainings of trees for processes that are killed on the way, and for those that go on."""

import os
import signal

import numpy as np

from hotlap import trees
from hotlap.trees import growing, saving

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(300, 6)).astype(np.float32)
Y = X @ RANDOM.normal(size=(6, 4)) + 0.1 * RANDOM.normal(size=(300, 4))
ANSWERS = {"four": Y, "moved": Y + 1, "one": Y[:, 0], "classes": np.digitize(Y[:, 0], [-1, 1])}


def job_of(library="xgboost", y="four", **given):
    y = ANSWERS[y]
    rest = {"valid": (X[200:], y[200:]), "params": {"max_depth": 3}, "rounds": 12, **given}
    return trees.TreeJob(X[:200], y[:200], library=library, **rest)


def four_targets():
    """For `hotlap resume RUN killed_trees:four_targets`."""
    return job_of()


def counting(act=lambda grown: None):
    """The rounds × targets that are grown from here on, each told to `act`; and what ends the counting."""
    grown, count = [0], growing.Watch.count

    def counted(self, rounds):
        count(self, rounds)
        grown[0] += rounds
        act(grown[0])

    growing.Watch.count = counted
    return grown, lambda: setattr(growing.Watch, "count", count)


def train(folder, given, plan="off", *, rounds, number=signal.SIGKILL, saves=False):
    """Train until so many rounds × targets are grown, and end by a signal; `saves`: each round is saved."""
    if saves:
        saving.SAVE_S, saving.COSTS = 0.0, 1e9
    counting(lambda grown: os.kill(os.getpid(), number) if grown == rounds else None)
    trees.fit(job_of(**given), plan=plan, out=folder, progress=False)

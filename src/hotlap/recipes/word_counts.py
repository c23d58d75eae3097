"""The baseline for texts: a logistic regression over TF-IDF, fitted here or in another process.

Run as a file, it reads texts and classes from its input as JSON and writes its answers, so that it takes a core beside
a training on a GPU instead of seconds before it. It imports nothing of hotlap.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

NAME = "TF-IDF + logistic regression"
FORMAT = 1
"""Of the rule as it is written here: one that answers otherwise has another number."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Counted(NamedTuple):
    """What it answers, and the seconds that it took."""

    answers: list[int] | None
    """The class of each text held out; None where no word comes twice."""
    took_s: float


Counting = Callable[[], Counted]
"""Waits until it is known."""


def version() -> str:
    """The version of all that decides the answers beside the texts."""
    return f"{FORMAT}, scikit-learn {importlib.metadata.version('scikit-learn')}"


def fitted(texts: Sequence[str], labels: Sequence[int], held: Sequence[str]) -> Counted:
    """Fit it to texts and their classes, and answer."""
    began = time.perf_counter()
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    counted = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    try:
        given = counted.fit_transform(texts)
    except ValueError:
        return Counted(None, time.perf_counter() - began)
    # Many columns, few of them in a row: this solver looks at them the fewest times.
    model = LogisticRegression(solver="newton-cg", max_iter=1000, C=10).fit(given, labels)
    answers: list[int] = model.predict(counted.transform(held)).tolist()
    return Counted(answers, time.perf_counter() - began)


def started(texts: Sequence[str], labels: Sequence[int], held: Sequence[str]) -> Counting:
    """Fit it in another process on one core; calling the result waits for the answers."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps([texts, labels, held]).encode())
        given.seek(0)
        process = subprocess.Popen(
            # Not from its folder: the files beside it have names that others have too.
            [sys.executable, "-P", __file__],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(_THREADS, "1")},
        )
    answers = _Waiting(process)
    weakref.finalize(answers, _end, process)
    return answers


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        process.kill()
        process.communicate()


class _Waiting:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def __call__(self) -> Counted:
        answers, errors = self._process.communicate()
        if self._process.returncode:
            code = f"its process ended with {self._process.returncode}"
            raise RuntimeError((errors.decode(errors="replace").strip().splitlines() or [code])[-1])
        return Counted(*json.loads(answers))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fitted(*json.load(sys.stdin))))

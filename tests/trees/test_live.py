"""How a training of trees stands, as others see it."""

import signal

import numpy as np
import pytest
from sampling import sample_eagerly, when

from hotlap import trees
from hotlap.store.telemetry import read_live, read_samples
from hotlap.trees.growing import Watch


def test_trees_lay_out_how_many_rounds_are_done_and_how_they_ended(tmp_path, monkeypatch):
    sample_eagerly(monkeypatch)
    random = np.random.default_rng(0)
    x = random.normal(size=(100, 4)).astype(np.float32)
    seen, count = [], Watch.count

    def counted(watch, rounds):
        count(watch, rounds)
        if not seen:
            when(lambda: (read_live(tmp_path / "run") or {}).get("step") == watch.rounds)
            seen.append(read_live(tmp_path / "run"))

    monkeypatch.setattr(Watch, "count", counted)
    job = trees.TreeJob(x, x.sum(1), rounds=6, params={"max_depth": 2})
    trees.fit(job, plan="off", out=tmp_path / "run", progress=False)
    (live,) = seen
    assert (live["kind"], live["unit"], live["step"], live["steps"], live["ended"]) == ("trees", "rounds", 1, 6, False)
    ended = read_live(tmp_path / "run")
    assert (ended["step"], ended["ended"], ended["stopped"]) == (6, True, "all rounds")
    assert read_samples(tmp_path / "run")[-1]["host"]["cores"] >= 1


@pytest.mark.parametrize(
    ("end", "raised", "why"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt, "on a signal"),
        (lambda: {}["none"], KeyError, "by an error: KeyError"),
    ],
)
def test_trees_that_come_to_no_end_say_why(tmp_path, monkeypatch, end, raised, why):
    sample_eagerly(monkeypatch)
    x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    count = Watch.count

    def ends(watch, rounds):
        count(watch, rounds)
        if watch.rounds == 2:
            when((tmp_path / "run" / "live.json").is_file)
            end()

    monkeypatch.setattr(Watch, "count", ends)
    job = trees.TreeJob(x, x.sum(1), rounds=6, params={"max_depth": 2})
    with pytest.raises(raised):
        trees.fit(job, plan="off", out=tmp_path / "run", progress=False)
    live = read_live(tmp_path / "run")
    assert (live["ended"], live["stopped"]) == (True, why)

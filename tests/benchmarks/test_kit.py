"""The benchmark of the kit: what it holds answers against."""

import itertools
from types import SimpleNamespace

import pytest
from benchmarks.kit.plain import why_not
from benchmarks.kit.rows import Options
from benchmarks.kit.sizes import sweep_sizes
from benchmarks.kit.workers import QUADS, in_turns


class Loop:
    """A loop whose laps take these seconds a step, again and again."""

    def __init__(self, *seconds):
        self._seconds, self.laps = itertools.cycle(seconds), 0

    def step_s(self, lap_s):
        self.laps += 1
        return next(self._seconds)


@pytest.mark.parametrize(
    ("slow", "fast", "quads"),
    [((0.010,), (0.005,), 2), ((0.010, 0.012), (0.0101, 0.0118), QUADS)],
    ids=["clear at once", "never clear"],
)
def test_two_loops_are_compared_in_turns_until_it_is_clear(slow, fast, quads):
    a, b = Loop(*slow), Loop(*fast)
    found = in_turns(a, b, 0.1)
    assert a.laps == b.laps == 2 * found.quads == 2 * quads
    assert found.ratio == pytest.approx(sum(slow) / sum(fast), rel=0.05)


def test_a_sweep_goes_from_small_sizes_to_the_largest():
    sizes = sweep_sizes(250, 28)
    assert (sizes[0], sizes[-1]) == (2, 250)
    assert all(high <= 1.25 * low + 1 for low, high in itertools.pairwise(sizes))


def test_a_size_is_trained_in_a_process_of_its_own_and_what_goes_wrong_there_is_no_answer(forks, monkeypatch):
    forked = SimpleNamespace(run=lambda command, *, cwd, **how: forks.run(*command[1:], cwd=cwd))
    monkeypatch.setattr("benchmarks.kit.plain.subprocess", forked)
    options = Options(device="cpu", quick=True, files=0)
    assert why_not("BERT-base", 4, options) is None
    with pytest.raises(RuntimeError, match="KeyError: 'GPT-5'"):
        why_not("GPT-5", 4, options)

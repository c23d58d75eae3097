"""Scripts put together at random train the same by python alone and by hotlap; `benchmarks.differential` runs more."""

import pytest
import torch
from benchmarks.differential.__main__ import sketch_of
from benchmarks.differential.cases import Case, Finding, Way, examined, shrink
from benchmarks.differential.comparing import beyond_rounding, differences, facts_of
from benchmarks.differential.jobs import JobSketch
from benchmarks.differential.running import Outcome, Runner
from benchmarks.differential.script import FIELDS, Sketch, compose, sensible, sketch

SEEDS = (0, 3, 5, 8, 11, 13, 15, 19)
"""Of quick scripts: no workers, nothing compiled."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    found = Runner("cpu", tmp_path_factory.mktemp("differential"))
    yield found
    found.close()


def test_scripts_of_random_parts_train_the_same_under_hotlap(runner, tmp_path):
    results = [examined(sketch_of(seed), runner, "cpu", tmp_path) for seed in SEEDS]
    assert [(one.sketch.seed, str(one.way), one.what[:3]) for result in results for one in result.findings] == []
    assert [result.sketch.seed for result in results if result.plain_code not in (0, 3)] == []
    in_force = {name for result in results for _, name in result.applied}
    assert {"feed.kind=gather", "numerics.optimizer=fused", "numerics.precision=bf16"} <= in_force
    assert sum(result.exact for result in results) >= len(SEEDS)
    assert sum(result.rounded for result in results) >= len(SEEDS) // 2


def test_every_script_is_python_and_a_seed_always_stands_for_the_same_one():
    for seed in range(200):
        text = compose(sketch(seed))
        compile(text, "train.py", "exec")
        assert text == compose(sketch(seed))


def test_every_fourth_seed_is_a_training_for_fit_or_a_rig():
    jobs = [sketch_of(seed) for seed in range(3, 80, 4)]
    assert all(isinstance(one, JobSketch) for one in jobs)
    assert {one["door"] for one in jobs} == {"fit", "rig"}


def test_one_bit_is_a_difference_and_rounding_is_measured_by_the_drift():
    weights = torch.linspace(1, 2, 5)
    other = weights.clone()
    other[3] += 2e-7
    mine, theirs = {"final.pt.weight": weights}, {"final.pt.weight": other}
    assert differences(mine, mine) == []
    assert len(differences(mine, theirs)) == 1
    assert beyond_rounding(mine, theirs, [mine]) == []
    far = {"final.pt.weight": weights + 1e-3}
    assert len(beyond_rounding(mine, far, [mine])) == 1
    assert beyond_rounding(mine, far, [{"final.pt.weight": weights + 1e-4}]) == []


def test_a_count_in_a_line_does_not_make_up_for_a_loss_that_is_off():
    mine = {"stdout 0": "loss 1000 0.5"}
    assert len(beyond_rounding(mine, {"stdout 0": "loss 1000 0.505"}, [mine])) == 1
    assert beyond_rounding(mine, {"stdout 0": "loss 1000 0.500005"}, [mine]) == []
    assert len(beyond_rounding({"stdout 0": "bytes 98304"}, {"stdout 0": "bytes 98305"}, [])) == 1


def test_a_line_of_another_shape_is_a_difference_whatever_the_drift():
    mine, drifted = {"stdout 0": "loss 1.5"}, [{"stdout 0": "loss 2.5"}]
    assert beyond_rounding(mine, {"stdout 0": "loss 3.5"}, drifted) == []
    assert len(beyond_rounding(mine, {"stdout 0": "caught 1.5"}, drifted)) == 1


def script_of(seed, model, **choices):
    """The plainest script, but for these choices."""
    plainest = {name: options[0] for name, options in FIELDS.items()}
    return sensible(Sketch(seed, plainest | choices, model=model))


@pytest.mark.parametrize("optimizer", ["by_hand", "sgd", "two", "lbfgs"])
def test_disturbed_runs_are_disturbed_with_an_optimizer_and_without(runner, tmp_path, optimizer):
    case = Case(script_of(1, "mlp", optimizer=optimizer), runner, "cpu", tmp_path)
    outcome, facts = case.plain
    path = tmp_path / "disturbed"
    disturbed = facts_of(runner.disturbed(case.script, path, 4e-7, 1))
    assert outcome.code == 0
    assert facts["stdout 0"] == disturbed["stdout 0"]  # the first loss comes before the first update
    weights = [name for name in facts if name.startswith("final.pt.state.modules.0.") and "keys" not in name]
    moved = [name for name in weights if differences({name: facts[name]}, {name: disturbed[name]})]
    assert moved == weights


def test_a_gradient_that_is_nothing_but_rounding_is_no_difference_without_an_optimizer(runner, tmp_path):
    case = Case(script_of(188, "cnn_norm", inputs="pictures", optimizer="by_hand"), runner, "cpu", tmp_path)
    bias = "final.pt.gradients.4"  # of a convolution before a batch norm
    assert case.plain[1][bias].abs().max() < 1e-6 < 1e-3 < case.plain[1]["final.pt.gradients.3"].abs().max()
    how, wrong, outcome = case.check(Way("plan", {"layout": "channels_last"}))
    assert (how, wrong) == ("rounded", []), outcome.told


UPDATE = "p.data.sub_(0.05 * p.grad.to_dense())"
GRADIENTS = "p.grad.to_dense() for p in PARAMETERS"


class Faulty:
    """A runner under which a plan of another layout trains with a fault."""

    def __init__(self, runner, right, wrong):
        self._runner, self._right, self._wrong = runner, right, wrong
        self.alone, self.disturbed = runner.alone, runner.disturbed

    def under(self, script, folder, plan):
        text = script.read_text()
        assert text.count(self._right) == 1
        faulty = script.with_name("faulty.py")
        faulty.write_text(text.replace(self._right, self._wrong))
        outcome = self._runner.alone(faulty, folder)
        outcome.plans = [{"numerics.layout": "channels_last"}]
        return outcome


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (UPDATE, UPDATE),
        (UPDATE, f"{UPDATE} if p.ndim > 1 else {UPDATE.replace('0.05', '0.05 * 1.01')}"),
        (UPDATE, f"{UPDATE} if p is not PARAMETERS[1] else None"),
        (UPDATE, f"{UPDATE} if p is not PARAMETERS[1] or updates != 15 else None"),
        (GRADIENTS, f"(p is not PARAMETERS[1]) * {GRADIENTS}"),
    ],
    ids=["no fault", "biases updated by 1 % too much", "a bias not updated", "one update lost", "a gradient lost"],
)
def test_faults_of_a_bias_are_differences_without_an_optimizer(runner, tmp_path, right, wrong):
    for model, inputs in (("mlp", "vectors"), ("cnn", "pictures")):
        one = script_of(2, model, inputs=inputs, optimizer="by_hand")
        how, found, outcome = Case(one, Faulty(runner, right, wrong), "cpu", tmp_path).check(Way("max"))
        assert (how, outcome.code, bool(found)) == ("rounded", 0, wrong != right), found


class Planted:
    """A runner under which each script that draws from numpy in its loop prints one line more under hotlap."""

    def alone(self, script, folder):
        return self._ran(folder, [])

    def under(self, script, folder, plan):
        return self._ran(folder, ["more"] if "np.random.rand(2)" in script.read_text() else [])

    def _ran(self, folder, lines):
        (folder / "work").mkdir(parents=True)
        return Outcome(0, lines, [], "", folder / "work")


def test_sparse_tensors_in_files_and_addresses_in_errors_are_compared(tmp_path):
    def facts(name, numbers, address):
        (tmp_path / name).mkdir()
        torch.save({"momentum": torch.tensor(numbers).to_sparse()}, tmp_path / name / "final.pt")
        return facts_of(Outcome(0, [], [f"PicklingError: <function f at {address}>"], "", tmp_path / name))

    truth = facts("alone", [1.0, 0.0], "0x7fee7efe7560")
    assert differences(truth, facts("same", [1.0, 0.0], "0x7fee7eec8220")) == []
    assert len(differences(truth, facts("other", [2.0, 0.0], "0x7fee7efe7560"))) == 1


def test_a_difference_is_shrunk_to_the_part_that_makes_it(tmp_path):
    one = next(
        sketch(seed) for seed in range(1000) if "draws_numpy" in sketch(seed).habits and len(str(sketch(seed))) > 120
    )
    way = Way("max")
    case = Case(one, Planted(), "cpu", tmp_path)
    assert case.check(way)[:2] == ("exact", ["stdout lines: 0 / 1", "stdout 0: 1 figures under hotlap alone"])
    shrunk = shrink(Finding(way, [], "differs", one), Planted(), "cpu", tmp_path, most_tries=200)
    assert str(shrunk) == "model=mlp, draws_numpy"

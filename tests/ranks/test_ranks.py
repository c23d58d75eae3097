"""Several ranks train as one process does. They run in forks of a python, with gloo on the CPU."""

import json

import pytest
import torch
from ranked import ALSO_FOUR, CASES, job

from hotlap import fit
from hotlap.core.errors import HotlapError
from hotlap.ranks.leader import ranks_wanted

ROUNDING = 1e-10


def said(forks, tmp_path, code, **variables):
    done = forks.run("-c", code, cwd=tmp_path, OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr
    return done


def test_ranks_come_to_the_weights_losses_and_scores_of_one_process_whatever_feeds_them(forks, tmp_path):
    names = [*CASES]
    found = json.loads(said(forks, tmp_path, f"import ranked; ranked.compare(*{names!r})").stdout)
    assert len(found) == len(names) + len(ALSO_FOUR)
    assert {name: one for name, one in found.items() if not (one["gap"] < ROUNDING and one["same"])} == {}


def test_fit_on_two_ranks_is_the_run_of_one_and_leaves_one_folder(forks, tmp_path):
    code = """
import json, ranked
ranked.by_forks()
one, two = ranked.fitted("one"), ranked.fitted("two", gpus=2)
print(json.dumps([ranked.gap(one, two), str(two[0].plan), sorted(p.name for p in two[0].files.path.iterdir())]))
"""
    gap, plan, files = json.loads(said(forks, tmp_path, code).stdout)
    assert gap < ROUNDING
    assert plan.endswith("eager, 2 ranks")
    assert {"model.safetensors", "metrics.jsonl", "ledger.jsonl"} <= set(files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_run_of_two_ranks_goes_on_with_one_and_with_four(forks, tmp_path):
    code = """
import json, shutil, ranked
ranked.by_forks()
whole = ranked.fitted("whole", epochs=3)
ranked.fitted("two", epochs=1, gpus=2, save_every=4)
shutil.copytree("two", "one"), shutil.copytree("two", "four")
one = ranked.fitted("one", epochs=3, resume=True)
four = ranked.fitted("four", epochs=3, resume=True, gpus=4)
print(json.dumps([ranked.gap(whole, one), ranked.gap(whole, four), str(one[0].plan), str(four[0].plan)]))
"""
    *gaps, one, four = json.loads(said(forks, tmp_path, code).stdout)
    assert max(gaps) < ROUNDING
    assert one.endswith(" eager")
    assert four.endswith("eager, 4 ranks")


def test_a_rank_killed_within_an_epoch_is_named_and_the_run_comes_to_the_same_weights(forks, tmp_path):
    code = """
import json, signal, ranked
ranked.by_forks()
one = ranked.fitted("one", save_every=3)
two = ranked.fitted("two", save_every=3, gpus=2, loss=ranked.Struck(signal.SIGKILL, 9, "struck"))
print(json.dumps([ranked.gap(one, two), [[e.what, e.why] for e in two[0].ledger if e.outcome == "fault"]]))
"""
    gap, faults = json.loads(said(forks, tmp_path, code).stdout)
    assert gap < ROUNDING
    ((what, why),) = faults
    assert what == "rank lost"
    assert "rank 1 (process " in why
    assert why.endswith("was killed by SIGKILL, at step 8; started again, from step 6 on")
    assert (tmp_path / "struck").exists()


def test_a_rank_that_hangs_is_named_and_replaced(forks, tmp_path):
    code = """
import json, signal, ranked
ranked.by_forks()
one = ranked.fitted("one")
two = ranked.fitted("two", gpus=2, loss=ranked.Struck(signal.SIGSTOP, 5, "struck"))
print(json.dumps([ranked.gap(one, two), [e.why for e in two[0].ledger if e.what == "rank lost"]]))
"""
    gap, (why, *_) = json.loads(said(forks, tmp_path, code, HOTLAP_HANG_S="10").stdout)
    assert gap < ROUNDING
    assert "is stopped and has not answered for 10 s, at step 4; started again, from step 0 on" in why


def test_a_script_without_a_guard_that_has_used_torch_trains_on_two_ranks_with_its_own_classes(forks, tmp_path):
    code = """
import json, hotlap, torch, ranked

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = ranked.network()
    def forward(self, x):
        return self.inner(x)

(torch.randn(64, 64, requires_grad=True) @ torch.randn(64, 64)).sum().backward()
bare = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
one, two = (
    hotlap.fit(ranked.job(model=Net(), optimizer=bare), plan="off", gpus=gpus, out=f"run{gpus}") for gpus in (1, 2)
)
print(json.dumps(max(float((a - b).abs().max()) for a, b in zip(one.model.parameters(), two.model.parameters()))))
"""
    done = said(forks, tmp_path, code)
    assert json.loads(done.stdout) < ROUNDING
    assert "2 ranks" in done.stderr
    assert "note   on the CPU, gpus=2 means 2 processes, each with a part of the cores" in done.stderr
    assert "note   each batch of 9 samples is shared by 2 ranks, 5 at most each" in done.stderr


def test_a_parameter_without_a_part_in_the_loss_is_noticed_before_an_update_is_made_without_it(forks, tmp_path):
    code = """
import json, ranked
from torch import nn
ranked.by_forks()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.unused = ranked.network(), nn.Linear(2, 2).double()
    def forward(self, x):
        return self.inner(x)
made = Net()
one, two = (ranked.fitted(f"run{gpus}", gpus=gpus, model=ranked.copy.deepcopy(made)) for gpus in (1, 2))
print(json.dumps([ranked.gap(one, two), [e.why for e in two[0].ledger if e.outcome == "fault"]]))
"""
    gap, (why,) = json.loads(said(forks, tmp_path, code).stdout)
    assert gap < ROUNDING
    assert why.startswith("a parameter that requires gradients has no part in the loss; from here on")


def test_an_error_on_another_rank_ends_the_run_with_its_text_and_the_rank(forks, tmp_path):
    code = """
import os, ranked, torch
ranked.by_forks()
first = os.getpid()
def prepare(batch):
    if os.getpid() != first:
        raise ValueError("no such colour")
    return batch
import hotlap
hotlap.fit(ranked.job(prepare=prepare), plan="off", gpus=2, out="run", progress=False)
"""
    done = forks.run("-c", code, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 1
    assert "TrainingError: rank 1 (process " in done.stderr
    assert "): ValueError: no such colour" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "error"),
    [(3, "gpus=3 asks for 3 GPUs, and there are 2"), (0, "gpus=0 must be 'all' or a whole number"), ("two", "'two'")],
)
def test_gpus_that_are_not_there_are_refused_in_one_line(monkeypatch, gpus, error):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(HotlapError, match=error):
        ranks_wanted(gpus, torch.device("cuda"))
    assert ranks_wanted("all", torch.device("cuda")) == 2


def test_all_gpus_of_a_machine_without_any_are_refused():
    with pytest.raises(HotlapError, match="gpus='all' needs a GPU; on the CPU, gpus=2 tries two processes"):
        ranks_wanted("all", torch.device("cpu"))


def test_ranks_that_are_not_there_are_refused_in_a_plan():
    with pytest.raises(HotlapError, match=r"execution\.ranks=2 needs as many processes, and there is 1"):
        fit(job(), plan={"ranks": 2}, progress=False)


def test_data_changed_in_place_reaches_the_other_ranks(forks, tmp_path):
    code = """
import json, ranked
ranked.by_forks()
found = []
for gpus in (1, 2):
    x, y = ranked.columns()
    def change(record):
        x.mul_(-1.0)
    found.append(ranked.fitted(f"run{gpus}", gpus=gpus, data=(x, y), on_evaluation=change))
print(json.dumps(ranked.gap(*found)))
"""
    assert json.loads(said(forks, tmp_path, code).stdout) < ROUNDING

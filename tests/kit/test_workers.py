"""`hotlap workers`: the real step under each way to bring batches; who is best and whether it matters."""

import json
import time
from functools import partial

import pytest
import torch
from plain import parameters_of
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from typer.testing import CliRunner

import hotlap
from hotlap import Feed, Job, Sequences
from hotlap.cli import app
from hotlap.kit import samples
from hotlap.kit import workers as kit
from hotlap.kit import workers as scripts
from hotlap.kit.bench import opened
from hotlap.kit.probe import ProbeRequest, ProbeResult, run_probe
from hotlap.kit.probe_process import ScriptWatch
from hotlap.kit.workers import Setting, WorkersFound, best_of, counts, words_of
from hotlap.script.running import Target
from hotlap.tuner.stats import Estimate

WAIT_S = 0.004


class Slow(Dataset):
    """Waits for each sample, as for a disk; every sample is drawn anew each time, so that none can be held."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(WAIT_S)
        return torch.randn(6), index % 3


def job(data, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    settings = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    return Job(model=model, data=data, epochs=1, device="cpu", **{**settings, **changes})


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(kit, "LAP_S", 0.02)
    monkeypatch.setattr(kit, "MOST_QUADS", 2)
    monkeypatch.setattr("hotlap.kit.bench.BLOCK_S", 0.001)


def test_every_way_that_can_be_is_timed_and_the_job_is_left_as_it_was(quick, monkeypatch):
    monkeypatch.setattr(kit, "counts", lambda cores: [0, 2])
    mine = job(DataLoader(Slow(), batch_size=4, shuffle=True))
    first, chance = parameters_of(mine.model).clone(), torch.get_rng_state()
    found = hotlap.workers(mine, progress=False)
    timed = [one for one in found.settings if one.step_s is not None]
    assert {one.feed.workers for one in timed} == {0, 1, 2}  # 1, since it lies between those that were asked for
    assert all(one.step_s > 0 and one.start_s >= 0 for one in timed)
    # Two workers wait for four samples as long as one does for two. (Some of a lap's may have been ready before.)
    assert min(one.step_s for one in timed) > WAIT_S
    assert found.own.feed.workers == 0
    refused = {one.feed.kind: one.why_not for one in found.settings if one.why_not}
    assert set(refused) == {"gather", "stream", "resident"}
    assert json.loads(json.dumps(found.to_dict()))["settings"]
    assert torch.equal(parameters_of(mine.model), first)
    assert torch.equal(torch.get_rng_state(), chance)
    assert not mine.optimizer.state


def by_made_up_laps(monkeypatch, data, laps, **more):
    """What is found where laps are as long as these say: the real ones depend on who else is at work."""
    asked = []

    def lap_s(self, feed):
        asked.append(feed)
        return laps(feed)

    monkeypatch.setattr(kit._JobFeeds, "_lap_s", lap_s)
    monkeypatch.setattr(kit, "counts", lambda cores: [0, 1, 2])
    return hotlap.workers(job(data, **more), progress=False), asked


def test_a_slow_dataset_is_told_how_many_workers_pay_and_how_much(quick, monkeypatch):
    data = DataLoader(Slow(), batch_size=4)
    found, asked = by_made_up_laps(monkeypatch, data, lambda feed: {0: 0.04, 1: 0.041, 2: 0.01}[feed.workers])
    assert found.best_count == found.best.feed.workers == 2
    assert found.matters
    assert found.compared.ratio == pytest.approx(4)
    assert "DataLoader(num_workers=2, persistent_workers=True): 4x [4, 4] as fast as no workers" in found.advice
    assert any(feed.prefetch == 4 for feed in asked)  # for the best count
    own, best = found.own.feed, found.best.feed
    assert asked[-4:] == [own, best, best, own]


def test_data_in_memory_is_told_that_workers_do_not_pay(quick, monkeypatch):
    data = torch.randn(64, 6), torch.randint(3, (64,))
    found, _ = by_made_up_laps(monkeypatch, data, lambda feed: 0.004 if feed.kind == "loader" else 0.001, batch_size=4)
    assert found.best_count == 0
    assert found.best.is_own
    assert found.own.feed == Feed(kind="gather")
    assert not found.matters
    assert found.advice.startswith("nothing: ")


def test_batches_of_several_widths_are_compared_over_the_very_same_ones(quick, monkeypatch):
    monkeypatch.setattr(kit, "read_cpu", lambda: type("Cpu", (), {"cores": 1}))
    monkeypatch.setattr(kit, "LAP_S", 10.0)  # laps would last until then, were they timed
    lengths = [1 + n % 9 for n in range(40)]
    data = Sequences({"x": [torch.ones(n, dtype=torch.long) for n in lengths]}, columns={"y": torch.zeros(40)})
    model = nn.Embedding(3, 1)
    forward = lambda model, batch: (model(batch["x"]).mean((1, 2)), batch["y"])  # noqa: E731
    settings = {"loss": nn.MSELoss(), "optimizer": lambda p: torch.optim.SGD(p, 0.1), "batch_size": 4, "epochs": 1}
    found = hotlap.workers(Job(model=model, data=data, forward=forward, device="cpu", **settings), progress=False)
    assert {one.feed.kind for one in found.settings if one.step_s} == {"gather", "loader", "resident"}


def test_never_more_workers_than_cores():
    assert counts(1) == [0, 1]
    assert counts(2) == [0, 1, 2]
    assert counts(6) == [0, 1, 2, 4, 6]
    assert counts(16) == [0, 1, 2, 4, 8, 16]


def setting(workers, step_s, *, is_own=False, kind="loader"):
    feed = Feed(kind=kind, workers=workers)
    return Setting(words=words_of(feed), feed=feed, is_own=is_own, step_s=step_s)


def found_of(*settings, verdict=None, bare_s=None):
    estimate = Estimate(ratio=2.0, low=1.8, high=2.2, noise=0.01, quads=4)
    return WorkersFound(
        name="x", device="cpu", cores=4, settings=settings, bare_s=bare_s, compared=estimate, verdict=verdict
    )


def test_of_ways_that_are_near_each_other_the_one_with_the_fewest_workers_is_named():
    own, two, four = setting(0, 0.020, is_own=True), setting(2, 0.0103), setting(4, 0.010)
    assert best_of([own, two, four]) is two
    assert best_of([own, setting(2, 0.012), four]) is four
    assert best_of([setting(0, 0.0104, is_own=True), four]).is_own


def test_a_gain_is_told_with_its_interval_and_none_where_it_may_be_chance():
    own, two = setting(0, 0.020, is_own=True), setting(2, 0.010)
    assert "2x [1.8, 2.2] as fast as no workers" in found_of(own, two, verdict="accepted").advice
    unsure = found_of(own, two, verdict="no difference seen")
    assert not unsure.matters
    assert unsure.advice == (
        "nothing: no setting is certainly faster than no workers; 2 workers: 2x [1.8, 2.2] as fast, which may be chance"
    )
    assert "does not wait for batches" in found_of(own, bare_s=0.0199).advice
    assert "as it is" in found_of(own, two).summary()


SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.randn(6), index % 3

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(1000):
    for x, y in DataLoader(Slow(), batch_size=4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_scripts_loader_is_tried_with_other_workers(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.setattr(scripts, "counts", lambda cores: [0, 2])
    monkeypatch.setattr(scripts, "ProbeRequest", partial(ProbeRequest, laps=3))
    done = CliRunner().invoke(app, ["workers", "--json", "--quiet", str(tmp_path / "mine.py")])
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    own, two, *others = found["settings"]
    one_worker, *finer = [one for one in others if one["feed"]["kind"] == "loader"]
    refused = {one["feed"]["kind"]: one["why_not"] for one in others if one["why_not"]}
    assert set(refused) == {"gather", "stream", "resident"}
    assert refused["gather"].startswith("Slow draws from torch's generator")
    assert "draws from torch's generator" in refused["resident"]
    assert (own["is_own"], own["feed"]["workers"], two["feed"]["workers"]) == (True, 0, 2)
    assert min(own["step_s"], own["start_s"]) > 4 * 0.001  # samples of a batch are waited for one by one
    assert min(two["step_s"], two["start_s"]) > 0
    assert one_worker["feed"]["workers"] == 1  # between the two, whichever is best
    assert one_worker["step_s"] > 0
    assert found["best_workers"] in (0, 1, 2)
    assert [one["feed"]["prefetch"] for one in finer] == [4] * len(finer)
    assert all(one["step_s"] > 0 for one in finer)


IN_MEMORY = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
loader = DataLoader(TensorDataset(torch.randn(400, 6), torch.arange(400) % 3), batch_size=4, shuffle=True)
for epoch in range(1000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_a_scripts_batches_are_gathered_as_hotlap_run_does_and_it_is_seen_that_they_are(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(IN_MEMORY)
    monkeypatch.chdir(tmp_path)
    seen = run_probe(Target(path="mine.py"), ProbeRequest(laps=2, lap_s=0.02, feed="gather"))
    assert seen.why_not is None
    assert set(seen.refused) == {"stream", "resident"}
    assert len(seen.laps) == 2
    assert (seen.loader, seen.batch_size, seen.samples_an_update) == (0, 4, 4)
    assert seen.first_batch_s > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]  # no run folder is left


def test_a_loader_that_is_made_anew_for_each_epoch_is_changed_each_time_and_no_other_is(tmp_path):
    data, few = TensorDataset(torch.arange(12)), TensorDataset(torch.arange(4))
    made = lambda dataset: DataLoader(dataset, batch_size=2)  # noqa: E731
    watch = ScriptWatch(ProbeRequest(loader=1, change={"batch_size": 3}), tmp_path / "seen.json", "mine")
    with watch:
        sizes = [[made(few).batch_size, DataLoader(data).batch_size, made(data).batch_size] for _ in range(3)]
        by_name = {name: made(one).batch_size for name, one in (("train", data), ("valid", few))}
    assert sizes == [[2, 3, 2]] * 3
    assert by_name == {"train": 2, "valid": 2}


class Script:
    """Somebody's script that takes made-up times under each feed, and cannot be streamed to."""

    def __init__(self, monkeypatch, times):
        self.times, self.asked = times, []
        monkeypatch.setattr(scripts, "run_probe", self.run_probe)
        monkeypatch.setattr(scripts, "counts", lambda cores: [0, 1])

    def run_probe(self, target, request):
        way = request.feed or request.change.get("num_workers", 0)
        self.asked.append(way)
        refused = {"stream": "it cannot be"} if request.feed else {}
        if isinstance(self.times[way], str):
            return ProbeResult(why_not=self.times[way], refused=refused)
        laps = [[self.times[way], 4]] * 5
        return ProbeResult(
            laps=laps, samples_an_update=4, loader=0, device="cuda:0", first_batch_s=0.5, refused=refused
        )


def test_where_another_feed_pays_a_script_is_told_the_command_that_has_it(monkeypatch):
    made_up = Script(monkeypatch, {0: 0.04, 1: 0.05, "gather": 0.02, "resident": 0.01})
    found = scripts.workers_of_script(Target(path="my train.py", args=["--epochs", "3"]))
    assert found.best.feed.kind == "resident"
    assert found.best.start_s == 0.5
    assert found.advice.startswith("`hotlap run 'my train.py' --epochs 3`, which tries it by itself: 4x")
    assert {one.feed.kind: one.why_not for one in found.settings if one.why_not} == {"stream": "it cannot be"}
    assert "stream" not in made_up.asked  # that it cannot be was known before
    assert made_up.asked.count("gather") == 2
    assert made_up.asked[-4:] == [0, "resident", "resident", 0]


@pytest.mark.parametrize(("seconds", "is_told"), [(120, False), (0, True)])
def test_a_script_that_was_lucky_where_it_was_chosen_is_not_told_of_a_gain_while_there_is_time(
    seconds, is_told, monkeypatch
):
    made_up = Script(monkeypatch, {0: 0.04, 1: 0.05, "gather": 0.05, "resident": 0.02})
    first = made_up.run_probe(None, scripts.ProbeRequest())
    until = scripts.time.monotonic() + seconds
    probes = scripts._ScriptFeeds(Target(path="train.py"), first, seconds, until, say=lambda line: None)
    resident = Feed(kind="resident")
    for feed in (resident, resident, probes.own):
        probes.look(feed)
    made_up.times["resident"] = 0.04
    assert (probes.compared(resident).verdict == "accepted") is is_told


def test_a_feed_that_was_not_obeyed_is_not_counted_and_not_tried_again(monkeypatch):
    made_up = Script(monkeypatch, {0: 0.04, 1: 0.01, "gather": "given up", "resident": "given up, too"})
    found = scripts.workers_of_script(Target(path="train.py"))
    reasons = {one.feed.kind: one.why_not for one in found.settings if one.why_not}
    assert reasons == {"gather": "given up", "stream": "it cannot be", "resident": "given up, too"}
    assert made_up.asked.count("resident") == made_up.asked.count("gather") == 1
    assert "not tried: given up, too" in found.summary()
    assert found.advice.startswith("DataLoader(num_workers=1")


@pytest.mark.parametrize(
    ("feed", "on_gpu", "others"),
    [
        (Feed(kind="gather"), True, []),
        (Feed(kind="loader"), False, []),
        (Feed(kind="loader"), True, [(0, True, None)]),
        (Feed(kind="loader", workers=2, pinned=True), True, [(2, False, None), (2, True, 4)]),
        (Feed(kind="loader", workers=2), False, [(2, False, 4)]),
    ],
)
def test_prefetching_and_pinning_are_tried_for_the_best_count(feed, on_gpu, others):
    assert [(one.workers, one.pinned, one.prefetch) for one in kit.finer(feed, on_gpu=on_gpu)] == others


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ({0: 9.0, 1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0, 16: 1.3}, [6, 12]),
        ({0: 9.0, 1: 8.0, 2: 4.0, 4: 2.0, 6: 1.0}, [5]),
        ({0: 9.0, 1: 8.0, 2: 1.0, 4: 2.0}, [3]),
        ({0: 1.0, 1: 2.0, 2: 3.0}, []),
        ({0: 2.0, 2: None}, []),
        ({}, []),
    ],
)
def test_counts_next_to_the_best_are_tried_too(steps, found):
    settings = [setting(count, step_s) for count, step_s in steps.items()]
    whole = Setting(words="held", feed=Feed(kind="resident"), step_s=0.1)
    assert [feed.workers for feed in kit.nearer([*settings, whole], on_gpu=True)] == found
    assert all(feed.pinned and feed.persistent for feed in kit.nearer([*settings, whole], on_gpu=True))


# --- transforms -------------------------------------------------------------------------------------------


class Compose:
    """As torchvision has it."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


class Noise:
    def __call__(self, x):
        time.sleep(0.004)
        return x + torch.randn(x.shape)


def halved(x):
    time.sleep(0.001)
    return x / 2


class Transformed(Dataset):
    def __init__(self, transform, target_transform=None):
        self.transform, self.target_transform, self.unused_transform = transform, target_transform, halved

    def __len__(self):
        return 100

    def __getitem__(self, index):
        x = torch.full((4,), float(index))
        return self.transform(x), index % 3


def test_each_transform_is_told_with_its_cost_and_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(samples, "TIMED", 8)
    mine = Transformed(Compose([Noise(), Compose([halved])]))
    before, chance = dict(vars(mine)), torch.get_rng_state()
    for dataset in (mine, Subset(mine, range(50))):
        noise, half, rest = samples.costs_of(dataset)
        assert (noise.name, half.name, rest.name) == ("Noise", "halved", "all else")
        assert noise.sample_s >= 0.004
        assert half.sample_s >= 0.001
    both = samples.costs_of(ConcatDataset([mine, Transformed(Noise())]))
    assert [one.name for one in both] == ["Noise", "halved", "Noise", "all else"]
    assert vars(mine) == before
    assert mine.transform.transforms[1].transforms == [halved]
    assert torch.equal(torch.get_rng_state(), chance)


def test_a_dataset_without_transforms_or_one_that_cannot_be_read_tells_none():
    class Broken(Transformed):
        def __getitem__(self, index):
            raise KeyError(index)

    assert samples.costs_of([1, 2, 3]) == ()
    assert samples.costs_of(TensorDataset(torch.ones(3))) == ()
    assert samples.costs_of(Broken(halved)) == ()


def test_the_cost_of_transforms_stands_in_what_workers_tells(quick, monkeypatch):
    monkeypatch.setattr(samples, "TIMED", 4)
    monkeypatch.setattr("hotlap.kit.workers.read_cpu", lambda: type("Cpu", (), {"cores": 1}))
    model = nn.Linear(4, 3)
    mine = Job(
        model=model, data=DataLoader(Transformed(halved), batch_size=4), loss=nn.CrossEntropyLoss(), epochs=1,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu",
    )  # fmt: skip
    found = hotlap.workers(mine, progress=False)
    assert [one.name for one in found.transforms] == ["halved", "all else"]
    assert "in one process: halved " in found.summary()
    assert found.to_dict()["transforms"][0]["name"] == "halved"


def test_a_last_shorter_batch_counts_in_the_step_at_hand_as_in_laps(quick, monkeypatch):
    def step_s(bench, *windows):
        return float(sum(map(sum, (window.sizes for window in windows))))

    monkeypatch.setattr("hotlap.kit.bench.Bench.step_s", step_s)
    data = TensorDataset(torch.randn(20, 6), torch.randint(3, (20,)))
    for size, mean in ((16, 10.0), (10, 10.0), (8, (8 + 8 + 4) / 3)):
        with opened(job(DataLoader(data, batch_size=size))) as bench:
            assert kit._JobFeeds(bench, 10.0, lambda line: None)._bare_s() == pytest.approx(mean)

"""`hotlap diff`: what hotlap changed, as lines that one would write. `patch` applies each diff, and the script runs."""

import hashlib
import json
import runpy
import shutil
import subprocess

import finished_runs
import pytest
import torch

from hotlap.cli import reports
from hotlap.core.errors import StoreError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Feed, Plan
from hotlap.report.by_hand import by_hand
from hotlap.report.reading import read_run
from hotlap.store.run_folder import RunFolder

OWN = Plan(feed=Feed(kind="loader"))
NAMES = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
x, y = torch.randn(200, 8), torch.randint(0, 2, (200,))
"""
PLAIN = (
    NAMES
    + """
data = TensorDataset(x, y)
loader = DataLoader(data, 32, shuffle=True)
model = nn.Linear(8, 2)
optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=1e-2,  # found by hand
)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        output = model(a)
        loss = nn.functional.cross_entropy(output, b)
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.5f}")
"""
)
FUNCTIONS = '''"""A script of functions, as many are."""
import argparse
import torch.nn as nn
import torch.optim as optim
from torch.utils import data

def made():
\ttorch.manual_seed(3)
\timages, labels = torch.randn(96, 3, 8, 8), torch.randint(0, 2, (96,))
\ttrain = data.DataLoader(data.TensorDataset(images[:64], labels[:64]), batch_size=16, shuffle=True, num_workers=0)
\treturn train, data.DataLoader(data.TensorDataset(images[64:], labels[64:]), batch_size=16)

def trained(net, batches, opt, device):
\tfor step, (pictures, classes) in enumerate(batches):
\t\tpictures, classes = pictures.to(device), classes.to(device)
\t\topt.zero_grad()
\t\tloss = nn.functional.cross_entropy(net(pictures), classes)
\t\tloss.backward(); opt.step()
\tprint(f"{loss.item():.5f}")

def main():
\tdevice = "cpu"
\ttrain_loader, test_loader = made()
\tmodel = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)).to(device)
\topt = optim.SGD(model.parameters(), lr=0.1)
\tfor epoch in range(3):
\t\ttrained(model, train_loader, opt, device)
\twith torch.no_grad():
\t\tprint(sum(float(model(pictures).sum()) for pictures, _ in test_loader) < 1e9)

if __name__ == "__main__":
\timport torch
\tmain()
'''


@pytest.fixture
def made(tmp_path):
    """Makes the folder of a run of `hotlap run` that ended under another plan than it began."""

    def make(script, after, *, before=OWN, gpus=(), file="train.py"):
        path = tmp_path / file
        path.write_text(script)
        folder = RunFolder.create(tmp_path / "run")
        ledger = Ledger()
        ledger.record(Entry(step=0, what="start", outcome="chosen", plan=before))
        ledger.record(Entry(step=9, what="changed", outcome="chosen", plan=after))
        folder.write_ledger(ledger)
        folder.write_environment({"gpus": [{"name": one} for one in gpus]})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        words = ["hotlap", "run", file]
        folder.write_started({"command": "run", "script": "train", "words": words, "file": str(path), "sha256": digest})
        folder.write_plan(after)
        return tmp_path / "run"

    return make


@pytest.fixture
def written(made, capsys):
    """What `hotlap diff` prints for a script that ended under another plan, and the script as `patch` leaves it."""

    def write(script, after, **more):
        folder = made(script, after, **more)
        reports.diff(folder, as_json=False)
        text = capsys.readouterr().out
        shutil.copy(folder.parent / "train.py", folder.parent / "patched.py")
        if "\n--- " not in text:
            return text, script
        done = subprocess.run(["patch", "patched.py"], input=text, cwd=folder.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        return text, (folder.parent / "patched.py").read_text()

    return write


@pytest.fixture
def printed(tmp_path, capsys):
    """Runs a script and gives the numbers that it prints."""
    benchmark, products = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()

    def run(file):
        capsys.readouterr()
        runpy.run_path(str(tmp_path / file), run_name="__main__")
        return [float(line) for line in capsys.readouterr().out.splitlines() if line[0].isdigit()]

    yield run
    torch.backends.cudnn.benchmark = benchmark
    torch.set_float32_matmul_precision(products)


@pytest.mark.parametrize(
    "script", [PLAIN, FUNCTIONS.replace("import argparse", "import torch")], ids=["plain", "functions"]
)
@pytest.mark.parametrize(
    "after",
    [
        OWN.but(optimizer="fused", autotune=True, precision="tf32"),
        OWN.but(kind="gather"),
        OWN.but(kind="resident", optimizer="fused"),
        OWN.but(workers=2, prefetch=3),
    ],
    ids=["fused", "gathered", "held", "workers"],
)
def test_the_diff_applies_and_the_script_trains_to_the_same_losses(written, printed, script, after):
    text, patched = written(script, after)
    assert "write by hand" not in text
    assert patched != script
    assert printed("patched.py") == pytest.approx(printed("train.py"), abs=2e-5)


def test_what_hotlap_run_changed_in_a_real_script_is_patched_into_it(forks, tmp_path):
    script = finished_runs.SCRIPT + "    print(float(loss(model(x), y)))\n"
    (tmp_path / "train.py").write_text(script)
    ran = forks.run("-m", "hotlap", "run", "--plan", "max", "--out", "run", "train.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = forks.run("-m", "hotlap", "diff", "run", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)" in told.stdout
    done = subprocess.run(["patch", "train.py"], input=told.stdout, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "train.py").read_text() != script
    own, under = (forks.run("train.py", cwd=tmp_path).stdout, ran.stdout)
    assert [float(line) for line in own.split()] == pytest.approx([float(line) for line in under.split()], rel=1e-4)


def test_half_precision_goes_around_the_statements_from_the_model_to_its_loss(written, printed):
    text, patched = written(PLAIN, OWN.but(precision="bf16"))
    assert (
        '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            output = model(a)\n            loss = '
        in patched
    )
    assert "compare scores" in text
    assert printed("patched.py") == pytest.approx(printed("train.py"), rel=0.05)


def test_pictures_and_the_model_are_laid_out_with_their_channels_last(written, printed):
    script = FUNCTIONS.replace("import argparse", "import torch")
    text, patched = written(script, OWN.but(layout="channels_last", precision="bf16"))
    assert "\tmodel = model.to(memory_format=torch.channels_last)\n\topt = " in patched
    turned = "\t\tpictures = pictures.to(memory_format=torch.channels_last)\n"
    assert f'{turned}\t\twith torch.autocast("cpu", dtype=torch.bfloat16):\n\t\t\tloss = ' in patched
    assert "write by hand" not in text
    assert printed("patched.py") == pytest.approx(printed("train.py"), rel=0.1)


def test_on_a_gpu_data_is_held_there_and_copies_wait_for_nothing(written):
    script = PLAIN.replace("loss = nn", "b = b.to('cuda')\n        loss = nn")
    _, held = written(script, OWN.but(kind="resident"), gpus=["NVIDIA H200"])
    assert 'data = TensorDataset(x.to("cuda"), y.to("cuda"))' in held
    compile(held, "held.py", "exec")


def test_workers_on_a_gpu_pin_their_batches_and_copies_wait_for_nothing(written):
    script = PLAIN.replace("output = model(a)", "a, b = a.to(device), b.cuda()\n        output = model(a)")
    text, patched = written(script, OWN.but(workers=4, persistent=True, pinned=True), gpus=["NVIDIA H200"])
    assert "DataLoader(data, 32, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)" in patched
    assert "a, b = a.to(device, non_blocking=True), b.cuda(non_blocking=True)" in patched
    assert "batches come in another order" in text


def test_arguments_that_the_loader_has_are_replaced(written):
    script = PLAIN.replace("32, shuffle=True)", "32, num_workers=(1), shuffle=True)")
    _, patched = written(script, OWN.but(workers=2), before=OWN.but(workers=1))
    assert "DataLoader(data, 32, num_workers=2, shuffle=True)" in patched


@pytest.mark.parametrize(
    ("before", "after", "plan", "why"),
    [
        ("torch.optim.AdamW(", "make_optimizer(", {"optimizer": "fused"}, "makes no optimizer of torch's by its name"),
        ("lr=1e-2,", "lr=1e-2, foreach=True,", {"optimizer": "fused"}, "chooses the kind of its update itself"),
        ("torch.optim.AdamW(\n    model.parameters(),", "torch.optim.AdamW(\n    **given,", {"optimizer": "fused"},
         "chooses the kind"),
        ("TensorDataset(x, y)", "Pairs(x, y)", {"kind": "gather"}, "only a TensorDataset"),
        ("shuffle=True", "sampler=mine", {"kind": "gather"}, "chooses batches itself: sampler"),
        ("shuffle=True", "shuffle=mixed", {"kind": "gather"}, "shuffles or not"),
        ("in loader:", "in loader or []:", {"workers": 2}, "does not tell which DataLoader"),
        ("data = Tensor", "DataLoader = Mine\ndata = Tensor", {"workers": 2}, "does not tell which DataLoader"),
        ("loader = Data", "loader = mine()\nloader = Data", {"workers": 2}, "does not tell which DataLoader"),
        ("loss.backward()", "nn.functional.cross_entropy(output, b).backward()", {"precision": "bf16"}, "at once"),
        ("output = model(a)", "output = model(a) + model(b)", {"precision": "bf16"}, "in 2 places"),
        ("loss = nn", "print('''a\n  b''')\n        loss = nn", {"precision": "bf16"}, "other statements stand"),
        ("loss.backward()", "loss.backward(); loss.backward()", {"precision": "bf16"}, "2 backward passes"),
        ("import torch\n", "import torch\ntorch.backends.cudnn.benchmark = False\n", {"autotune": True}, "itself"),
        ("output = model(a)", "output = model(a, b)", {"layout": "channels_last"}, "more than one batch of images"),
    ],
)  # fmt: skip
def test_where_a_place_is_not_certain_lines_are_written_by_hand_and_nothing_is_guessed(
    written, before, after, plan, why
):
    script = PLAIN.replace(before, after)
    assert script != PLAIN
    text, patched = written(script, OWN.but(**plan))
    assert patched == script
    assert "# write by hand: " in text
    assert why in text


def test_a_part_of_tensors_is_gathered_and_a_scheduler_is_no_optimizer(written, printed):
    script = PLAIN.replace(
        "data = TensorDataset(x, y)",
        "data, rest = torch.utils.data.random_split(TensorDataset(x, y), [160, 40])",
    ).replace("for epoch", "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\nfor epoch", 1)
    text, patched = written(script, OWN.but(kind="gather", optimizer="fused"))
    assert "write by hand" not in text
    assert "BatchSampler(RandomSampler(data), 32, drop_last=False)" in patched
    assert "StepLR(optimizer, 2)\n" in patched
    assert printed("patched.py") == pytest.approx(printed("train.py"), abs=2e-5)


def test_a_capture_has_no_short_equivalent_and_the_run_says_how_to_make_it_again(written):
    text, patched = written(PLAIN, OWN.but(mode="captured", optimizer="fused"), gpus=["NVIDIA H200"])
    assert "fused=True" in patched
    assert "no short equivalent; run it with: hotlap run --plan " in text
    assert "with torch.cuda.graph(graph):" in text


def test_a_script_that_is_gone_or_has_changed_gets_lines_alone(made, tmp_path, capsys):
    folder = made(PLAIN, OWN.but(optimizer="fused"))
    (tmp_path / "train.py").write_text(PLAIN + "# later\n")
    reports.diff(folder, as_json=False)
    text = capsys.readouterr().out
    assert "train.py has changed since the run" in text
    assert "optimizer = torch.optim.AdamW(model.parameters(), …, fused=True)" in text
    assert all(line.startswith("#") for line in text.splitlines())
    (tmp_path / "train.py").unlink()
    assert "No such file" in by_hand(read_run(folder))[0].notes[-1]


@pytest.mark.parametrize("script", [PLAIN.replace("\n", "\r\n"), "print(\n", "x = '\x1b]0;a\x07'\n"])
def test_a_script_that_no_terminal_can_show_gets_lines_alone(made, script):
    found = by_hand(read_run(made(script, OWN.but(optimizer="fused"))))[0]
    assert found.diff == ""
    assert "lines alone" in found.notes[-1]


def test_a_run_that_changed_nothing_says_so(made, capsys):
    reports.diff(made(PLAIN, OWN), as_json=False)
    assert "hotlap changed nothing" in capsys.readouterr().out


def test_a_run_of_fit_gets_lines_of_pytorch(tmp_path, capsys):
    import hotlap

    hotlap.fit(
        finished_runs.small_job(epochs=1), plan=Plan().but(optimizer="fused"), out=tmp_path / "fit", progress=False
    )
    reports.diff(tmp_path / "fit", as_json=True)
    (found,) = json.loads(capsys.readouterr().out)["trainings"]
    assert found["diff"] == ""
    assert found["left"][0]["lines"] == ["optimizer = torch.optim.AdamW(model.parameters(), …, fused=True)"]


def test_a_script_that_trained_twice_gets_lines_for_each_training(made):
    folder = made(PLAIN, OWN.but(optimizer="fused"))
    shutil.copytree(folder, folder / "training-2")
    found = by_hand(read_run(folder))
    assert [one.diff for one in found] == ["", ""]
    assert "trained several times" in found[0].notes[-1]


def test_a_folder_without_a_ledger_is_refused_with_a_reason(made):
    folder = made(PLAIN, OWN)
    (folder / "ledger.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="what was changed"):
        by_hand(read_run(folder))

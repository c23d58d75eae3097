"""The benchmarks on texts compare trainings that are the same, and report padding, ratios and quality."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
import torch
from benchmarks.text_rivals import BUCKET, BertByHand, PricedByHand, bucketed
from benchmarks.work import called
from tiny_texts import bert_work, deberta_work
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hotlap
from benchmarks import fast_path, quality, text_rivals, texts, trainings, whole_run
from hotlap.data.order import mix

pytest.importorskip("transformers")
CPU = torch.device("cpu")
WORKS = [bert_work(), deberta_work()]
EITHER = pytest.mark.parametrize("work", WORKS, ids=["bert", "deberta"])


def weights(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def shuffled(work, steps):
    """The first texts of the order that everybody has who does not reorder."""
    order = []
    for epoch in range(-(-steps // work.epoch_batches)):
        generator = torch.Generator().manual_seed(mix(0, epoch))
        drawn = torch.randperm(len(work.data().train), generator=generator)
        order += drawn[: work.epoch_batches * work.batch].view(-1, work.batch)
    return order[:steps]


# --- data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("work", "median", "longest"), [(0, 49, 192), (1, 120, 384)])
def test_lengths_are_drawn_with_the_stated_median_and_cut_at_the_longest(work, median, longest):
    train = texts.text_works()[work].data().train
    assert train.lengths.max() == longest
    assert float(train.lengths.median()) == pytest.approx(median, rel=0.05)
    assert int(train.tokens.min()) == 1
    assert len(train) % texts.text_works()[work].batch == 0


@EITHER
def test_a_batch_is_padded_with_zeros_that_its_mask_hides(work):
    rows = work.data().train.rows()
    batch = work.first_batch(CPU)
    assert batch["input_ids"].shape == (8, BUCKET * -(-max(map(len, rows[:8])) // BUCKET))
    for ids, mask, row in zip(batch["input_ids"], batch["attention_mask"], rows, strict=False):
        assert torch.equal(ids[: len(row)], row)
        assert int(ids[len(row) :].sum()) == 0
        assert mask.tolist() == [1] * len(row) + [0] * (len(ids) - len(row))


def test_held_out_texts_are_all_there_and_none_is_trained_on():
    work = deberta_work()
    held = torch.cat([batch["numbers"] for batch, _ in work.held_batches(CPU)])
    assert len(held) == sum(count for _, count in work.held_batches(CPU)) == 512
    assert not {*map(tuple, held.tolist())} & {*map(tuple, work.data().train.columns["numbers"].tolist())}


def written(tmp_path, count=40):
    file = tmp_path / "news.csv"
    lines = [f'"{1 + k % 4}","Title {k}","Said ""{k % 4}"", and {"more " * (k % 7)}"' for k in range(count)]
    file.write_text("\n".join(lines) + "\n")
    return file


def test_texts_of_a_file_have_their_own_lengths_and_classes(tmp_path):
    data = texts.read(written(tmp_path), held=8)
    assert (len(data.train), len(data.held)) == (32, 8)
    assert data.train.columns["labels"].tolist() == [k % 4 for k in range(32)]
    longer = data.train.lengths[6] - data.train.lengths[0]
    assert longer == 6
    first, last = data.train.rows()[0][0], data.train.rows()[0][-1]
    assert (texts.SPECIAL[first], texts.SPECIAL[last]) == ("[CLS]", "[SEP]")


def test_a_file_of_another_form_is_refused_with_what_it_holds(tmp_path):
    file = tmp_path / "other.csv"
    file.write_text("1,one,two\n2,three\n")
    with pytest.raises(ValueError, match="row 2 has fewer; give a CSV file with the columns class, title"):
        texts.read(file, held=1)
    with pytest.raises(ValueError, match=r"it has 40 rows, 512 are held out; give"):
        texts.read(written(tmp_path))


def test_a_file_that_cannot_be_used_ends_the_command_with_one_line(tmp_path, capsys):
    file = tmp_path / "none.csv"
    assert fast_path.main(["--texts", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--texts {file}: ")


# --- rivals --------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("pads_to", ["the longest of all", "the batch's longest"])
def test_the_guides_loops_train_the_numbers_of_a_plain_loop(work, pads_to):
    fixed = pads_to == "the longest of all"
    data, model, widths = work.data(), work.build(), []
    model.register_forward_pre_hook(
        lambda _, args, given: widths.append((args[0] if args else given["input_ids"]).shape[1]), with_kwargs=True
    )
    steps = (text_rivals.guide_before if fixed else text_rivals.dynamic)(work, model, data, CPU)
    assert [next(steps) for _ in range(14)] == [work.batch] * 14
    chosen = shuffled(work, 14)
    longest = [int(data.train.lengths[some].max()) for some in chosen]
    assert widths == ([data.longest] * 14 if fixed else longest)
    plain = work.build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=work.lr)
    rows = data.train.rows()
    for some, width in zip(chosen, widths, strict=True):
        ids = nn.utils.rnn.pad_sequence([rows[k] for k in some], batch_first=True)
        ids = nn.functional.pad(ids, (0, width - ids.shape[1]))
        batch = {name: column[some] for name, column in data.train.columns.items()}
        optimizer.zero_grad()
        work.task.loss(plain, {"input_ids": ids, "attention_mask": (ids > 0).long(), **batch}).backward()
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


def test_by_hand_every_text_comes_once_an_epoch_but_those_that_fill_no_batch():
    lengths = bert_work().data().train.lengths
    epochs = [bucketed(lengths, 8, epoch) for epoch in range(3)]
    for batches, widths in epochs:
        assert batches.shape == (6, 8)
        assert len(batches.unique()) == 48
        assert all(width % BUCKET == 0 for width in widths)
        longest = lengths[batches].amax(1).tolist()
        assert all(0 <= width - most < BUCKET for width, most in zip(widths, longest, strict=True))
    assert len({tuple(batches.flatten().tolist()) for batches, _ in epochs}) == 3


def test_by_hand_batches_hold_texts_of_similar_length():
    lengths = texts.text_works()[0].data().train.lengths
    batches, widths = bucketed(lengths, 16, 0)
    spread = (lengths[batches].amax(1) - lengths[batches].amin(1)).float().mean()
    by_chance = lengths[: len(batches) * 16].view(-1, 16)
    assert spread < 0.1 * (by_chance.amax(1) - by_chance.amin(1)).float().mean()
    assert sorted(set(widths)) == [32, 64, 96, 128, 160, 192]


@EITHER
def test_by_hand_and_hotlap_have_the_same_losses_on_the_same_batches(work):
    """Dropout and all: on a CPU both draw the same."""
    data = work.data()
    batches, widths = bucketed(data.train.lengths, work.batch, 0)
    hand = (PricedByHand if work.task is texts.PRICES else BertByHand)(work, work.build(), data, CPU)
    theirs = []
    for chosen, width in zip(batches, widths, strict=True):
        before = hand.running.clone()
        hand.indices.copy_(chosen)
        hand.step(width)
        theirs.append(float(hand.running - before))
    rig = trainings.make_rig(work, work.build(), trainings.fast_plan(work, CPU), CPU)
    given = data.train.sequences(widths=sorted(set(widths)))
    windows = rig.feed(given, batch_size=work.batch, epochs=1, drop_last=True, order=batches.flatten().tolist())
    mine = [float(rig.step(window)) for window in windows]
    rig.close()
    assert mine == pytest.approx(theirs, rel=1e-3)
    torch.testing.assert_close(weights(rig.model), weights(hand.model), rtol=5e-3, atol=5e-4)


class Seen(TorchDispatchMode):
    """The operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        self.names.add(function.overloadpacket._qualified_op_name)
        return function(*args, **(kwargs or {}))


@EITHER
def test_a_step_by_hand_reads_nothing_back_and_brings_nothing_from_the_host(work):
    """What a capture would refuse: the library's own call of these models does one or the other."""
    refused = {"aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh"}
    hand = (PricedByHand if work.task is texts.PRICES else BertByHand)(work, work.build(), work.data(), CPU)
    hand.update(96)
    with Seen() as by_hand:
        hand.update(96)
    with Seen() as plain:
        work.judge(work.build(), work.first_batch(CPU))
    assert not by_hand.names & refused
    assert plain.names & refused


def test_by_hand_tells_the_samples_of_every_step():
    work = bert_work()
    steps = text_rivals.by_hand(work, work.build(), work.data(), CPU)
    assert [next(steps) for _ in range(14)] == [8] * 14


@EITHER
def test_hotlap_reorders_and_its_other_columns_do_not(work):
    seen = {}
    for column in ("hotlap", "by_width", "one_width"):
        model, widths = work.build(), []
        model.register_forward_pre_hook(
            lambda _, args, given, widths=widths: widths.append((args[0] if args else given["input_ids"]).shape[1]),
            with_kwargs=True,
        )
        steps = trainings.engine(work, model, CPU, trainings.fast_plan(work, CPU), column=column)
        assert [next(steps) for _ in range(work.epoch_batches)] == [work.batch] * work.epoch_batches
        steps.close()
        seen[column] = widths
    longest = [int(work.data().train.lengths[some].max()) for some in shuffled(work, work.epoch_batches)]
    assert set(seen["one_width"]) == {96}
    assert all(width - most >= 0 for width, most in zip(seen["by_width"], longest, strict=True))
    assert sum(seen["hotlap"]) < 0.8 * sum(seen["by_width"]) < 0.8 * sum(seen["one_width"])


@pytest.mark.parametrize("way", text_rivals.TRAINER_WAYS)
def test_the_trainer_is_timed_in_whole_rounds_and_pads_as_it_is_told(way, monkeypatch):
    pytest.importorskip("accelerate")
    widths = []

    def noted(model, batch):
        widths.append(batch["input_ids"].shape[1])
        return texts.bert_loss(model, batch)

    monkeypatch.setattr(text_rivals, "TRAINER_WORKERS", 1)
    monkeypatch.setattr(text_rivals, "WINDOW", 6)
    work = replace(bert_work(), task=texts.CLASSES._replace(loss=noted))
    found = text_rivals.hf_trainer(work, way, CPU, laps=2, lap_s=0.2, warm_s=0.0)
    a_round = 6 if way == "grouped by length" else 1
    assert len(found) == 2
    assert all(samples % (a_round * work.batch) == 0 and seconds >= 0.2 for samples, seconds in found)
    assert len(widths) == a_round + sum(samples for samples, _ in found) // work.batch
    if not text_rivals.TRAINER_WAYS[way].is_dynamic:
        assert set(widths) == {work.data().longest}
    else:
        assert {width % 8 for width in widths} == {0}
        assert len(set(widths)) > 1


def test_without_accelerate_the_trainer_says_so_and_nothing_fails(monkeypatch, capsys):
    real = importlib.import_module

    def without(name):
        if name == "accelerate":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    assert fast_path.main([*SHORT, "--columns", "hf_trainer"], [bert_work()]) == 0
    assert "BERT, tiny, hf_trainer: accelerate is not installed" in capsys.readouterr().out


def test_without_transformers_texts_are_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(texts.importlib.util, "find_spec", lambda name: None)
    assert not [work for work in fast_path.all_works() if isinstance(work, texts.TextWork)]
    assert capsys.readouterr().err == "texts are left out: transformers is not installed\n"


# --- the report ----------------------------------------------------------------------------------------

SHORT = ["--device", "cpu", "--seconds", "0.05", "--warm-seconds", "0", "--laps", "1", "--pairs", "2"]


def test_the_report_of_texts_tells_padding_ratios_and_quality(capsys, tmp_path):
    work, file = bert_work(), tmp_path / "found.json"
    columns = "guide_before,dynamic,by_hand,hotlap,lightning,compiled,quality"
    options = [*SHORT, "--columns", columns, "--quality-steps", "25", "--json", str(file)]
    assert fast_path.main(options, [work]) == 0
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{work.name}: 52 texts, the median has ") for line in told)
    assert any("padding" in line and "% at each batch's longest in shuffled order" in line for line in told)
    assert any("hotlap reordered: " in line and " widths: " in line for line in told)
    assert any(line.startswith(f"{work.name}: hotlap is ") and "x as fast as guide_before, " in line for line in told)
    assert any(line.startswith(f"{work.name}: loss of steps 6–25: fp32 ") for line in told)
    found = json.loads(file.read_text())["works"][work.name]
    assert found["ratios"].keys() == {"hotlap/by_hand"}
    assert found["samples_per_s"].keys() == {"guide_before", "dynamic", "by_hand", "hotlap"}
    assert found["quality"]["fast"]["last"] == pytest.approx(found["quality"]["fp32"]["last"], rel=0.02)
    assert found["quality"]["fp32"]["held_out"] < 0.9 * quality.held_out(work, work.build(), CPU)


@EITHER
def test_less_is_padded_the_more_lengths_count(work):
    found = texts.Paddings.of(work)
    assert 0 < found.reordered < found.dynamic <= found.by_width < found.at_longest
    lengths = work.data().train.lengths
    longest = sum(int(lengths[some].max()) for some in shuffled(work, 6))
    used = sum(int(lengths[some].sum()) for some in shuffled(work, 6))
    assert found.dynamic == pytest.approx(1 - used / (work.batch * longest))
    assert found.at_longest == pytest.approx(1 - used / (6 * work.batch * 90))


def test_a_lap_of_batches_of_several_widths_is_a_whole_epoch():
    work = bert_work()
    rounds = {name: fast_path.steps_a_round(work, name) for name in (*fast_path.TEXTS, "guide_after")}
    assert {rounds[name] for name in ("by_hand", "hotlap", "one_width", "by_width")} == {6}
    assert (rounds["guide_before"], rounds["guide_after"], rounds["dynamic"]) == (1, 2, 16)


def test_the_best_of_the_trainers_settings_is_its_column_and_all_are_told(monkeypatch, capsys):
    rates = dict(zip(text_rivals.TRAINER_WAYS, (300, 200, 100, 50), strict=True))
    monkeypatch.setattr(text_rivals, "hf_trainer", lambda work, way, *_, **__: [(rates[way], 1.0)] * 3)
    assert fast_path.main([*SHORT, "--columns", "hf_trainer,by_hand,hotlap"], [bert_work()]) == 0
    told = capsys.readouterr().out
    best = "best of 300 grouped by length, 200 to each batch's longest, 100 to the longest of all, 50 to the longest"
    assert f"BERT, tiny, hf_trainer: {best} of all with clipping and checks, as it comes\n" in told
    assert "x as fast as hf_trainer" in told


def test_texts_of_a_file_are_trained_on_by_option(monkeypatch, tmp_path, capsys):
    file = written(tmp_path, 560)
    assert fast_path.parsed(["--texts", str(file), "--device", "cuda"]).columns == list(fast_path.TEXTS)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    made = texts.bert
    monkeypatch.setattr(texts, "bert", lambda **settings: made(**settings, **small))
    work = replace(texts.file_work(file), lap_s=0.0)
    monkeypatch.setattr(fast_path, "file_work", lambda given: work if given == file else None)
    assert fast_path.main([*SHORT, "--texts", str(file), "--columns", "one_width,by_width,hotlap"]) == 0
    told = capsys.readouterr().out
    assert "BERT-base on news.csv, batch 16: 48 texts" in told
    assert "hotlap/one_width" in told
    assert "hotlap/by_width" in told
    assert work.build().config.num_labels == 4


def test_without_a_gpu_the_padding_of_a_file_is_told_and_nothing_is_trained(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(texts.TextWork, "build", lambda work: pytest.fail("a model was built"))
    assert fast_path.main(["--device", "cpu", "--texts", str(written(tmp_path, 560))]) == 0
    assert "BERT-base on news.csv, batch 16: 48 texts, the median has " in capsys.readouterr().out


def test_some_works_are_compiled_under_a_capture_and_take_turns_with_hotlap():
    works = [work for work in fast_path.all_works() if fast_path.applies("compiled", work)]
    compiled = {
        "Transformer d128, batch 128": "model",
        "ResNet-18, batch 256": "model",
        "BERT-base, batch 16": "blocks",
    }
    assert {work.name: work.compiles for work in works} == compiled
    for work in works:
        assert ("hotlap", "compiled") in fast_path.contests(work, torch.device("cuda"))
        plan = trainings.fast_plan(work, torch.device("cuda")).but(compile=work.compiles)
        assert plan.execution.mode == "captured"


def test_works_are_called_by_the_beginnings_of_words():
    works = fast_path.all_works()
    assert [work.name for work in called(works, "BERT")] == ["BERT-base, batch 16"]
    assert [work.name for work in called(works, "deberta")] == ["DeBERTa-base with numbers, batch 8"]
    assert [work.name for work in called(works, "batch 256")] == ["MLP, batch 256", "ResNet-18, batch 256"]
    assert called(works, "") == called(works) == list(works)


# --- whole runs ----------------------------------------------------------------------------------------


@EITHER
def test_a_whole_run_brings_sequences_and_the_leave_to_reorder_and_nothing_else(work, tmp_path):
    job = whole_run.user_job(work, CPU, steps=5, drop_last=False)
    assert isinstance(job.data, hotlap.Sequences)
    assert (job.reorder, job.batch_size, job.drop_last) == (True, work.batch, False)
    found = whole_run.fitted(work, job, CPU, plan="off", out=tmp_path / "run")
    assert (found["steps"], found["samples"]) == (5, 5 * work.batch)


def test_the_rival_of_a_whole_run_makes_as_many_steps_as_it_is_told():
    found = whole_run.by_hand(bert_work(), CPU, steps=15, seconds=60.0)
    assert (found["steps"], found["samples"]) == (15, 120)


@EITHER
def test_a_process_of_a_whole_run_makes_as_many_steps_as_it_is_told(work, monkeypatch, tmp_path):
    monkeypatch.setattr(whole_run, "works", lambda: WORKS)
    given = ["--work", work.name, "--folder", str(tmp_path), "--device", "cpu", "--steps", "12", "--alone"]
    for what in ("by_hand", "fit"):
        assert whole_run.main([*given, what]) == 0
        found = json.loads((tmp_path / whole_run.FOUND).read_text())
        assert (found["steps"], found["samples"]) == (12, 92 if what == "fit" else 96)


def test_whole_runs_have_enough_texts_to_see_each_a_few_times_only():
    of_texts = [work for work in whole_run.works() if isinstance(work, texts.TextWork)]
    assert [len(work.data().train) for work in of_texts] == [24_000, 24_000]

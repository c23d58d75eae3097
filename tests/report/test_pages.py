"""A report holds what the files of its run say, in the order of the sections, as HTML, Markdown and JSON."""

import json
import re
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path

import pytest
from finished_runs import LEDGER, fitted, small_job, tuned

import hotlap
from hotlap.core.errors import StoreError
from hotlap.machine import find_gpu
from hotlap.machine.prediction import as_it_is_s, at_best_s, work_in
from hotlap.report import report_of, write_report
from hotlap.report.document import Chart, Checklist, Code, Table

ORDER = (
    "search",
    "moves",
    "curves",
    "jobs",
    "scores",
    "mistakes",
    "pace",
    "usage",
    "phases",
    "gpus",
    "reuse",
    "data",
    "settings",
)
ORDER += ("files", "checklist", "repeat")
KINDS = ("fit", "trees", "search", "temporal", "script")
VOID = {"meta", "link", "br", "path", "circle", "rect"}


class Outline(HTMLParser):
    """What a page is made of; complains of tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self.open and self.open[-1] in VOID and self.open[-1] != tag:
            self.open.pop()
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            assert tag in VOID, (tag, self.open)

    def find(self, tag, name, value):
        return next(found for one, found in self.tags if one == tag and found.get(name) == value)

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag, **attributes):
        return sum(one == tag and attributes.items() <= found.items() for one, found in self.tags)


def keys(report):
    return [part.key for part in report.sections]


def blocks(report, key, kind):
    (part,) = [part for part in report.sections if part.key == key]
    return [block for block in part.blocks if isinstance(block, kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_small_whole_and_needs_nothing_else(runs, kind):
    path = write_report(runs / kind)
    text = path.read_text(encoding="utf-8")
    assert path == runs / kind / "report.html"
    assert len(text) < 1_000_000
    page = Outline(text)
    assert len(page.ids) == len(set(page.ids))
    assert [found for _, found in page.tags if {"src", "srcset", "action"} & set(found)] == []
    links = [found["href"] for tag, found in page.tags if tag in ("a", "link")]
    assert [link for link in links if not link.startswith(("#", "data:,"))] == []
    assert {link[1:] for link in links if link.startswith("#")} <= set(page.ids)
    assert "url(" not in text.replace("url(#hatch)", "")
    assert page.count("script") == 1
    policy = page.find("meta", "http-equiv", "Content-Security-Policy")["content"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_has_its_figures_in_a_table_and_a_name(runs, kind):
    report = report_of(runs / kind)
    charts = [block for part in report.sections for block in part.blocks if isinstance(block, Chart)]
    page = Outline(write_report(runs / kind).read_text(encoding="utf-8"))
    assert page.count("figure") == len(charts) > 0
    assert page.count("svg", role="img") == len(charts)
    assert all(chart.table.rows and chart.title for chart in charts)
    assert all(found.get("aria-label") for tag, found in page.tags if tag == "svg" and found.get("role") == "img")


@pytest.mark.parametrize("kind", KINDS)
def test_markdown_and_json_say_the_same(runs, kind, tmp_path):
    report = report_of(runs / kind)
    text = write_report(runs / kind, tmp_path / "report.md").read_text(encoding="utf-8")
    found = json.loads(write_report(runs / kind, tmp_path / "report.json").read_text(encoding="utf-8"))
    assert re.findall("^## (.*)$", text, re.M) == [part.title for part in report.sections]
    assert found["headline"] == report.headline
    assert [part["key"] for part in found["sections"]] == keys(report)
    tables = [block for part in report.sections for block in part.blocks if isinstance(block, Chart | Table)]
    checks = [block for part in report.sections for block in part.blocks if isinstance(block, Checklist)]
    rows = sum(len((block.table if isinstance(block, Chart) else block).rows) + 2 for block in tables)
    rows += sum(len(block.checks) + 2 for block in checks) + len(report.tiles) + 2
    assert len(re.findall(r"^\|", text, re.M)) == rows


def test_sections_come_in_one_order_and_only_where_there_is_something_in_them(runs):
    for kind in KINDS:
        found = keys(report_of(runs / kind))
        if kind != "search":
            assert "search" not in found
        assert found == [key for key in ORDER if key in found]
    assert not {"scores", "mistakes", "data"} & set(keys(report_of(runs / "fit")))
    assert {"scores", "mistakes", "reuse", "data"} <= set(keys(report_of(runs / "temporal")))
    assert {"phases", "repeat"} <= set(keys(report_of(runs / "script")))


# --- what the sections say ----------------------------------------------------------------------------


def test_the_headline_gives_the_gain_with_its_interval_and_what_stayed_the_same(runs):
    report = report_of(runs / "fit")
    assert report.headline == "2.0x [1.90, 2.10] as fast a step as under the plan it began with; the same maths"
    assert any("tuning about" in line for line in report.lead)
    assert any("accuracy" in line for line in report.lead)


def test_a_run_that_kept_nothing_says_so(tmp_path):
    tuned(tmp_path / "run", [entry for entry in LEDGER if entry["what"] != "fused optimizer"])
    assert report_of(tmp_path / "run").headline == "Left as it was: 1 move tried, none kept"


def test_moves_are_listed_with_what_became_of_each_and_why(runs):
    report = report_of(runs / "fit")
    (chart,) = blocks(report, "moves", Chart)
    listed = {row[1]: row[-1] for row in chart.table.rows}
    assert listed["fused optimizer"] == "kept: same maths"
    assert listed["16-bit precision"] == "rejected: slower"
    assert listed["workers that fetch ahead"] == "not tried: too dear"
    (folded,) = blocks(report, "moves", Table)
    assert folded.is_folded
    assert folded.rows == [("whole step captured", "needs a GPU")]


def test_the_waterfall_has_a_bar_for_each_measured_move(runs):
    (chart,) = blocks(report_of(runs / "fit"), "moves", Chart)
    drawn = "".join(chart.picture.parts)
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="18" rx="2" class="(\w+)', drawn)
    assert [kind for *_, kind in bars] == ["bar", "bar", "ghost", "bar"]
    (left, whole, _), (begins, saved, _), *_ = [(float(x), float(width), kind) for x, width, kind in bars]
    assert saved == pytest.approx(whole / 2, abs=0.2)  # it took half of the step off
    assert begins == pytest.approx(left + whole / 2, abs=0.2)


def test_curves_have_a_point_for_each_evaluation_and_the_best_simple_rule(runs):
    charts = {chart.title: chart for chart in blocks(report_of(runs / "fit"), "curves", Chart)}
    assert set(charts) == {"Loss", "accuracy on validation"}
    assert len(charts["Loss"].table.rows) == 8
    assert "".join(charts["accuracy on validation"].picture.parts).count('class="mark') == 8
    drawn = {chart.title: chart for chart in blocks(report_of(runs / "temporal"), "curves", Chart)}
    assert "most frequent class" in "".join(drawn["accuracy on validation"].picture.parts)


def test_the_phases_of_a_run_come_to_its_whole_time(runs):
    for kind in ("fit", "temporal"):
        (chart, *_) = blocks(report_of(runs / kind), "phases", Chart)
        spent = {row[0]: row[1].value for row in chart.table.rows}
        if kind == "fit":
            ended = json.loads((runs / "fit" / "record.json").read_text())["ended"]
            assert sum(spent.values()) == pytest.approx(ended["total_s"], rel=0.01)
            assert {"setup", "tuning", "training", "evaluation"} <= set(spent)
        else:
            assert {"data and features", "model mlp", "simple rules", "folds"} <= set(spent)


def test_a_recipe_shows_models_beside_simple_rules_and_its_mistakes(runs):
    report = report_of(runs / "temporal")
    (chart,) = blocks(report, "scores", Chart)
    assert {row[0] for row in chart.table.rows} >= {"mlp", "most frequent class"}
    assert chart.table.head[-1] == "training"
    assert next(row for row in chart.table.rows if row[0] == "mlp")[-1].value > 0
    confusion = next(one for one in blocks(report, "mistakes", Chart) if one.title == "Confusion of classes")
    counts = [[cell.value for cell in row[1:]] for row in confusion.table.rows]
    said = json.loads((runs / "temporal" / "report.json").read_text())
    assert counts == said["models"]["mlp"]["confusion"]
    assert len(blocks(report, "mistakes", Table)[-1].rows) == len(said["worst"])


def test_numbers_have_their_answers_beside_the_true_ones(runs, tmp_path):
    from hotlap.report.reading import read_run
    from hotlap.report.recipe_sections import mistakes

    run = read_run(runs / "temporal")
    run.scores = {
        "best": "m",
        "models": {"m": {"rmse": 1.0}},
        "answered": {"of": 9, "true": [1, 2, 3], "answered": [1, 3, 2]},
    }
    (chart,) = mistakes(run)
    assert [row[2].value for row in chart.table.rows] == [0, 1, -1]
    assert "".join(chart.picture.parts).count('class="mark') == 3


def test_a_search_shows_all_trials_and_its_best(runs):
    report = report_of(runs / "search")
    chart, *_ = blocks(report, "search", Chart)
    said = json.loads((runs / "search" / "search.json").read_text())
    assert len(chart.table.rows) == len(said["trials"]) == 5
    assert chart.table.marked == (said["best"] - 1,)
    assert "the best of 5 trials" in report.headline
    assert "name of a value" in chart.table.head


def test_a_script_says_what_it_came_to_and_the_command_that_repeats_it(runs):
    report = report_of(runs / "script")
    assert any("by the plan that you chose" in line for line in report.lead)
    (code,) = blocks(report, "repeat", Code)
    assert code.text == "hotlap run train.py"


def test_samples_of_the_machine_are_drawn_with_the_moments_that_matter(tmp_path):
    tuned(tmp_path / "run")
    lines = [
        {
            "at": 1000.0 + at,
            "step": 10 * at,
            "host": {"cores": 4, "cores_busy": 1.5, "own_ram_bytes": 2**30},
            "gpus": [{"busy": 0.1 * at, "memory_used_bytes": at * 2**30, "memory_bytes": 2**35}],
            **({"gap_s": 2.0} if at == 5 else {}),
        }
        for at in range(10)
    ]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = report_of(tmp_path / "run")
    charts = {chart.title: chart for chart in blocks(report, "usage", Chart)}
    assert {"GPU in use (%)", "GPU memory (GiB)", "Cores in use (cores)", "Memory of the host (GiB)"} == set(charts)
    assert [row[2].value for row in charts["GPU memory (GiB)"].table.rows] == pytest.approx(list(range(10)))
    assert 'class="grid event"' in "".join(charts["GPU in use (%)"].picture.parts)
    said = " ".join(
        block.words for block in report.sections[keys(report).index("usage")].blocks if hasattr(block, "words")
    )
    assert "; none for 2 s" in said
    assert "tuning ends" in said


def test_runs_held_against_are_a_band_behind_the_curves(tmp_path):
    from hotlap.report.reading import read_run
    from hotlap.report.sections import report_on

    for seed in range(3):
        fitted(tmp_path / str(seed), seed=seed, epochs=3)
    runs = [read_run(tmp_path / str(seed)) for seed in range(3)]
    report = report_on(runs[0], runs[1:])
    assert all('class="band"' in "".join(chart.picture.parts) for chart in blocks(report, "curves", Chart))
    alone = report_on(runs[0])
    assert not any('class="band"' in "".join(chart.picture.parts) for chart in blocks(alone, "curves", Chart))


# --- the checklist -------------------------------------------------------------------------------------


def checks(report):
    (found,) = blocks(report, "checklist", Checklist)
    return {check.what: check for check in found.checks}


def test_the_checklist_finds_what_is_wrong_with_a_run(tmp_path):
    run = fitted(tmp_path / "good")
    good = checks(report_of(run.folder))
    assert good["the training loss falls"].outcome == good["validation data"].outcome == "ok"
    job = small_job(epochs=3)
    without = hotlap.Job(
        model=job.model, data=job.data, loss=job.loss, optimizer=job.optimizer, batch_size=20, epochs=3
    )
    bad = hotlap.fit(without, plan="off", out=tmp_path / "bad", progress=False)
    assert checks(report_of(bad.folder))["validation data"].outcome == "look"


def test_a_model_that_overfits_is_named_with_its_best_epoch(tmp_path):
    run = fitted(tmp_path / "run")
    history = [
        {**record, "valid_loss": loss} for record, loss in zip(run.history, [9, 3, 1, 2, 3, 4, 5, 6], strict=True)
    ]
    run.files.write_metrics(history)
    found = checks(report_of(run.folder))["no overfitting"]
    assert found.outcome == "look"
    assert "best 1 at epoch 3, 6 at the end" in found.found


def test_a_loss_that_is_not_finite_and_validation_on_the_training_data_are_found(tmp_path):
    run = fitted(tmp_path / "run")
    run.files.write_metrics([{**record, "train_loss": float("nan")} for record in run.history])
    record = json.loads((run.folder / "record.json").read_text())
    data = record["facts"]["identity"]["data"]
    data["validation sha256"] = data["sha256"]
    (run.folder / "record.json").write_text(json.dumps(record))
    found = checks(report_of(run.folder))
    assert found["a finite training loss"].outcome == "look"
    assert found["validation data of its own"].outcome == "look"


# --- files ---------------------------------------------------------------------------------------------


def test_a_report_is_written_anew_and_no_other_file_is_replaced(tmp_path):
    run = fitted(tmp_path / "run")
    first = run.report()
    assert run.report() == first
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    with pytest.raises(StoreError, match=r"mine.html exists, and is no report of hotlap's"):
        run.report(mine)
    assert mine.read_text() == "<p>mine</p>"
    with pytest.raises(StoreError, match=r"ends in \.html, \.md or .json"):
        run.report(tmp_path / "report.pdf")


def test_a_link_is_not_followed_to_another_report(tmp_path):
    run = fitted(tmp_path / "run")
    other = run.report(tmp_path / "other.html")
    (run.folder / "report.html").symlink_to(other)
    with pytest.raises(StoreError, match="exists"):
        run.report()


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is not a run folder"):
        report_of(tmp_path)
    with pytest.raises(StoreError, match="does not exist"):
        report_of(tmp_path / "nowhere")


def test_a_recipe_writes_its_page_at_the_end(runs):
    assert (runs / "temporal" / "report.html").is_file()


def test_reading_and_writing_a_report_imports_no_torch(runs):
    code = """
        import sys
        from hotlap.report import write_report

        write_report(sys.argv[1])
        print("torch" in sys.modules)
    """
    words = [sys.executable, "-c", textwrap.dedent(code), str(runs / "fit")]
    source = str(Path(hotlap.__file__).parents[1])
    done = subprocess.run(words, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr


# --- many trainings in one folder ----------------------------------------------------------------------


def test_trainings_of_fit_many_are_one_report_with_the_spread_of_their_scores(tmp_path):
    for at in range(5):
        fitted(tmp_path / "many" / f"{at:04d}", seed=at, epochs=3)
    report = report_of(tmp_path / "many")
    assert report.kind == "fit_many"
    assert report.headline.startswith("5 trainings: accuracy 0.")
    (table,) = blocks(report, "jobs", Table)
    assert [row[0] for row in table.rows] == [f"job {at}" for at in range(1, 6)]
    found = checks(report)["the training loss falls"]
    assert (found.outcome, found.found) == ("ok", "in all 5 trainings")
    (loss, *_) = blocks(report, "curves", Chart)
    assert "".join(loss.picture.parts).count('class="line c') >= 5
    assert 'class="line train' not in "".join(loss.picture.parts)


def test_what_is_wrong_in_one_of_many_trainings_is_named(tmp_path):
    runs = [fitted(tmp_path / "many" / f"{at:04d}", seed=at, epochs=3) for at in range(5)]
    runs[3].files.write_metrics([{**record, "train_loss": float("nan")} for record in runs[3].history])
    found = checks(report_of(tmp_path / "many"))["a finite training loss"]
    assert found.outcome == "look"
    assert found.found.startswith("1 of 5 trainings, such as job 4: ")


def test_what_bound_a_training_is_said(tmp_path):
    run = fitted(tmp_path / "run")
    state = {"pid": 1, "at": 1000.0, "ended": True, "bound": {"by": "feeding", "why": "it waits", "answer": "workers"}}
    (run.folder / "live.json").write_text(json.dumps(state))
    (text, *_) = report_of(run.folder).sections[keys(report_of(run.folder)).index("usage")].blocks
    assert text.words == "Bound by feeding at the end: it waits. Answer: workers."


def test_moves_that_were_measured_against_other_plans_are_one_bar_with_the_total(tmp_path):
    entries = [dict(entry) for entry in LEDGER]
    at = next(at for at, entry in enumerate(entries) if entry["what"] == "fused optimizer")
    share = {"step_s": 0.015, "ratio": 1.3, "low": 1.2, "high": 1.4}  # a step that the total does not have
    entries.insert(at + 1, {**entries[at], "what": "data held on the device", "figures": share})
    tuned(tmp_path / "run", entries)
    (chart,) = blocks(report_of(tmp_path / "run"), "moves", Chart)
    drawn = "".join(chart.picture.parts)
    assert "+ fused optimizer, data held on the device" in drawn
    assert drawn.count("2.0x [1.90, 2.10]") >= 1
    assert "1.3" not in drawn


def test_tuning_that_cost_more_than_it_saved_is_no_speed_up(tmp_path):
    entries = [dict(entry) for entry in LEDGER]
    entries[-1]["figures"] = {**entries[-1]["figures"], "saved_s": -0.1}
    tuned(tmp_path / "run", entries)
    headline = report_of(tmp_path / "run").headline
    assert headline.startswith("No faster as a whole: tuning cost more than it saved. Since then 2.0x [1.90, 2.10]")


WORK = {"work_operations": 200.0, "work_launches": 150.0, "work_bytes": 4e9, "work_narrow_bytes": 2e9}
WORK |= {"work_flops_fp32": 5e11, "work_step_bytes": 1e8, "work_least_step_bytes": 1e8}


def counted(folder, **figures):
    """A tuned run whose update was counted."""
    entries = [dict(entry) for entry in LEDGER]
    at = next(at for at, entry in enumerate(entries) if entry["what"] == "baseline")
    entries[at]["figures"] = {**entries[at]["figures"], **WORK, **figures}
    return tuned(folder, entries)


def test_the_time_on_other_gpus_is_predicted_from_the_counted_update_with_its_error(tmp_path):
    run = counted(tmp_path / "run")
    report = report_of(tmp_path / "run")
    (table,) = blocks(report, "gpus", Table)
    rows = {row[0]: row[1:] for row in table.rows}
    work = work_in(WORK)
    assert work is not None
    h200 = find_gpu("h200")
    update, best, _, whole, whole_at_best, compared = rows[h200.name]
    assert (update.value, best.value) == (as_it_is_s(work, h200), at_best_s(work, h200))
    assert whole.value == pytest.approx(run.steps * update.value)
    assert whole_at_best.value == pytest.approx(run.steps * best.value)
    assert compared == "measured"
    assert {row[-1] for name, row in rows.items() if name != h200.name} == {"never measured"}
    text = write_report(tmp_path / "run", tmp_path / "report.md").read_text(encoding="utf-8")
    assert "## On other GPUs" in text
    assert "within 1.7x in 18 trainings on an H200" in text


def test_a_run_on_a_listed_gpu_corrects_the_prediction_by_its_own_time(tmp_path):
    run = counted(tmp_path / "run", step_s=0.5)
    gpu = {"name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 2**37}
    environment = json.loads((run.folder / "environment.json").read_text())
    (run.folder / "environment.json").write_text(json.dumps({**environment, "gpus": [gpu], "pretend": None}))
    state = {"pid": 1, "at": 1000.0, "ended": True, "device": "cuda:0", "steps": run.steps}
    (run.folder / "live.json").write_text(json.dumps(state))
    (table,) = blocks(report_of(run.folder), "gpus", Table)
    (at,) = table.marked
    assert table.rows[at][0] == find_gpu("h200").name
    assert table.rows[at][1].value == pytest.approx(0.5)


@pytest.mark.parametrize("figures", [{"work_bytes": -1.0}, {"work_operations": float("nan")}, {"work_other": 1.0}])
def test_figures_that_are_no_work_predict_nothing(tmp_path, figures):
    counted(tmp_path / "run", **figures)
    assert "gpus" not in keys(report_of(tmp_path / "run"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_can_be_diagnosed(runs, kind):
    from hotlap.monitor.aftermath import diagnose_run

    found = diagnose_run(runs / kind)
    assert found.name == kind
    assert not any(one.name in ("stopped", "unreadable") for one in found.found)
    assert all(one.change for one in found.found)

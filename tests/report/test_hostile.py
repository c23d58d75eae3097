"""What comes from files is data: names stay text wherever they stand, and no file ends a report."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from finished_runs import fitted, tuned

from hotlap.core.errors import StoreError
from hotlap.report import report_of, write_report
from hotlap.report.document import Chart, Code, Report, Section, Table, Text, Tile
from hotlap.report.reading import is_at_work, read_run, runs_in
from hotlap.report.rendering import as_json, html, markdown
from hotlap.report.runs import list_runs

CONTROLS = "\ud800\x1b[31m\u202e\x00"
NAMES = ["<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "a 'b' \"c\" & <d>", "{{ 7 * 7 }}{% raw %}"]


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))

    def handle_data(self, data):
        self.words.append(data)


def check(text, *names):
    """No name became markup, and each is there to be read."""
    page = Tags(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not [tag for tag, _ in page.tags if tag in ("img", "d", "b c")]
    assert not [name for _, found in page.tags for name, _ in found if name.startswith("on")]
    words = "".join(page.words) + "".join(value or "" for _, found in page.tags for _, value in found)
    for name in names:
        assert name in words


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_any_name_stays_text(tmp_path, name):
    folder = tmp_path / name.replace("/", "∕")
    fitted(folder, epochs=2)
    check(write_report(folder).read_text(encoding="utf-8"), folder.name)


@pytest.mark.parametrize("name", NAMES)
def test_moves_reasons_metrics_and_settings_of_any_name_stay_text(tmp_path, name):
    faster = {"step_s": 0.01, "ratio": 2.0, "low": 1.9, "high": 2.1}
    entries = [
        {"step": 0, "what": "baseline", "outcome": "chosen", "why": name, "figures": {"step_s": 0.02}},
        {"step": 1, "what": name, "outcome": "kept", "why": name, "figures": faster},
        {"step": 2, "what": name, "outcome": "fault", "why": name},
        {"step": 9, "what": "tuned", "outcome": "chosen", "figures": faster},
    ]
    run = tuned(tmp_path / "run", entries)
    run.files.write_metrics([{**record, name: 0.5} for record in run.history])
    run.files.write_environment({"versions": {name: name}, "gpus": [{"name": name}], "job": {name: name}})
    run.files.write_started({"words": ["hotlap", "demo", name]})
    check(write_report(run.folder).read_text(encoding="utf-8"), name)


@pytest.mark.parametrize("name", NAMES)
def test_models_classes_rules_and_mistakes_of_any_name_stay_text(runs, tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "options.toml").write_text('recipe = "text"\n', encoding="utf-8")
    one = {"rows": 9, "macro_f1": 0.5, "classes": {name: {"f1": 0.5}, "b": {}}, "confusion": [[1, 2], [3, 4]]}
    scores = {"best": name, "models": {name: one}, "baselines": {name: one}, "folds": {name: one}, "said": [name]}
    scores |= {"worst": [{"sample": name, "true": name, "answered": name}], "phases": {name: 1.0}, "left_out": [name]}
    (folder / "report.json").write_text(json.dumps(scores), encoding="utf-8")
    (folder / "recipe.json").write_text(json.dumps({"beaten_by": [name]}), encoding="utf-8")
    check(write_report(folder).read_text(encoding="utf-8"), name)


@pytest.mark.parametrize("name", NAMES)
def test_trials_of_any_name_stay_text(tmp_path, name):
    trials = [
        {"number": n, "state": name, "score": n, "values": {name: name}, "seconds": 1, "why": name} for n in (1, 2)
    ]
    search = {"monitor": name, "best": 1, "trials": trials, "importance": {name: 1.0}}
    (tmp_path / "search.json").write_text(json.dumps(search), encoding="utf-8")
    check(write_report(tmp_path).read_text(encoding="utf-8"), name)


def test_names_that_no_file_or_screen_can_hold_are_escaped(tmp_path):
    run = fitted(tmp_path / os.fsdecode(b"run \xff"), epochs=2)
    run.files.write_metrics([{**record, CONTROLS: 0.5} for record in run.history])
    for ending in (".html", ".md", ".json"):
        write_report(run.folder, tmp_path / f"report{ending}")
        text = (tmp_path / f"report{ending}").read_text(encoding="utf-8")
        assert "x1b[31m" in text.replace("\\[", "[")
        assert not set("\x1b\u202e\x00") & set(text)


def test_markdown_shows_markup_as_text():
    name = "<img src=x> | [a](b) `c` **d**"
    table = Table(title=name, head=(name,), rows=[(name,)])
    report = Report(
        name=name, kind=name, headline=name, lead=[name], tiles=[Tile(name=name, words=name)],
        sections=[Section(key="k", title=name, blocks=[Text(name), table])],
    )  # fmt: skip
    text = markdown(report)
    assert "<img" not in text
    assert not re.search(r"(?<!\\)[\[`*]c?[a-z]", text.replace("**\\", ""))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {2, 4}
    assert json.loads(as_json(report))["name"] == name


def test_markdown_keeps_the_lines_of_code():
    part = Section(key="k", title="t", blocks=[Code("one\n```\ntwo\x1b")])
    report = Report(name="n", kind="k", headline="h", lead=[], tiles=[], sections=[part])
    assert markdown(report).endswith("\n````\none\n```\ntwo\\x1b\n````\n")


# --- files that are none of hotlap's -------------------------------------------------------------------

BROKEN = ["", "{", "[]", "null", '"text"', "[" * 5000, '{"a": NaN}', "\x00\xff", "1" * 5000]


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("file", ["record.json", "environment.json", "started.json", "ledger.jsonl", "metrics.jsonl"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path, file, content):
    run = fitted(tmp_path / "run", epochs=2)
    (run.folder / file).write_text(content, encoding="utf-8", errors="surrogateescape")
    report = report_of(run.folder)
    assert "files" in [part.key for part in report.sections]
    html(report)


VALUES = [None, -1, 1e400, float("nan"), "text", [], {}, [[1]], {"a": {"b": []}}, True, 10**400, "\x1b[31m"]


@pytest.mark.parametrize("value", VALUES, ids=[repr(value)[:12] for value in VALUES])
def test_values_of_any_kind_in_files_end_no_report(tmp_path, value):
    def put(path, names):
        path.write_text(json.dumps(dict.fromkeys(names, value)), encoding="utf-8")

    recipe, search, fit = (tmp_path / name for name in ("recipe", "search", "fit"))
    for folder in (recipe, search):
        folder.mkdir()
    (recipe / "options.toml").write_text("recipe = 3\n")
    put(
        recipe / "report.json",
        ["best", "models", "baselines", "folds", "worst", "answered", "phases", "said", "left_out", "judged_by"],
    )
    put(recipe / "recipe.json", ["beaten_by"])
    put(search / "search.json", ["monitor", "best", "trials", "importance", "left_out", "higher_is_better"])
    run = fitted(fit, epochs=2)
    put(fit / "environment.json", ["versions", "gpus", "cpu", "job", "variables", "memory_bytes"])
    put(fit / "record.json", ["facts", "ended"])
    put(fit / "started.json", ["words"])
    put(fit / "result.json", ["headline", "took_s"])
    lines = [dict.fromkeys(record, value) for record in run.history] + [{"at": value, "host": value, "gpus": value}]
    for name in ("metrics.jsonl", "samples.jsonl"):
        (fit / name).write_text("".join(json.dumps(line) + "\n" for line in lines * 3), encoding="utf-8")
    for folder in (recipe, search, fit):
        try:
            text = html(report_of(folder))
        except StoreError:
            continue
        assert "Traceback" not in text
        assert "\x1b" not in text
    assert len(list_runs(tmp_path)) == 3


def test_numbers_that_no_chart_can_show_end_no_report(tmp_path):
    run = fitted(tmp_path / "run")
    records = [
        {**record, "valid_loss": value}
        for record, value in zip(run.history, [0, 1e-300, 1e299, -5, 0, 7, 7, 7], strict=True)
    ]
    run.files.write_metrics(records)
    assert "nan" not in html(report_of(run.folder)).lower().replace("maintenance", "")


def test_a_huge_history_stays_a_small_page(tmp_path):
    run = fitted(tmp_path / "run")
    records = [
        {"step": at, "epoch": at, "train_loss": 1 / (1 + at), "valid_loss": 1.0, "accuracy": 0.5}
        for at in range(40_000)
    ]
    run.files.write_metrics(records)
    text = html(report_of(run.folder))
    assert len(text) < 300_000


def test_many_classes_trials_and_options_stay_a_small_page(tmp_path):
    side = 120
    one = {"rows": 9, "macro_f1": 0.5, "classes": {f"class {n}" * 5: {"f1": 0.5} for n in range(side)}}
    scores = {"best": "m", "models": {"m": one | {"confusion": [[3] * side] * side}}, "baselines": {}}
    folder = tmp_path / "run"
    (folder / "search").mkdir(parents=True)
    (folder / "options.toml").write_text('recipe = "text"\n')
    (folder / "report.json").write_text(json.dumps(scores))
    trials = [{"number": n, "state": "complete", "score": n, "values": {"lr": n}, "seconds": 1} for n in range(5000)]
    (folder / "search" / "search.json").write_text(json.dumps({"monitor": "loss", "best": 1, "trials": trials}))
    assert len(html(report_of(folder))) < 1_000_000


# --- live runs -----------------------------------------------------------------------------------------


def test_a_run_is_live_only_while_the_process_that_locked_it_runs(tmp_path):
    lock = tmp_path / "lock"
    assert not is_at_work(tmp_path)
    lock.write_text(f"{os.getpid()}\n")
    assert is_at_work(tmp_path)
    os.utime(lock, (1, 1))  # older than this process: another one had its number
    assert not is_at_work(tmp_path)
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as ended:
        lock.write_text(f"{ended.pid}\n")
        ended.stdout.read()  # it has ended, and nobody has asked how
        while is_at_work(tmp_path):
            time.sleep(0.01)
    for content in ("", "text", "-5", "9" * 40):
        lock.write_text(content)
        assert not is_at_work(tmp_path)


def test_looking_at_a_run_takes_no_lock(tmp_path):
    from hotlap.store.run_folder import RunLock

    run = fitted(tmp_path / "run", epochs=2)
    report_of(run.folder)
    RunLock(run.folder).release()
    lock = RunLock(run.folder)
    assert [one.name for one in list_runs(tmp_path)] == ["run"]
    lock.release()


def test_looking_at_a_run_keeps_the_lock_of_this_process(tmp_path, forks):
    from hotlap.store.run_folder import RunLock

    again = f"from pathlib import Path; from hotlap.store.run_folder import RunLock; RunLock(Path({str(tmp_path)!r}))"
    lock = RunLock(tmp_path)
    assert is_at_work(tmp_path)
    assert "is in use by process" in forks.run("-c", again, cwd=tmp_path).stderr
    lock.release()
    assert not is_at_work(tmp_path)  # though this process lives on
    assert forks.run("-c", again, cwd=tmp_path).returncode == 0


def test_folders_that_are_another_users_own_end_no_list(runs):
    folder = Path(tempfile.mkdtemp())  # the folders of pytest are its user's own
    try:
        folder.chmod(0o755)
        for name in ("fit", "many/0000", "private", "many/0001"):
            shutil.copytree(runs / "fit", folder / name)
        for name in ("private", "many/0001"):
            (folder / name).chmod(0)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may look everywhere
        try:
            assert {path.name for path in runs_in(folder)} == {"fit", "many"}
            assert [one.name for one in read_run(folder / "many").trainings] == ["job 1"]
        finally:
            os.seteuid(user)
    finally:
        for name in ("private", "many/0001"):
            (folder / name).chmod(0o700)
        shutil.rmtree(folder)


def test_runs_inside_of_runs_and_other_folders_are_no_runs_of_their_own(runs, tmp_path):
    (runs / "notes").mkdir(exist_ok=True)
    found = {path.name for path in runs_in(runs)}
    assert {"fit", "trees", "search", "temporal", "script"} == found
    with pytest.raises(StoreError, match="does not exist"):
        runs_in(tmp_path / "nowhere")


def test_a_chart_names_what_it_shows_in_words_that_are_escaped():
    from hotlap.plots.bars import Bar, bars_picture

    picture = bars_picture(NAMES[0], [Bar(name=NAMES[0], value=1.0, words=NAMES[1]), Bar(name="b", value=-1.0)])
    chart = Chart(title=NAMES[0], picture=picture, table=Table(title="t", head=("a",), rows=[("b",)]))
    check(f"<script></script>{chart.picture.inline()}", NAMES[0][:20])

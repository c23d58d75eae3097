"""`hotlap report`, `runs`, `compare`, `serve`, `checklist` and `cheatsheet` from a shell."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from finished_runs import SCRIPT, fitted, tuned

import hotlap
from hotlap.core.tricks import MOVE_WORDS
from hotlap.report.rendering import MARK

SOURCE = str(Path(hotlap.__file__).parents[1])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("home")
    tuned(folder / "runs" / "tuned")
    fitted(folder / "runs" / "plain", seed=1)
    return folder


@pytest.fixture
def hotlap_in(forks, home):
    def run(*words, code=0, **more):
        done = forks.run("-m", "hotlap", *words, cwd=home, COLUMNS="80", **more)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def test_a_report_is_written_into_the_run_and_its_first_line_is_what_counts(hotlap_in, home):
    lines = hotlap_in("report", "runs/tuned").splitlines()
    assert lines[0].startswith("2.0x [1.90, 2.10] as fast a step")
    assert lines[1] == "runs/tuned/report.html"
    assert MARK in (home / "runs/tuned/report.html").read_text(encoding="utf-8")


def test_a_report_goes_to_other_files_and_formats(hotlap_in, home):
    hotlap_in("report", "runs/tuned", "--out", "a.md", "--against", "runs/plain")
    assert "## Learning curves" in (home / "a.md").read_text(encoding="utf-8")
    assert "grey band" in (home / "a.md").read_text(encoding="utf-8")
    said = hotlap_in("report", "runs/tuned", "--out", "a.md", code=1)
    assert "a.md exists, and is no report of hotlap's" in said
    before = sorted((home / "runs/plain").iterdir())
    found = json.loads(hotlap_in("report", "runs/plain", "--json"))
    assert found["name"] == "plain"
    assert sorted((home / "runs/plain").iterdir()) == before


def test_a_page_opens_in_the_browser_or_a_line_says_where_it_is(forks, home, tmp_path):
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    done = forks.run("-m", "hotlap", "report", "runs/tuned", "--open", cwd=home, BROWSER=f"{browser} %s")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened").read_text().strip() == (home / "runs/tuned/report.html").resolve().as_uri()


def test_runs_are_listed_within_80_columns(hotlap_in):
    text = hotlap_in("runs")
    heads = [line.split() for line in text.splitlines() if not line.startswith(" ")]
    assert {line[0]: line[1:3] for line in heads} == {"tuned": ["fit", "done"], "plain": ["fit", "done"]}
    assert "2.0x" in text
    assert "accuracy" in text
    assert max(map(len, text.splitlines())) <= 100
    found = json.loads(hotlap_in("runs", "runs", "--json"))
    assert {one["name"] for one in found["runs"]} == {"tuned", "plain"}
    assert "does not exist" in hotlap_in("runs", "nowhere", code=1)


def test_runs_and_groups_of_runs_are_compared(hotlap_in, home):
    text = hotlap_in("compare", "runs/tuned", "runs/plain")
    assert text.splitlines()[0].split() == ["tuned", "plain", "difference", "verdict"]
    assert "one run each has no spread" in text
    shutil.copytree(home / "runs/plain", home / "others/plain", dirs_exist_ok=True)
    found = json.loads(hotlap_in("compare", "runs/tuned,others/plain", "runs/plain,runs/tuned", "--json"))
    assert {"accuracy", "time"} <= {one["name"] for one in found["differences"]}
    assert all(len(values) == 2 for one in found["differences"] for values in one["values"])
    assert json.loads(hotlap_in("compare", "runs", "runs/plain", "--json"))["differences"][0]["first"] == "runs"
    assert "name two runs or more" in hotlap_in("compare", "runs/tuned", code=2)


def test_runs_of_the_same_name_are_told_apart_and_none_counts_twice(hotlap_in, home):
    shutil.copytree(home / "runs/plain", home / "others/plain", dirs_exist_ok=True)
    lines = hotlap_in("compare", "runs/plain", "others/plain", "runs/tuned").splitlines()
    heads = [line.split()[:2] for line in lines if line.endswith("verdict")]
    assert heads == [["runs/plain", "others/plain"], ["runs/plain", "runs/tuned"], ["others/plain", "runs/tuned"]]
    assert "names a run twice" in hotlap_in("compare", "runs/plain,runs/plain/", "runs/tuned", code=2)
    assert "a run is named twice" in hotlap_in("compare", "runs/plain", "runs/plain", code=2)
    assert "names no run" in hotlap_in("compare", ",", "runs/plain", code=2)


def test_the_checklist_of_a_run_and_of_this_machine(hotlap_in):
    text = hotlap_in("checklist", "runs/plain")
    assert "ok       during  the training loss falls: from" in text
    assert "ok       after   it came to its end" in text
    machine = json.loads(hotlap_in("checklist", "--json"))["checks"]
    assert machine[0]["what"] == "this machine"
    assert {check["when"] for check in machine} == {"before"}


def test_the_cheat_sheet_has_every_command_every_move_and_what_was_measured(hotlap_in, home):
    from hotlap.cli import app

    text = hotlap_in("cheatsheet", "runs")
    for command in app.registered_commands:
        name = command.name or command.callback.__name__
        assert f"hotlap {name}" in text or name == "cheatsheet"
    assert all(f"  {word} " in text for word in MOVE_WORDS)
    found = json.loads(hotlap_in("cheatsheet", "runs", "--json"))
    gains = {gain["move"]: gain for gain in found["gains"]}
    assert gains["fused optimizer"] == {
        "move": "fused optimizer", "kept": 1, "judged": 1, "ratios": [2.0], "together": []
    }  # fmt: skip
    assert gains["16-bit precision"]["kept"] == 0
    assert "fused optimizer   kept in 1 of 1, 2.00x alone" in text
    assert "no tuned training under empty yet" in hotlap_in("cheatsheet", "empty")


def test_trainings_write_their_report_on_request(forks, tmp_path):
    options = ("--epochs", "1", "--device", "cpu", "--plan", "off", "--quiet", "--report")
    done = forks.run("-m", "hotlap", "demo", *options, "--out", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report    demo/report.html" in done.stdout
    assert MARK in (tmp_path / "demo/report.html").read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("run", "--plan", "max", "--report", "--out", "script", "train.py")
    done = forks.run("-m", "hotlap", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "report script/report.html" in done.stderr
    assert MARK in (tmp_path / "script/report.html").read_text(encoding="utf-8")
    result = json.loads((tmp_path / "script/result.json").read_text())
    assert f"hotlap: {result['headline'][:20]}" in done.stderr
    assert result["took_s"] > 0
    assert result["updates"] == 60


def test_serve_shows_runs_until_it_is_interrupted(home):
    import http.client
    import signal

    environment = {**os.environ, "PYTHONPATH": SOURCE}
    words = [sys.executable, "-m", "hotlap", "serve", "runs", "--port", "0", "--json"]
    with subprocess.Popen(words, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        address = json.loads(line)["address"]
        host = address.removeprefix("http://").rstrip("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        connection.request("GET", "/")
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"/run/tuned" in answer.read()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_the_commands_that_only_read_import_no_torch(home):
    code = """
        import json, sys
        from hotlap.cli import main
        sys.argv = ["hotlap", *json.loads(sys.argv[1])]
        try:
            main()
        except SystemExit as ended:
            assert not ended.code
        print("torch" in sys.modules)
    """
    import textwrap

    for words in (["report", "runs/tuned"], ["runs"], ["compare", "runs/tuned", "runs/plain"], ["cheatsheet"]):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), json.dumps(words)],
            cwd=home, env={**os.environ, "PYTHONPATH": SOURCE}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "False", (words, done.stderr)

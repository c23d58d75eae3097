"""`hotlap stress` in a quick variant; and proof that it can fail: faults planted on purpose are caught."""

import json
import textwrap

import pytest
from killed import environment
from preloaded import Preloaded

import hotlap
from hotlap.stress.trials import SAVE_EVERY
from hotlap.stress.victim import fate_of, victim_job

SHORT = """
    import json, sys
    from hotlap.stress.trials import Trials

    trials = Trials(seed=1)
    moments = trials.moments()
    names = list(moments.values())
    rename = names.index("before rename")
    picked = sorted({0, 1, rename, rename + 1, rename + 2, len(names) - 1})
    numbers = list(moments)
    for n in picked:
        trials.at_call(numbers[n], names[n])
    tally = trials.tally
    trials.close()
    print(json.dumps({"names": names, "picked": [names[n] for n in picked], **vars(tally)}))
    assert not trials.folder.exists()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Runs what is written after `python`; its exit code, and what it said."""
    forks = Preloaded("unsynced", "hotlap.cli", "hotlap.stress.trials", "torch._dynamo", environment=environment())

    def run(*words):
        done = forks.run(*words, cwd=tmp_path_factory.mktemp("work"))
        return done.returncode, done.stdout, done.stderr

    yield run
    forks.close()


@pytest.fixture(scope="module")
def run_python(python):
    """Runs a text as python does; its exit code, and what it said."""
    return lambda script, *arguments: python("-c", textwrap.dedent(script), *arguments)


def test_kills_in_and_between_saves_lose_nothing(python):
    code, out, err = python("-m", "hotlap", "stress", "--kills", 3, "--workers", 0, "--json")
    assert code == 0, err + out
    figures = json.loads(out)
    assert figures["lost"] == []
    assert figures["equal"] == figures["trials"] == figures["asked"] == 3
    assert figures["kills"] >= 3
    assert figures["resumes"] + figures["anew"] == 3


def test_kills_around_the_calls_of_a_save_lose_nothing(run_python):
    """The first, the last, and those around the rename; `hotlap stress --every-call` tries them all."""
    code, out, err = run_python(SHORT)
    assert code == 0, err
    told = json.loads(out)
    assert told["lost"] == []
    assert told["equal"] == told["kills"] == told["resumes"] == 6
    assert told["anew"] == 0
    assert told["picked"][0] == "before make folder"
    assert told["picked"][2:5] == ["before rename", "after rename", "before sync folder"]
    kinds = {"make folder", "open", "write", "sync", "sync folder", "rename", "remove"}
    assert {name.partition(" ")[2] for name in told["names"]} == kinds
    assert len(told["names"]) % 2 == 0


@pytest.mark.parametrize(("place", "is_same"), [([6, 0, 48], True), ([5, 8, 48], True), ([5, 7, 48], False)])
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(place, is_same, tmp_path):
    """A SIGTERM in the last step of all is answered before the training knows that the epoch is over."""
    hotlap.fit(victim_job(0), plan="off", out=tmp_path / "run", save_every=SAVE_EVERY, progress=False)
    whole = fate_of(tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step-000000048" / "training.json"
    values = json.loads(state.read_text())
    assert dict(values["$dict"])["place"] == {"$tuple": [6, 0, 48]}
    values["$dict"] = [[k, {"$tuple": place} if k == "place" else v] for k, v in values["$dict"]]
    state.write_text(json.dumps(values))
    assert (fate_of(tmp_path / "run") == whole) == is_same


UNSAVED = """
    import json
    from hotlap.stress import trials as module

    module.UNSAVED = 1.0
    trials = module.Trials(seed=2)
    while trials.tally.trials < 5:
        trials.at_random()
    print(json.dumps(vars(trials.tally)))
    trials.close()
"""


def test_kills_before_the_first_checkpoint_lose_nothing(run_python):
    """In trainings that leave it to hotlap when to save, and are too short for that; a SIGTERM saves all the same."""
    code, out, err = run_python(UNSAVED)
    assert code == 0, err
    told = json.loads(out)
    assert told["lost"] == []
    assert told["equal"] == told["trials"] == 5
    assert told["anew"] > 0


FAULTS = {
    "randomness is not put back": "state._import_randomness = lambda *_: None",
    "optimizer state is not put back": "state._import_optimizer = lambda *_, **__: None",
    "the place in the data is lost": "state.Place = lambda *_: rig.Place()",
    "a buffer is forgotten": "state._put_buffer = lambda *_: None",
    "metrics are lost": (
        "real = beginning.import_state; beginning.import_state = lambda *a: {**real(*a), 'history': []}"
    ),
    "the best weights are lost": (
        "real = beginning.import_state\\n"
        "def worse(*a):\\n"
        "    found = real(*a)\\n"
        "    return {**found, 'best_weights': {k: v * 0 for k, v in found['best_weights'].items()}}\\n"
        "beginning.import_state = worse"
    ),
    "damage is not looked for": "disk.read_checked = lambda path, size, sha256: path.read_bytes()",
    "checkpoints are not renamed but moved away first": (
        "import shutil\\n"
        "def place(new, name, files, facts, rename):\\n"
        "    for old in new.parent.glob('step-*'): shutil.rmtree(old)\\n"
        "    write(new, name, files, facts, rename)\\n"
        "write = checkpoints.write_folder; checkpoints.write_folder = place"
    ),
}
PLANTED = """
    import json, random, sys
    import hotlap.engine.rig as rig
    import hotlap.fitting.fit as beginning
    import hotlap.guard.saving as state
    import hotlap.store.checkpoints as checkpoints
    from hotlap.store import disk
    from hotlap.stress.trials import Tally, Trials

    trials = Trials(seed=0)  # what is planted changes no training that is let alone
    moments = trials.moments()
    for fault in json.loads(sys.argv[1]):
        names = {rig: dict(vars(rig)), beginning: dict(vars(beginning)), state: dict(vars(state)),
                 disk: dict(vars(disk)), checkpoints: dict(vars(checkpoints))}
        exec(fault)
        trials.tally = Tally()
        for event in list(moments)[3:5]:
            if not trials.tally.lost:
                trials.at_call(event, moments[event])
        for _ in range(40):  # when a kill comes is chance, and so is what it hits
            if not trials.tally.lost:
                trials.at_random()
        print(json.dumps(trials.tally.lost), flush=True)
        for module, before in names.items():
            vars(module).update(before)
    trials.close()
"""


@pytest.fixture(scope="module")
def caught(run_python):
    faults = [fault.replace("\\n", "\n") for fault in FAULTS.values()]
    code, out, err = run_python(PLANTED, json.dumps(faults))
    assert code == 0, err
    return dict(zip(FAULTS, map(json.loads, out.splitlines()), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_is_planted_is_caught(caught, fault):
    assert caught[fault], "the trials found nothing wrong"


def test_what_was_lost_is_told_and_the_command_fails(run_python):
    """One that is killed before its first checkpoint has nothing that a resume could get wrong."""
    script = """
        import sys
        import hotlap.guard.saving as state
        from hotlap.cli import main
        from hotlap.stress import trials
        trials.UNSAVED = 0.0
        state._import_randomness = lambda *_: None
        sys.argv = ["hotlap", "stress", "--kills", "4", "--workers", "0"]
        main()
    """
    code, out, _ = run_python(script)
    assert code == 1
    lost = out.count("ended otherwise")
    assert lost > 0
    assert f"\nlost {lost}\nbit-equal {4 - lost} of 4\n" in out


def test_a_test_cut_short_by_time_says_so(run_python):
    """Its clock moves by a second each time it is read: once at the start, and before each trial."""
    script = """
        import itertools, sys, types
        import hotlap.cli.stress as stress
        from hotlap.cli import main
        stress.time = types.SimpleNamespace(monotonic=itertools.count().__next__)
        sys.argv = ["hotlap", "stress", "--kills", "1000", "--workers", "0", "--seconds", "2"]
        main()
    """
    code, out, err = run_python(script)
    assert code == 0, err
    assert "lost 0" in out
    assert "stopped after" in out
    assert "1000 trainings were asked for" in out

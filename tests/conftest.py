"""Tests train under the job's own plan, unless they are about tuning: what a tuner does depends on the clock.

Nor does a property test depend on it: on a busy machine drawing examples may take long. Files that take long come
first: with a file to each process, the one that is begun last is waited for. What they keep is kept apart from the
user's own cache.
"""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import unsynced  # noqa: F401
from dispositions import heeded
from preloaded import Preloaded

HERE = Path(__file__).parent
os.environ["HOTLAP_PLAN"] = "off"
os.environ["HOTLAP_SAMPLES"] = "off"  # whether a training is long enough for a sample depends on the clock
os.environ["HOTLAP_HANG_S"] = "off"  # so does whether a machine stalls for a minute
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process that a test starts compiles all of hotlap anew,
sys.dont_write_bytecode = False  # and each run of the tests rewrites their asserts
os.environ.pop("VIRTUAL_ENV", None)  # that of a shell, at whose other environment IPython would warn
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # torch would compile a program for each kind of vectors a CPU may have
# torch writes down all that it compiles where pytest listens, which takes a part of the time.
logging.getLogger("torch.__trace").disabled = True
if "PYTEST_XDIST_WORKER" not in os.environ:  # those have the environment of the process that began them
    os.environ["HOTLAP_CACHE"] = tempfile.mkdtemp(prefix="hotlap-tests-")
CACHE = os.environ["HOTLAP_CACHE"]

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests for a GPU do without it
    pass
else:
    settings.register_profile("hotlap", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("hotlap")

LONGEST = (
    "script/test_scripts.py", "guard/test_session_end.py", "fitting/test_resume.py", "fitting/test_lost_workers.py",
    "kit/test_working_copy.py", "kit/test_workers.py", "trees/test_files.py", "fitting/test_hangs.py",
    "script/test_out_of_memory.py", "kit/test_diagnose.py", "script/test_loader_proxy.py",
    "audit/test_differential.py", "recipes/test_examples.py", "stress/test_stress.py", "tuner/test_gates.py",
    "recipes/test_image.py", "audit/test_identity_matrix.py", "recipes/test_temporal.py",
    "benchmarks/test_text_rivals.py", "kit/test_odd_scripts.py", "fitting/test_tuning.py", "engine/test_compiling.py",
    "engine/test_encoders.py", "script/test_calls.py", "recipes/test_text.py", "kit/test_memory.py",
    "audit/test_comparing_runs.py", "fitting/test_out_of_memory.py", "cli/test_run.py", "benchmarks/test_recipes.py",
    "audit/test_compiled_scripts.py", "script/test_manual_updates.py", "script/test_session.py",
    "script/test_notebook.py", "audit/test_control_characters.py", "store/test_hostile_files.py",
    "recipes/test_word_counts.py", "guard/test_identity_held.py", "test_public_face.py", "test_docs.py",
)  # fmt: skip
"""Those that take eight seconds or more of a core, the longest first."""


def pytest_collection_modifyitems(items):
    turns = {HERE / name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection():
    """What is imported and collected stays: looking through it for garbage again and again takes a part of all time."""
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks():
    """A python that has loaded hotlap for all tests, and is forked for each run: a fresh one takes three seconds."""
    paths = os.pathsep.join(map(str, (HERE.parent / "src", HERE / "support")))
    modules = ("hotlap.cli", "hotlap.fitting.fit", "hotlap.kit", "hotlap.kit.probe_process", "hotlap.script.session")
    made = Preloaded(*modules, "torch._dynamo", environment={**os.environ, "PYTHONPATH": paths})
    yield made
    made.close()


@pytest.fixture(scope="session")
def torch_forks():
    """Such a python that has loaded torch alone."""
    made = Preloaded("torch", environment={**os.environ, "PYTHONPATH": str(HERE.parent / "src")})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _interrupts_reach_children():
    """A test run in the background ignores them, and processes that tests start must not."""
    with heeded(signal.SIGINT, signal.SIGQUIT):
        yield


@pytest.fixture(autouse=True)
def _onednn_stays_on():
    """torch turns it off for good where it fails, and later tests would compute otherwise."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch._C._get_mkldnn_enabled():
        torch._C._set_mkldnn_enabled(True)
        pytest.fail("oneDNN was turned off, and not on again")


@pytest.fixture(autouse=True)
def no_hooks_left():
    """Hooks on all modules that a test leaves behind would change the tests after it."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.nn.modules.module._global_forward_pre_hooks.clear()

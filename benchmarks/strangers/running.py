"""One process of a script, by itself or under hotlap, in a fresh copy of its folder."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.strangers.scripts import STAND_INS, Stranger

SOURCE = Path(__file__).parents[2] / "src"
UNSET = ("HOTLAP_PLAN", "PYTHONSTARTUP")
ALONE = "alone"


@dataclass(frozen=True)
class Ran:
    """What one process did."""

    kind: str
    """`alone`, or a plan."""
    seconds: float
    code: int | str
    """The exit code, or `timeout`."""
    out: str
    err: str
    files: dict[str, str]
    """Files written: name to hash. Numbers of six digits and more in names are shown as #."""
    figures: str
    """What was printed and the files named in `figures_in`."""
    lines: list[str]
    """What hotlap said."""


def run_once(
    one: Stranger, kind: str, words: list[str], *, data: Path | None, options: list[str], limit_s: float
) -> Ran:
    """Run a script once; `data` is copied or linked into its folder first."""
    with tempfile.TemporaryDirectory(prefix="strangers-", ignore_cleanup_errors=True) as made:
        scratch = Path(made).resolve()
        home = scratch / "work"
        shutil.copytree(one.home, home, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        if data is not None:
            link(data, home)
        at = home / one.folder
        before = stamps(home)
        hotlap = [] if kind == ALONE else ["-m", "hotlap", "run", "--plan", kind, "--out", f"{scratch}/run", *options]
        command = [sys.executable, *hotlap, *words]
        code, seconds, out, err = process(command, at, environment(one, home, scratch), one.terminal, limit_s)
        out, err = (text.replace(str(home), "WORK") for text in (out, err))
        files = written(home, before)
        parts = [out]
        for pattern in one.figures_in:
            parts += [path.read_text(errors="replace") for path in sorted(at.glob(pattern)) if path.is_file()]
    lines = [line for line in err.splitlines() if re.match(r"hotlap(:|  )", line)] if kind != ALONE else []
    return Ran(kind, seconds, code, out, err, files, "\n".join(parts), lines)


def process(
    command: list[str], at: Path, environment: dict[str, str], terminal: bool, limit_s: float
) -> tuple[int | str, float, str, str]:
    """Run a command to its end or for `limit_s`; exit code, seconds, stdout, stderr."""
    ends = terminal_ends() if terminal else ()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.perf_counter()
        child = subprocess.Popen(
            command,
            cwd=at,
            env=environment,
            stdin=ends[1] if ends else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | str
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = "timeout"
        seconds = time.perf_counter() - begun
        if code == "timeout":
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for end in ends:
            os.close(end)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return code, seconds, texts[0], texts[1]


def terminal_ends() -> tuple[int, int]:
    """Open a terminal of 120 columns."""
    ends = pty.openpty()
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return ends


def environment(one: Stranger, home: Path, scratch: Path) -> dict[str, str]:
    """The environment of a run: no network, no cache of an earlier run."""
    absent = [name for name in one.fallbacks if importlib.util.find_spec(name) is None]
    replaced = [str(STAND_INS / name) for name in (*one.stand_ins, *absent)]
    own = [str(home / path) for path in one.python_path]
    more = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **{key: value for key, value in os.environ.items() if key not in UNSET},
        "PYTHONPATH": os.pathsep.join([str(SOURCE), *replaced, *own, *more]),
        "PYTHONHASHSEED": "0",
        "COLUMNS": "120",
        "HOTLAP_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCH_HOME": str(scratch / "torch"),
        "HF_HOME": str(scratch / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **one.environment,
    }


def warm_up(one: Stranger, scratch: Path) -> None:
    """Import once what the script and hotlap import, so that no run of the comparison reads it from a cold disk."""
    modules = ["torch", "torch.utils.data", "hotlap.script.session", *one.imports]
    code = "import importlib\nfor name in " + repr(modules) + ":\n    importlib.import_module(name)\n"
    code += "import torch\nif torch.cuda.is_available():\n    torch.eye(8, device='cuda') @ torch.eye(8, device='cuda')"
    subprocess.run([sys.executable, "-c", code], env=environment(one, one.home, scratch), capture_output=True)


def link(data: Path, home: Path) -> None:
    """Put data into a copy of a script's folder: files as links, so that they cost no time and count as not written."""
    for path in sorted(data.rglob("*")):
        if path.is_file():
            to = home / path.relative_to(data)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(path)


def stamps(home: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of each file of a folder."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in own_files(home)}


def own_files(home: Path) -> list[Path]:
    """Files of a folder without links and bytecode."""
    found = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def written(home: Path, before: dict[Path, tuple[int, int]]) -> dict[str, str]:
    """Files that are new or changed, and their hashes."""
    found = {}
    for path in own_files(home):
        if before.get(path) != (path.stat().st_size, path.stat().st_mtime_ns):
            with path.open("rb") as file:
                found[re.sub(r"\d{6,}", "#", str(path.relative_to(home)))] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return found

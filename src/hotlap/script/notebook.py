"""`%load_ext hotlap`: make the training in a notebook faster, from that cell on."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from hotlap.core.terminal import say
from hotlap.script.session import Session, Settings

NAME = "hotlap"
HELP = "%hotlap shows the state, %hotlap off removes hotlap"


class Notebook:
    """One notebook: its session, and the `%hotlap` magic."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._session: Session | None = None
        shell.register_magic_function(self.magic, "line", NAME)
        plan = os.environ.get("HOTLAP_PLAN") or "auto"
        if plan == "off":
            _say("HOTLAP_PLAN=off: hotlap does nothing in this notebook")
            return
        settings = Settings(name=_name(shell), plan=plan if plan != "auto" else None)
        self._session = Session(settings).__enter__()
        atexit.register(self.stop)
        _say(f"watching the training in this notebook; {HELP}")

    def magic(self, line: str) -> None:
        """`%hotlap`: show the state; `%hotlap off`: remove hotlap."""
        word = line.strip()
        if word not in ("", "off"):
            _say(f"unknown: %hotlap {word}; {HELP}")
        elif self._session is None:
            _say("is off; use %reload_ext hotlap to start it again")
        elif word == "off":
            self.stop()
        else:
            say(*self._session.so_far(), stream=sys.stdout)

    def stop(self) -> None:
        """End the session; once."""
        session, self._session = self._session, None
        if session is not None:
            atexit.unregister(self.stop)
            session.stop()

    def unload(self) -> None:
        """End the session and remove the magic."""
        self.stop()
        self._shell.magics_manager.magics["line"].pop(NAME, None)


_loaded: dict[int, Notebook] = {}
"""By the shell's id; usually there is only one in a process."""


def load(shell: Any) -> None:
    """Start, for `%load_ext hotlap`."""
    unload(shell)
    _loaded[id(shell)] = Notebook(shell)


def unload(shell: Any) -> None:
    """Stop and restore torch, for `%unload_ext hotlap`."""
    notebook = _loaded.pop(id(shell), None)
    if notebook is not None:
        notebook.unload()


def _name(shell: Any) -> str:
    """The notebook's name, if Jupyter or VS Code provides it."""
    file = os.environ.get("JPY_SESSION_NAME") or shell.user_ns.get("__vsc_ipynb_file__") or ""
    return Path(str(file)).stem or "notebook"


def _say(line: str) -> None:
    say(f"hotlap: {line}")

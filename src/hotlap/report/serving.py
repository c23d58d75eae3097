"""The reports of a folder in a browser: on this machine alone, and read-only.

Every page is made anew from the files, so that a run at work shows how far it is. Requests are answered for this
machine's own names only: a page elsewhere whose name is made to lead here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import os
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from hotlap.core.errors import StoreError, first_line
from hotlap.core.terminal import clean
from hotlap.report.reading import kind_of_run, read_run, runs_in
from hotlap.report.rendering import html, page, page_policy
from hotlap.report.runs import list_runs, runs_table
from hotlap.report.sections import report_on

LOOPBACK = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")
"""The hosts for which requests are answered."""
PORT = 8017
RUN = "/run/"


class Server(ThreadingHTTPServer):
    """Serves the runs of a folder on loopback. Raises StoreError where the folder or the port cannot be used."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, port: int = PORT) -> None:
        """`port` 0 takes any that is free."""
        runs_in(folder)  # or an error at once
        self.folder = folder
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise StoreError(f"cannot serve on port {port}: {why}; name another with --port") from None

    def handle_error(self, *_: object) -> None:
        """Print nothing: a browser that leaves early is no error, and any other has been answered."""

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def server_bind(self) -> None:
        """Bind without looking up names, which may ask a server elsewhere."""
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "hotlap", ""
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        """A page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """The head of a page."""
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Log nothing: requests are the user's own."""

    def _answer(self, *, with_body: bool) -> None:
        try:
            status, body = self._page()
        except StoreError as error:
            status, body = HTTPStatus.NOT_FOUND, page("message.html", words=str(error), title="Not found")
        except Exception as error:  # a stranger's files: other runs can still be shown
            words = f"hotlap cannot show this: {first_line(error)}"
            status, body = HTTPStatus.INTERNAL_SERVER_ERROR, page("message.html", words=words, title="Not shown")
        content = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": f"{page_policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _page(self) -> tuple[HTTPStatus, str]:
        if not self._is_for_us():
            said = "This server answers for this machine's own names only."
            return HTTPStatus.MISDIRECTED_REQUEST, page("message.html", words=said, title="Not for this host")
        path = self.path.partition("?")[0]
        if path in ("/", ""):
            return HTTPStatus.OK, index(self.server.folder)
        if path.startswith(RUN):
            report = report_on(read_run(_inside(self.server.folder, path.removeprefix(RUN))))
            return HTTPStatus.OK, html(report, home=True)
        raise StoreError("there is no such page")

    def _is_for_us(self) -> bool:
        """Whether the request names this machine, with or without the port."""
        hosts = self.headers.get_all("Host") or []
        known = {f"{name}{port}" for name in NAMES for port in ("", f":{self.server.server_port}")}
        return len(hosts) == 1 and hosts[0].strip().lower() in known


def _inside(folder: Path, asked: str) -> Path:
    """The run of a folder that a request names by its path; StoreError for one that is not listed there.

    Only names that the folder itself lists are opened: no `..`, no link that leads out of it.
    """
    parts = [os.fsdecode(unquote_to_bytes(part)) for part in asked.split("/") if part]
    found = folder
    for part in parts:
        found = next((one for one in _listed(found) if one.name == part), folder / "no such run")
        if not found.exists():
            break
    is_run = bool(parts) and found.is_dir() and kind_of_run(found) is not None
    if not is_run or not found.resolve().is_relative_to(folder.resolve()):
        raise StoreError(f"there is no run {clean('/'.join(parts))[:200]!r} here")
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")]
    except OSError:
        return []


def index(folder: Path) -> str:
    """The page that lists all runs of a folder."""
    listed = [one for one in list_runs(folder) if one.path.resolve().is_relative_to(folder.resolve())]
    links = [f"{RUN}{quote(os.fsencode(one.path.name), safe='')}" for one in listed]
    is_live = any(one.state == "running" for one in listed)
    return page("index.html", folder=str(folder), table=runs_table(listed), links=links, reloads=is_live, runs=listed)

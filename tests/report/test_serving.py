"""`hotlap serve`: this machine only, reading only, nothing but the runs of its folder."""

import http.client
import os
import shutil
import socket
import struct
import threading
from urllib.parse import quote

import pytest
from finished_runs import fitted

from hotlap.core.errors import StoreError
from hotlap.report.serving import Server


@pytest.fixture(scope="module")
def served(runs, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    fitted(outside / "secret", epochs=2)
    if not (runs / "link").exists():
        (runs / "link").symlink_to(outside / "secret")
    server = Server(runs, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
    (runs / "link").unlink()


def ask(server, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path, headers=headers, **({"body": b"x"} if method in ("POST", "PUT") else {}))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, {name.lower(): value for name, value in answer.getheaders()}


def test_it_lists_all_runs_and_shows_each(served):
    status, text, _ = ask(served)
    assert status == 200
    for name in ("fit", "trees", "search", "temporal", "script"):
        assert f'href="/run/{name}"' in text
        status, page, _ = ask(served, f"/run/{name}")
        assert status == 200
        assert "<h1>" in page
    assert ask(served, "/run/temporal/models/mlp")[0] == 200


def test_it_listens_on_loopback_alone(served):
    assert served.server_address[0] == "127.0.0.1"


def test_pages_run_no_script_but_their_own_and_are_never_kept(served):
    _, _, headers = ask(served)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8017", "", "127.0.0.1:1"]
)
def test_a_request_for_another_host_gets_nothing(served, host):
    status, text, _ = ask(served, "/run/fit", host=host)
    assert status == 421
    assert "hotlap" in text
    assert "What was tried" not in text


def test_this_machines_own_names_are_answered(served):
    for host in ("localhost", "127.0.0.1", f"localhost:{served.server_port}", f"LOCALHOST:{served.server_port}"):
        assert ask(served, host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(served, method):
    assert ask(served, method=method)[0] == 501


def test_a_head_has_no_body(served):
    status, text, headers = ask(served, method="HEAD")
    assert (status, text) == (200, "")
    assert int(headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "/run/../outside0/secret", "/run/..%2f..%2fetc", "/run/%2e%2e/%2e%2e/etc", "/run//etc/passwd", "/run/link",
        "/run/", "/run/nothing", "/run/fit/checkpoints", "/run/fit%00", "/run/.", "/run/fit/../../x", "/etc/passwd",
        "/run/fit/report.html", "/run/%5c..%5c", "/run/" + "a/" * 300,
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(served, path):
    status, text, _ = ask(served, path)
    assert status == 404
    assert "root:" not in text
    assert "<h1>Not found</h1>" in text


def test_a_run_named_as_markup_is_listed_and_shown_as_text(tmp_path):
    name = "<script>alert(1)<∕script>"
    fitted(tmp_path / name, epochs=2)
    server = Server(tmp_path, port=0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        status, text, _ = ask(server)
        assert status == 200
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)" in text
        status, text, _ = ask(server, f"/run/{quote(name)}")
        assert status == 200
        assert "<script>alert" not in text
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_run_whose_name_is_no_text_is_listed_and_shown(served, runs):
    folder = os.fsencode(runs) + b"/\xff\xfe"
    shutil.copytree(os.fsencode(runs / "fit"), folder)
    try:
        assert 'href="/run/%FF%FE"' in ask(served)[1]
        assert ask(served, "/run/%FF%FE")[0] == 200
    finally:
        shutil.rmtree(folder)


def test_a_link_that_leads_out_of_the_folder_is_not_listed(served):
    assert 'href="/run/link"' not in ask(served)[1]


def test_odd_requests_and_browsers_that_leave_print_nothing(served, capfd):
    host = b"\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.server_port), timeout=30) as asking:
        asking.sendall(b"GET http://[ HTTP/1.1" + host)
        assert asking.recv(100).startswith(b"HTTP/1.1 404")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served.server_port), timeout=30) as leaving:
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            leaving.sendall(b"GET /run/fit HTTP/1.1" + host)
    assert ask(served)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_run_that_cannot_be_shown_is_answered_by_the_reason(served, monkeypatch, capfd):
    def fail(_):
        raise RuntimeError("<b>no such thing")

    monkeypatch.setattr("hotlap.report.serving.report_on", fail)
    status, text, _ = ask(served, "/run/fit")
    assert status == 500
    assert "hotlap cannot show this: &lt;b&gt;no such thing" in text
    assert capfd.readouterr() == ("", "")


def test_a_live_run_is_reloaded_and_a_finished_one_is_not(tmp_path):
    import json
    import os

    from hotlap.report.serving import index

    run = fitted(tmp_path / "run", epochs=2)
    assert 'http-equiv="refresh"' not in index(tmp_path)
    record = json.loads((run.folder / "record.json").read_text())
    (run.folder / "record.json").write_text(json.dumps({**record, "ended": None}))
    (run.folder / "lock").write_text(f"{os.getpid()}\n")
    text = index(tmp_path)
    assert 'http-equiv="refresh"' in text
    assert "running" in text


def test_a_folder_or_port_that_cannot_be_used_gets_one_line(served, tmp_path):
    with pytest.raises(StoreError, match="does not exist"):
        Server(tmp_path / "nowhere", port=0)
    with pytest.raises(StoreError, match=r"cannot serve on port \d+"):
        Server(tmp_path, port=served.server_port)

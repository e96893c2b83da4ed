import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from sglang_morph.demo.server import ServerFailed, ServerProcess

# Answers /health with 503 at first; starts a child that ignores SIGTERM, as a busy worker may.
SERVER = """
import http.server, subprocess, sys
worker = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", worker])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 1 else 503)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(code, log):
    return ServerProcess([sys.executable, "-c", code], {}, log)


def is_running(pid):
    """Whether `pid` runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_of(log):
    return int(log.read_text().split("child ")[1].split()[0])


def test_it_waits_until_ready_and_ends_the_whole_group(tmp_path):
    log, waited = tmp_path / "logs" / "server.log", []
    with start(SERVER, log) as server:
        server.wait_ready(30, waited.append)
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert is_running(child_of(log))
    assert len(waited) >= 2
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    deadline = time.monotonic() + 5
    while is_running(child_of(log)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child_of(log))


def test_ctrl_c_in_the_context_ends_the_server_too(tmp_path):
    log = tmp_path / "server.log"
    with pytest.raises(KeyboardInterrupt), start(SERVER, log) as server:
        server.wait_ready(30, lambda passed: None)
        raise KeyboardInterrupt
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")


def test_an_early_end_shows_the_end_of_the_log(tmp_path):
    code = "import sys; print('loading'); sys.exit('no such model')"
    message = r"ended with status 1; the end of .*server.log:\n(.*\n)*no such model"
    with (
        start(code, tmp_path / "server.log") as server,
        pytest.raises(ServerFailed, match=message),
    ):
        server.wait_ready(30, lambda passed: None)


def test_a_server_that_never_gets_ready_is_given_up(tmp_path):
    with (
        start("import time; time.sleep(60)", tmp_path / "server.log") as server,
        pytest.raises(ServerFailed, match="not ready after 1 s"),
    ):
        server.wait_ready(0.6, lambda passed: None)


def test_environment_is_added_to_the_own_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FROM_PARENT", "parent")
    code = "import os, sys; sys.exit(os.environ['FROM_PARENT'] + os.environ['ADDED'])"
    log = tmp_path / "server.log"
    with (
        ServerProcess([sys.executable, "-c", code], {"ADDED": "added"}, log) as server,
        pytest.raises(ServerFailed, match="parentadded"),
    ):
        server.wait_ready(30, lambda passed: None)
    assert "ADDED" not in os.environ

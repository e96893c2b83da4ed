"""A server process for the demo: started with a free port, waited for, and always ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_S = 0.5
_LOG_LINES_SHOWN = 15


class ServerFailed(RuntimeError):
    """The server ended early or never became ready. The message has the end of its log."""


def free_port() -> int:
    """A TCP port of this machine's loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """`command` plus `--host` and `--port`, in a process group of its own, as a context manager.

    Leaving the context ends the whole group, whatever happened, Ctrl-C included: that signal
    doesn't reach the group by itself.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_s: float, waiting: Callable[[float], None]) -> None:
        """Return once the server answers requests. `waiting` gets the seconds passed so far.

        Raises `ServerFailed`.
        """
        begin = time.monotonic()
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while (passed := time.monotonic() - begin) < timeout_s:
                waiting(passed)
                self.check_alive()
                if _is_healthy(client):
                    return
                time.sleep(_POLL_S)
        raise ServerFailed(f"the server was not ready after {timeout_s:.0f} s{self._log_end()}")

    def stop(self, grace_s: float = 10.0) -> None:
        """End the process group: politely, then by force. Harmless when it has ended already."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also for workers that outlive their parent, and for a second Ctrl-C while waiting.
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

    def check_alive(self) -> None:
        """Raises `ServerFailed` if the server's main process has ended."""
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerFailed(f"the server ended with status {status}{self._log_end()}")

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES_SHOWN:]
        return "; the end of {}:\n{}".format(self.log, "\n".join(lines))


def _is_healthy(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False

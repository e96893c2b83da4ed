"""Ends a benchmark, and with it its servers, when it is told to."""

from __future__ import annotations

import signal


def end_on_sigterm() -> None:
    """From here on SIGTERM unwinds the process as Ctrl-C does.

    Not by an exception of its own: raised in a callback of the event loop it would end nothing but
    a request. A job that a shell has put in the background ignores SIGINT, so that is undone.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))

"""A server that cannot be started says why in one line, whichever process found out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.engine import _scheduler_died_error

from memory_backends.base import BackendError
from sglang_morph.refusals import REFUSED, MorphRefusal
from sglang_morph.start_errors import ending_in_one_line, scheduler_refused


@pytest.mark.parametrize("error", [BackendError("no memory; take less"), MorphRefusal("no")])
def test_what_cannot_be_served_ends_the_process(
    error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, ending_in_one_line():
        raise error
    assert ended.value.code == REFUSED
    assert capfd.readouterr().err == f"sglang_morph: {error}\n"


def test_a_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), ending_in_one_line():
        _ = 1 / 0


def died_with(code: int) -> RuntimeError:
    """What SGLang raises in the launcher."""
    return _scheduler_died_error(0, SimpleNamespace(join=lambda timeout: None, exitcode=code))


def test_the_launcher_knows_a_scheduler_that_has_said_why() -> None:
    assert scheduler_refused(died_with(REFUSED))
    assert not scheduler_refused(died_with(-9))
    assert not scheduler_refused(died_with(1))

"""How the scheduler process ends where a server cannot be started after all.

Much shows only once the weights are loaded: a kernel that cannot be compiled, a weight that fits no
variant, page-locked memory that is not to be had. SGLang would answer with a traceback and a quit
signal to its parent, and the cause would be lost in between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from memory_backends.base import BackendError
from memory_backends.vmm.base import VmmError
from patches.apply import PatchError
from sglang_morph.bundle.errors import BundleError
from sglang_morph.precision.layers import UnfitWeight, UnsupportedModel
from sglang_morph.precision.nested.merge_gemm import MergeGemmError
from sglang_morph.precision.plan import PlanError
from sglang_morph.precision.sources import SourceError
from sglang_morph.precision.variants.preflight import WrongKernel
from sglang_morph.refusals import REFUSED, MorphRefusal

START_ERRORS = (
    BackendError,
    BundleError,
    MergeGemmError,
    MorphRefusal,
    PatchError,
    PlanError,
    SourceError,
    UnfitWeight,
    UnsupportedModel,
    VmmError,
    WrongKernel,
)
"""Their messages are one line with cause and remedy; anything else is a defect and keeps its
traceback."""


@contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End this process with one line and status `REFUSED` for any of `START_ERRORS`."""
    try:
        yield
    except START_ERRORS as error:
        print(f"sglang_morph: {error}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED) from error


def scheduler_refused(error: RuntimeError) -> bool:
    """Whether SGLang's `error` tells of a scheduler that ended in one line."""
    return f"(exit code: {REFUSED})" in str(error)

"""What leaves the controller: commands that one place decides and every rank carries out alike.

Both kinds of message are immutable and serialise (msgpack, JSON, pickle), so that a broadcast can
carry them. With tensor parallelism refused there is one rank, 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

CommandKind = Literal["lower", "withdraw", "commit"]
"""`lower`: smaller weights up to the target level, then lend what they free. `withdraw`: take the
pages back that the target level does not lend; a restore begins. `commit`: bring the weights of the
target level back, the next one on the way of the restore under way."""


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The only thing the executor acts on."""

    kind: CommandKind
    target: int
    """Precision level."""
    revision: int
    """Number of the state of weights and pages that it leads to; a `commit` keeps the restore's."""
    reason: str


class Readiness(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's answer to: would a `commit` to `level` run without waiting?"""

    rank: int
    revision: int
    """Of the command that began the restore."""
    level: int
    ready: bool


def commit_if_ready(reports: Sequence[Readiness], began: Command) -> Command | None:
    """The `commit` that continues the restore `began`, once every rank is ready for one level.

    A rank that is behind, or speaks of an earlier restore, only delays it.
    """
    levels = {report.level for report in reports}
    if len(levels) != 1 or not all(r.ready and r.revision == began.revision for r in reports):
        return None
    return Command("commit", levels.pop(), began.revision, began.reason)

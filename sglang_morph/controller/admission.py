"""Lets requests in only at levels that they allow, and keeps the level there for them.

One with a floor needs precision, a long one pages that exist at lower precision only. A request
that has to wait stays where it is in SGLang's queue and is passed over, so everything SGLang does
to waiting requests (aborts, time limits, reports) goes on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_morph.controller.executor import Executor
from sglang_morph.controller.floors import Floors
from sglang_morph.controller.needs import Needs
from sglang_morph.precision.demand import FIELD, floor_level, min_precision

_KEPT_FREE = 2
"""Tokens that SGLang's planner keeps free beside a request's own, at page size 1."""

Note = Callable[[str, str, int], None]
"""Told of a request: `held`, `rejected` or `ignored`, the precision it asked for, its floor."""


class Admission:
    """In the scheduler process, between SGLang's queue and its prefill batch."""

    def __init__(
        self,
        policy: str,
        floors: Floors,
        needs: Needs,
        executor: Executor,
        levels: Sequence[Sequence[str]],
        scheduler: Any,
        may_return: Callable[[int], bool],
        may_lower: Callable[[int], bool],
        note: Note,
    ) -> None:
        """`policy`: one of `FLOOR_POLICIES`. `levels`: each level's variants, one a layer.

        `may_return(level)`: whether the operator lets the level come down so far;
        `may_lower(level)`: whether policy and operator let it go up so far now."""
        self._policy = policy
        self._floors = floors
        self._needs = needs
        self._executor = executor
        self._levels = levels
        self._scheduler = scheduler
        self._may_return = may_return
        self._may_lower = may_lower
        self._note = note
        self._refused: list[Any] = []
        self._planning = False
        """Whether this step's pass over the queue has begun."""

    def queued(self, req: Any) -> None:
        """`req` entered the queue, for the first time or after a retraction."""
        if req.to_finish is not None:
            return
        longest = len(req.origin_input_ids) + (req.sampling_params.max_new_tokens or 0)
        if need := self._needs.level_for(longest + _KEPT_FREE):
            req.morph_need = need
        demand = self._demand(req.sampling_params)
        if demand is None:
            return
        req.morph_floor = demand
        floor, _ = demand
        if self._must_refuse(req, floor):
            self._refused.append(req)

    def floor_of(self, sampling_params: Any) -> int | None:
        """The deepest level that a request with these parameters lets itself be computed at."""
        demand = self._demand(sampling_params)
        return None if demand is None or self._policy == "ignore" else demand[0]

    def _demand(self, sampling_params: Any) -> tuple[int, str] | None:
        """Floor and what was asked for; None where every level will do."""
        custom = sampling_params.custom_params
        wanted = min_precision(custom.get(FIELD)) if custom else None
        if wanted is None:
            return None
        floor = floor_level(self._levels, wanted)
        return None if floor == len(self._levels) - 1 else (floor, wanted)

    def begin_step(self) -> None:
        """A step boundary: nothing is planned yet, and requests leave the queue safely."""
        self._planning = False
        queue = self._scheduler.waiting_queue
        for req in self._refused:
            if req in queue:
                queue.remove(req)
                self._refuse(req)
        self._refused.clear()
        if not queue:
            self._floors.expect(None)
            self._needs.expect(0)

    def admit(self, add: Callable[[], Any], adder: Any, req: Any) -> Any:
        """`adder` is asked to take `req` from the queue, which `add` does if there is room."""
        if not self._planning:
            self._planning = True
            self._floors.expect(None)
            self._needs.expect(0)
        demand = getattr(req, "morph_floor", None)
        if demand is None or self._policy == "ignore":
            return self._add(add, adder, req)
        floor, wanted = demand
        if self._must_refuse(req, floor):
            self._refused.append(req)
            return AddReqResult.CONTINUE
        if self._executor.level > floor:
            return self._hold(req, floor, wanted)
        result = self._add(add, adder, req)
        if _was_added(adder, req):
            req.morph_floor_in_force = True
            self._floors.admit(floor)
        elif self._policy == "hold":
            self._floors.expect(floor)
        return result

    def _add(self, add: Callable[[], Any], adder: Any, req: Any) -> Any:
        """`req` in its turn, which precision does not stand in the way of."""
        need = getattr(req, "morph_need", 0)
        if not need:
            return add()
        if self._executor.target_level < need:
            self._needs.expect(need)
            # Whoever is behind uses the room there is, unless pages for `req` come at once.
            return AddReqResult.OTHER if self._may_lower(need) else AddReqResult.CONTINUE
        result = add()
        if _was_added(adder, req):
            req.morph_need_in_force = True
            self._needs.admit(need)
        else:
            self._needs.expect(need)
        return result

    def released(self, req: Any) -> None:
        """`req` gave its KV back. What is told twice counts once."""
        if getattr(req, "morph_floor_in_force", False):
            req.morph_floor_in_force = False
            self._floors.release(req.morph_floor[0])
        if getattr(req, "morph_need_in_force", False):
            req.morph_need_in_force = False
            self._needs.release(req.morph_need)

    def ended(self, req: Any, lowest_level: int) -> None:
        """`req` has run to its end, at precisions down to `lowest_level`."""
        demand = getattr(req, "morph_floor", None)
        if demand is not None and lowest_level > demand[0]:
            self._note("ignored", demand[1], demand[0])

    def _must_refuse(self, req: Any, floor: int) -> bool:
        # One that was retracted has been let in already: it gets what it was promised.
        if self._policy != "reject" or req.retracted_stain:
            return False
        return self._executor.level > floor

    def _hold(self, req: Any, floor: int, wanted: str) -> Any:
        self._floors.expect(floor)
        if not getattr(req, "morph_was_held", False):
            req.morph_was_held = True
            self._note("held", wanted, floor)
        if self._executor.target_level <= floor or not self._may_return(floor):
            # Pages are back and only weights are missing, or neither will come soon: whoever is
            # behind may use the room there is.
            return AddReqResult.CONTINUE
        # Pages must come back first. To let others in would keep them in use without end.
        return AddReqResult.OTHER

    def _refuse(self, req: Any) -> None:
        floor, wanted = req.morph_floor
        reason = (
            f"{FIELD}.min_precision {wanted!r} is not available now: the precision level is "
            f"{self._executor.level}, at most {floor} would do; try again later"
        )
        finish = {
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": reason,
        }
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(
            AbortReq(finished_reason=finish, rid=req.rid), req
        )
        req.time_stats.trace_ctx.abort(abort_info={"reason": reason})
        self._note("rejected", wanted, floor)


def _was_added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req

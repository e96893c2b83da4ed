"""Everything that follows single requests: what they demand, what they met, what they cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from memory_backends.page_levels import PageLevels
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.admission import Admission
from sglang_morph.controller.exposure import Exposure
from sglang_morph.controller.prefixes import create_prefix_policy
from sglang_morph.controller.request_exposure import RequestExposure
from sglang_morph.options import MorphOptions

if TYPE_CHECKING:
    from sglang_morph.controller.controller import Controller
    from sglang_morph.observability.event_log import EventLog
    from sglang_morph.observability.request_metrics import RequestMetrics


class Requests:
    """Lives in the scheduler process beside the controller, whose floors it keeps."""

    def __init__(
        self,
        options: MorphOptions,
        scheduler: Any,
        controller: Controller,
        levels: Sequence[Sequence[str]],
        pages: PageLevels,
        allocator: ElasticTokenToKVPoolAllocator,
        event_log: EventLog,
        metrics: RequestMetrics | None,
    ) -> None:
        """`levels`: each level's variants, one a layer."""
        executor = controller.executor
        self._executor = executor
        self._controller = controller
        self._floors = controller.floors
        self._needs = controller.needs
        self._floor_policy = options.floor_policy
        self._log = event_log
        self._metrics = metrics
        self._noted: Counter[str] = Counter(held=0, rejected=0, ignored=0)
        self._admission = Admission(
            options.floor_policy,
            controller.floors,
            controller.needs,
            executor,
            levels,
            scheduler,
            may_return=controller.limits.allow_return,
            may_lower=controller.may_lower_now,
            note=self._note,
        )
        self._exposure = RequestExposure(lambda: executor.level, pages, allocator, self._ended)
        self._prefixes = create_prefix_policy(options.prefix_policy, scheduler, executor, pages)

    def reach(self, request: Any) -> int:
        """The deepest level that a `TokenizedGenerateReqInput` may count on."""
        floor = self._admission.floor_of(request.sampling_params)
        return self._controller.reach if floor is None else min(self._controller.reach, floor)

    def queued(self, req: Any) -> None:
        """`req` entered the waiting queue, for the first time or after a retraction."""
        self._admission.queued(req)
        self._prefixes.queued(req)

    def begin_step(self) -> None:
        """Nothing of this step is decided or planned yet."""
        self._admission.begin_step()

    def follow_level(self) -> None:
        """The level may have changed; no batch is planned at the new one yet."""
        self._prefixes.follow()

    def admit(self, add: Callable[[], Any], adder: Any, req: Any) -> Any:
        """`adder` is asked to take `req` from the queue, which `add` does if there is room."""
        return self._admission.admit(add, adder, req)

    def launched(self, batch: Any) -> None:
        """The forward of `batch` starts now."""
        self._exposure.launched(batch)

    def released(self, req: Any) -> None:
        """`req` gave its KV back: it has finished, or was aborted or retracted."""
        self._exposure.released(req)
        self._admission.released(req)

    def status(self) -> dict[str, Any]:
        """Plain values for `/morph/status`."""
        return {
            "floors": {
                "policy": self._floor_policy,
                **self._noted,
                "running": self._floors.running_requests,
                "ceiling": self._floors.ceiling,
            },
            "needs": {"running": self._needs.running_requests, "lowest": self._needs.running},
            "exposure": self._exposure.totals(),
            "prefixes": self._prefixes.status(),
        }

    def _ended(self, req: Any, exposure: Exposure) -> None:
        self._admission.ended(req, exposure.lowest_level())
        if self._metrics:
            self._metrics.ended(exposure)

    def _note(self, result: str, wanted: str, floor: int) -> None:
        self._noted[result] += 1
        self._log.floor(result, wanted, floor, self._executor.level, self._noted[result])
        if self._metrics:
            self._metrics.floor(result)

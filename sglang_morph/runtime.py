"""The runtime of the scheduler process: builds memory and controller as SGLang starts up.

SGLang's hooks call it in this order: `adopt_weights`, `kv_budget`, `kv_pool_class`,
`build_allocator`, `attach`, and from then on `tick` at every step.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from memory_backends import create_backend
from memory_backends.kv_pool import ElasticMHATokenToKVPool, page_bytes
from memory_backends.token_pool import ElasticTokenToKVPoolAllocator
from sglang_morph.controller.capacity import publish_capacity
from sglang_morph.controller.controller import Controller
from sglang_morph.controller.executor import Executor
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.registry import create_policy
from sglang_morph.cuda_graphs import level_graph_runner
from sglang_morph.observability.control import MorphControlReq, MorphControlReqOutput
from sglang_morph.observability.event_log import EventLog
from sglang_morph.observability.metrics import MorphMetrics
from sglang_morph.options import MorphOptions
from sglang_morph.precision.layers import find_morphable_layers
from sglang_morph.precision.plan import PrecisionPlan
from sglang_morph.preflight import make_plan
from sglang_morph.weights_digest import weights_digest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class MorphRuntime:
    """One per scheduler process. Implements `patches.runtime.SchedulerRuntime`."""

    control_request_type: ClassVar[type] = MorphControlReq

    def __init__(self, options: MorphOptions) -> None:
        self._options = options
        self._backend = create_backend(options.memory_backend)

    def adopt_weights(self, model_runner: ModelRunner) -> None:
        self._model_runner = model_runner
        device = torch.device(model_runner.device)
        config = model_runner.model_config.hf_text_config
        self._plan: PrecisionPlan = make_plan(config, self._options, device.type)
        layers = find_morphable_layers(model_runner.model, self._plan.variants)
        for layer in layers:
            layer.preflight()
        self._backend.adopt_weights(layers, self._plan.steps, device)
        self._kernels = layers[0].kernels

    def kv_budget(self, available_bytes: int) -> int:
        return self._backend.kv_budget(available_bytes)

    def kv_pool_class(
        self, configurator: Any, max_total_num_tokens: int
    ) -> Callable[..., ElasticMHATokenToKVPool]:
        config = configurator.model_config
        nbytes = page_bytes(
            num_layers=configurator.layer_info.num_effective_layers,
            num_kv_heads=config.get_num_kv_heads(1),
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            dtype=configurator.kv_cache_dtype,
        )
        self._backend.allocate(base_pages=max_total_num_tokens + 1, page_bytes=nbytes)
        return functools.partial(
            ElasticMHATokenToKVPool, storage=self._backend.kv_storage, page_bytes=nbytes
        )

    def build_allocator(
        self,
        size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: ElasticMHATokenToKVPool,
        need_sort: bool,
    ) -> ElasticTokenToKVPoolAllocator:
        self._pool = kvcache
        self._allocator = ElasticTokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
        return self._allocator

    def decode_graph_runner(self, runner_class: type) -> type:
        return level_graph_runner(runner_class, self._backend, self._plan.levels)

    def at_full_precision(self) -> bool:
        return self._backend.depth == 0

    def attach(self, scheduler: Scheduler) -> None:
        executor = Executor(
            self._backend,
            self._plan,
            self._allocator,
            self._pool,
            publish=functools.partial(publish_capacity, scheduler),
            order=functools.partial(order_after_forward, scheduler),
        )
        publish_capacity(scheduler, self._allocator.size)  # an SGLang without a holder fails here
        event_log = EventLog(self._options.event_log, self._options.sample_interval_s)
        event_log.start(
            self._options,
            self._plan.digest,
            self._allocator.base_size,
            self._allocator.base_size + executor.gain(self._plan.max_level),
        )
        reporter = scheduler.metrics_reporter
        self._controller = Controller(
            scheduler,
            executor,
            create_policy(self._options, self._plan.max_level),
            self._backend,
            event_log,
            MorphMetrics.create(
                reporter.enable_metrics,
                reporter.metrics_collector.labels if reporter.enable_metrics else {},
            ),
            Monitor(percentile=self._options.slo_percentile),
        )
        logger.info(
            "Memory backend %s: %d base tokens; %s",
            self._options.memory_backend,
            self._allocator.base_size,
            ", ".join(
                f"level {k} lends {executor.gain(k)}" for k in range(1, self._plan.max_level + 1)
            ),
        )

    def tick(self, scheduler: Scheduler, running_batch: Any, last_batch: Any) -> None:
        self._controller.tick()

    def request_queued(self, req: Any, is_retracted: bool) -> None:
        self._controller.counts.queued(req, is_retracted)

    def request_released(self, req: Any) -> None:
        self._controller.counts.released(req, time.perf_counter())

    def relieve(self, batch: ScheduleBatch) -> bool:
        return self._controller.relieve(batch)

    def status(self) -> dict[str, Any]:
        report = self._backend.report()
        return {
            "memory_backend": self._options.memory_backend,
            "base_tokens": self._allocator.base_size,
            "capacity_tokens": self._allocator.size,
            "lent_tokens": self._allocator.lent_size,
            "levels": [
                {"steps": steps, "variants": self._plan.layer_variants(k)}
                for k, steps in enumerate(self._plan.levels)
            ],
            "plan_digest": self._plan.digest,
            "kernels": self._kernels,
            "bytes": {field: getattr(report, field) for field in report.__slots__},
            **self._controller.status(),
        }

    def handle_control(self, request: MorphControlReq) -> MorphControlReqOutput:
        try:
            payload = self._answer(request.action, request.argument)
        except KeyError as error:
            return MorphControlReqOutput(success=False, message=f"{error} is missing", payload={})
        except ValueError as error:
            return MorphControlReqOutput(success=False, message=str(error), payload={})
        return MorphControlReqOutput(success=True, message="", payload=payload)

    def _answer(self, action: str, argument: dict[str, Any]) -> dict[str, Any]:
        if action == "status":
            return self.status()
        if action == "set_level":
            self._controller.set_level(argument["level"])
            return {"wanted": argument["level"], "level": self._controller.executor.level}
        if action == "verify":
            return {
                "digest": weights_digest(self._model_runner.model),
                "level": self._controller.executor.level,
            }
        raise ValueError(f"unknown action {action!r}")


def create_runtime(options: MorphOptions) -> MorphRuntime:
    """The runtime for `options`, whose memory backend is not `static`."""
    return MorphRuntime(options)


def order_after_forward(scheduler: Scheduler) -> None:
    """Put the device work that follows, on the current stream, behind the forward in flight.

    The forward after that waits for the scheduler's stream anyway. The host does not wait.
    """
    device_module = torch.get_device_module(scheduler.device)
    device_module.current_stream().wait_stream(scheduler.forward_stream)

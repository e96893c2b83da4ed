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
from sglang_morph.bundle.serving import source_for
from sglang_morph.bundle.source import BundleSource
from sglang_morph.controller.capacity import bound_prefill_batches, publish_capacity
from sglang_morph.controller.changes import EventsQuery, convert
from sglang_morph.controller.controller import Controller
from sglang_morph.controller.eviction_cost import EvictionCost, EvictionParameters
from sglang_morph.controller.executor import Executor
from sglang_morph.controller.limits import Limits
from sglang_morph.controller.monitor import Monitor
from sglang_morph.controller.operator import Operator
from sglang_morph.controller.prefixes import keep_chunk
from sglang_morph.controller.registry import create_policy
from sglang_morph.controller.request_lengths import RequestLengths
from sglang_morph.controller.requests import Requests
from sglang_morph.controller.scheduler_view import growth_reserve, page_tables
from sglang_morph.cuda_graphs import level_graph_runner
from sglang_morph.observability.control import MorphControlReq, MorphControlReqOutput
from sglang_morph.observability.event_log import EventLog
from sglang_morph.observability.metrics import MorphMetrics
from sglang_morph.observability.request_metrics import RequestMetrics
from sglang_morph.options import MorphOptions
from sglang_morph.precision.checkpoints.source import CheckpointSource
from sglang_morph.precision.layers import find_morphable_layers
from sglang_morph.precision.lossless import lossless_part
from sglang_morph.precision.plan import PrecisionPlan
from sglang_morph.precision.variants.kernel_report import describe_kernels, kernels_of_layers
from sglang_morph.precision.variants.kernel_times import KernelTimes, measured_times
from sglang_morph.preflight import (
    follows_kernel_times,
    linear_shapes,
    make_plan,
    shapes_by_path,
)
from sglang_morph.start_errors import ending_in_one_line
from sglang_morph.variant_checkpoint import open_checkpoint
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
        unit = {} if options.unit_mib is None else {"unit_bytes": options.unit_mib << 20}
        self._backend = create_backend(options.memory_backend, **unit)

    @ending_in_one_line()
    def adopt_weights(self, model_runner: ModelRunner) -> None:
        began = time.perf_counter()
        self._model_runner = model_runner
        device = torch.device(model_runner.device)
        config = model_runner.model_config.hf_text_config
        self._kernel_times = self._measure_kernels(model_runner.model_config, device.type)
        self._plan: PrecisionPlan = make_plan(
            config, self._options, device.type, self._kernel_times
        )
        checkpoint = self._open_checkpoint(model_runner.model_config, device.type)
        source = checkpoint or self._bundle_source(model_runner, device.type)
        layers = find_morphable_layers(model_runner.model, self._plan.variants, source=source)
        if checkpoint is not None:
            checkpoint.compare_with(lambda index: layers[index].loaded_tensors())
        for layer in layers:
            layer.preflight()
        self._kept_full: tuple[int, ...] = ()
        if self._backend.lossless_only:
            self._plan, self._kept_full = lossless_part(self._plan, layers)
        self._backend.adopt_weights(layers, self._plan.steps, device)
        logger.info("Variants of the layers ready in %.1f s", time.perf_counter() - began)
        kernels = [layer.kernels for layer in layers]
        self._kernels = kernels_of_layers(kernels)
        for line in describe_kernels(kernels):
            logger.info("Kernels of %s", line)

    def _measure_kernels(self, model_config: Any, device_type: str) -> KernelTimes | None:
        if not follows_kernel_times(self._options, device_type):
            return None
        shapes = shapes_by_path(linear_shapes(model_config.hf_text_config))
        return measured_times(list(shapes.values()), model_config.dtype)

    def _open_checkpoint(self, model_config: Any, device_type: str) -> CheckpointSource | None:
        if self._options.variant_checkpoint is None:
            return None
        return open_checkpoint(
            self._options.variant_checkpoint,
            self._plan,
            shapes_by_path(linear_shapes(model_config.hf_text_config)),
            device_type,
            model_config.dtype,
        )

    def _bundle_source(self, model_runner: ModelRunner, device_type: str) -> BundleSource | None:
        if self._options.bundle is None:
            return None
        return source_for(
            self._options.bundle,
            model_runner.model_config,
            device_type,
            self._plan.variants,
            lambda: find_morphable_layers(model_runner.model, self._plan.variants),
        )

    @ending_in_one_line()
    def kv_budget(self, available_bytes: int) -> int:
        return self._backend.kv_budget(available_bytes)

    @ending_in_one_line()
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
            tables=functools.partial(page_tables, scheduler),
            reserve=functools.partial(growth_reserve, scheduler),
        )
        publish_capacity(scheduler, self._allocator.size)  # an SGLang without a holder fails here
        bound_prefill_batches(scheduler, self._allocator.base_size)
        event_log = EventLog(self._options.event_log, self._options.sample_interval_s)
        event_log.start(
            self._options,
            self._plan.digest,
            self._allocator.base_size,
            self._allocator.base_size + executor.gain(self._plan.max_level),
        )
        reporter = scheduler.metrics_reporter
        labels = reporter.metrics_collector.labels if reporter.enable_metrics else {}
        self._controller = Controller(
            scheduler,
            executor,
            create_policy(self._options, self._plan.max_level),
            self._backend,
            event_log,
            MorphMetrics.create(reporter.enable_metrics, labels),
            Monitor(percentile=self._options.slo_percentile),
            EvictionCost(
                EvictionParameters.of(self._options),
                scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            ),
        )
        self._controller.set_limits(Limits(restore_gb_per_s=self._options.restore_gb_per_s))
        self._operator = Operator(self._controller, self._options)
        self._requests = Requests(
            self._options,
            scheduler,
            self._controller,
            [self._plan.layer_variants(k) for k in range(len(self._plan.levels))],
            self._pool.page_levels,
            self._allocator,
            event_log,
            RequestMetrics.create(reporter.enable_metrics, labels),
        )
        self._lengths = RequestLengths(scheduler, executor.level_pages, self._requests.reach)
        logger.info(
            "Memory backend %s: %d base tokens; %s",
            self._options.memory_backend,
            self._allocator.base_size,
            ", ".join(
                f"level {k} lends {executor.gain(k)}" for k in range(1, self._plan.max_level + 1)
            ),
        )

    def tick(self) -> None:
        self._requests.begin_step()
        self._controller.tick()
        self._requests.follow_level()

    def may_sleep(self) -> bool:
        return not self._controller.executor.restoring

    def take_in(self, handle: Callable[[], Any], request: Any) -> Any:
        with self._lengths.taking_in(request):
            return handle()

    def request_queued(self, req: Any, is_retracted: bool) -> None:
        self._controller.counts.queued(req, is_retracted)
        self._requests.queued(req)

    def request_released(self, req: Any) -> None:
        self._controller.counts.released(req, time.perf_counter())
        self._requests.released(req)

    def relieve(self, batch: ScheduleBatch) -> bool:
        relieved = self._controller.relieve(batch)
        self._requests.follow_level()
        return relieved

    def admit(self, add: Callable[[], Any], adder: Any, req: Any) -> Any:
        return self._requests.admit(add, adder, req)

    def launched(self, batch: ScheduleBatch) -> None:
        self._requests.launched(batch)

    def chunk_left_out(self, req: Any, tree_cache: Any) -> None:
        keep_chunk(req, tree_cache)

    def status(self) -> dict[str, Any]:
        report = self._controller.executor.report()
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
            "kept_full_layers": self._kept_full,
            "kernels": self._kernels,
            "kernel_times": self._kernel_times.status() if self._kernel_times else None,
            "bytes": {field: getattr(report, field) for field in report.__slots__},
            **self._controller.status(),
            **self._requests.status(),
        }

    def handle_control(self, request: MorphControlReq) -> MorphControlReqOutput:
        try:
            payload = self._answer(request.action, request.argument)
        except ValueError as error:
            return MorphControlReqOutput(success=False, message=str(error), payload={})
        refusal = payload.get("error")
        return MorphControlReqOutput(
            success=refusal is None, message=refusal or "", payload=payload
        )

    def _answer(self, action: str, argument: dict[str, Any]) -> dict[str, Any]:
        if action == "status":
            return self.status()
        if action == "events":
            query = convert(argument, EventsQuery)
            return self._controller.events(query.limit, query.after)
        if action == "set_level":
            return self._operator.set_level(argument)
        if action == "set_policy":
            return self._operator.set_policy(argument)
        if action == "set_limits":
            return self._operator.set_limits(argument)
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

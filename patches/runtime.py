"""What the hooks need of the runtime. The runtime is injected; patches never import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol


class SchedulerRuntime(Protocol):
    """Called in the scheduler process, always from the scheduler's own thread.

    The order at start is that of the methods: `adopt_weights`, `kv_budget`, `kv_pool_class`,
    `build_allocator`, `attach`.
    """

    control_request_type: ClassVar[type]
    """Type of the messages that `handle_control` takes."""

    def adopt_weights(self, model_runner: Any) -> None:
        """Weights are loaded: back them up and release the morphable layers' memory."""

    def kv_budget(self, available_bytes: int) -> int:
        """Bytes of `available_bytes` (SGLang's own figure) that may hold base KV pages."""

    def kv_pool_class(self, configurator: Any, max_total_num_tokens: int) -> Callable[..., Any]:
        """Lay out memory for that many base tokens; makes an `MHATokenToKVPool` that views it.

        `configurator`: SGLang's `KVCacheConfigurator`.
        """

    def build_allocator(
        self, size: int, dtype: Any, device: str, kvcache: Any, need_sort: bool
    ) -> Any:
        """The `BaseTokenToKVPoolAllocator` over the pool. `size`: base tokens."""

    def decode_graph_runner(self, runner_class: type) -> type:
        """The class to capture and replay decode graphs with, made from SGLang's."""

    def at_full_precision(self) -> bool:
        """Whether every weight is at full precision now."""

    def attach(self, scheduler: Any) -> None:
        """The scheduler is complete; its event loop starts next."""

    def tick(self) -> None:
        """A step boundary, before SGLang plans the next batch."""

    def may_sleep(self) -> bool:
        """Whether an idle scheduler may sleep now, so that no step follows for a second."""

    def take_in(self, handle: Callable[[], Any], request: Any) -> Any:
        """A request has arrived; `handle` checks it against the limits and queues it."""

    def request_queued(self, req: Any, is_retracted: bool) -> None:
        """A request entered the waiting queue, for the first time or after a retraction."""

    def request_released(self, req: Any) -> None:
        """A request gave its KV back: it has finished, or was aborted or retracted."""

    def relieve(self, batch: Any) -> bool:
        """The next decode step does not fit: make room at once. True if capacity has grown."""

    def admit(self, add: Callable[[], Any], adder: Any, req: Any) -> Any:
        """`adder`, which plans a prefill, is asked to take `req` from the queue, which `add` does.

        Returns an `AddReqResult`.
        """

    def launched(self, batch: Any) -> None:
        """A forward starts, with weights and pages as they are."""

    def chunk_left_out(self, req: Any, tree_cache: Any) -> None:
        """A chunk's KV was kept out of the cache: make `req` ready for its next chunk."""

    def handle_control(self, request: Any) -> Any:
        """Answer a `control_request_type`; the reply goes back to the server process."""

    def status(self) -> dict[str, Any]:
        """Level, capacity, bytes by owner... Plain values that serialise."""


class ServerRuntime(Protocol):
    """Called in the server process (tokenizer manager and HTTP)."""

    control_reply_type: ClassVar[type]
    """Type of the messages that answer a control request."""

    exposure_field: ClassVar[str]
    """Name of a request's exposure in `meta_info`."""

    def metadata_of(self, meta_infos: list[dict[str, Any]]) -> dict[str, Any]:
        """What an OpenAI response with these choices adds to its metadata."""

    def check_custom_params(self, custom_params: dict[str, Any]) -> None:
        """Raises ValueError for a demand that makes no sense."""


class EntryPointRuntime(ServerRuntime, Protocol):
    """Called in addition where SGLang's own entry points, with stock arguments, are used."""

    def fill_defaults(self, server_args: Any) -> None:
        """Before the arguments are resolved: fill in what the user left open."""

    def before_start(self, server_args: Any) -> None:
        """The arguments are resolved, no process is started yet. Raises to refuse them."""

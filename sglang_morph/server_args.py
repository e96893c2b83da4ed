"""SGLang's server arguments plus ours. Everything is checked before a process is started."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sglang_morph.cpu import fill_cpu_defaults
from sglang_morph.flags import DEFAULTS, OneLineParser, add_flags, options_of
from sglang_morph.graph_sizes import largest_decode_graph
from sglang_morph.option_checks import check_options
from sglang_morph.options import MorphOptions
from sglang_morph.preflight import check_model_and_host
from sglang_morph.refusals import MorphRefusal, refuse_unsupported


@dataclasses.dataclass
class MorphServerArgs(ServerArgs):
    """`ServerArgs` with the fields of `MorphOptions`. Raises `MorphRefusal` when built.

    Read-only once built, as its parent; pickled as such into the processes SGLang spawns.
    """

    memory_backend: str = DEFAULTS.memory_backend
    morph_policy: str = DEFAULTS.policy
    morph_variants: tuple[str, ...] = DEFAULTS.variants
    morph_bundle: str | None = DEFAULTS.bundle
    morph_variant_checkpoint: str | None = DEFAULTS.variant_checkpoint
    morph_plan: str | None = DEFAULTS.plan
    morph_levels: tuple[int, ...] = DEFAULTS.levels
    morph_order: str = DEFAULTS.order
    morph_max_level: int | None = DEFAULTS.max_level
    morph_mode: str = DEFAULTS.mode
    morph_enter_pressure: float | None = DEFAULTS.enter_pressure
    morph_leave_pressure: float | None = DEFAULTS.leave_pressure
    morph_enter_queue_delay_s: float | None = DEFAULTS.enter_queue_delay_s
    morph_enter_late_s: float | None = DEFAULTS.enter_late_s
    morph_enter_hold_s: float | None = DEFAULTS.enter_hold_s
    morph_leave_hold_s: float | None = DEFAULTS.leave_hold_s
    morph_min_dwell_s: float | None = DEFAULTS.min_dwell_s
    morph_max_transitions_per_minute: int | None = DEFAULTS.max_transitions_per_minute
    morph_lookahead_s: float | None = DEFAULTS.lookahead_s
    morph_ttft_target_s: float | None = DEFAULTS.ttft_target_s
    morph_tpot_target_s: float | None = DEFAULTS.tpot_target_s
    morph_slo_percentile: float = DEFAULTS.slo_percentile
    morph_quality_budget: float | None = DEFAULTS.quality_budget
    morph_quality_burst_s: float | None = DEFAULTS.quality_burst_s
    morph_two_mode_solution: str | None = DEFAULTS.two_mode_solution
    morph_eviction_quality_price: float = DEFAULTS.eviction_quality_price
    morph_eviction_victim_reuse: float = DEFAULTS.eviction_victim_reuse
    morph_eviction_dwell_s: float = DEFAULTS.eviction_dwell_s
    morph_eviction_min_pressure: float = DEFAULTS.eviction_min_pressure
    morph_unit_mib: int | None = DEFAULTS.unit_mib
    morph_restore_gb_per_s: float | None = DEFAULTS.restore_gb_per_s
    morph_floor_policy: str = DEFAULTS.floor_policy
    morph_prefix_policy: str = DEFAULTS.prefix_policy
    morph_event_log: str | None = DEFAULTS.event_log
    morph_sample_interval_s: float = DEFAULTS.sample_interval_s

    def __post_init__(self) -> None:
        fill_cpu_defaults(self)
        super().__post_init__()
        check_arguments(self, self.morph)

    def _handle_gpu_memory_settings(self, gpu_mem: float | None) -> None:
        """As SGLang chooses by the GPU's memory, but decode graphs for the largest KV cache."""
        decode = self.cuda_graph_config.decode
        given = decode.max_bs is not None or decode.bs is not None
        if self.device == "cuda" and gpu_mem and not given and not self.morph.is_static:
            decode.max_bs = largest_decode_graph(self, self.morph, gpu_mem)
        super()._handle_gpu_memory_settings(gpu_mem)

    @property
    def morph(self) -> MorphOptions:
        """The elastic options as one value."""
        return options_of(self)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """SGLang's flags and ours."""
        ServerArgs.add_cli_args(parser)
        add_flags(parser)


def check_arguments(server_args: Any, options: MorphOptions) -> None:
    """Raises `MorphRefusal` unless resolved `server_args` and `options` can work together."""
    check_options(options, server_args.device)
    if not options.is_static:
        refuse_unsupported(server_args, options.memory_backend)
        check_model_and_host(server_args, options)


def prepare_morph_server_args(argv: Sequence[str]) -> MorphServerArgs:
    """Parse a command line, with SGLang's `--config` file if it names one.

    Raises `MorphRefusal` for bad flags; sets up logging as SGLang's launcher does.
    """
    parser = OneLineParser(prog="sglang-morph serve")
    MorphServerArgs.add_cli_args(parser)
    arguments = list(argv)
    if "--config" in arguments:
        try:
            arguments = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
        except (OSError, ValueError) as error:
            raise MorphRefusal(f"--config: {error}") from error
    values = parser.parse_args(arguments)
    logging.basicConfig(
        level=values.log_level.upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    server_args: MorphServerArgs = MorphServerArgs.from_cli_args(values)
    return server_args

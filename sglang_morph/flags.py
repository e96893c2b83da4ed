"""The flags behind `MorphOptions`: declared once, for the launcher and for the environment."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from sglang_morph.controller.policy_options import PolicyOptions
from sglang_morph.options import MorphOptions
from sglang_morph.refusals import MorphRefusal

ENVIRONMENT = "SGLANG_MORPH"
"""Flags of this module in one shell-quoted string, for SGLang's own entry points."""

DEFAULTS = MorphOptions()


_POLICY_DEFAULTS = {
    field.name
    for field in fields(PolicyOptions)
    if field.name not in ("max_level", "two_mode_solution")
}
"""Options whose default is up to the policy and its mode."""


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in _names(text))
    except ValueError:
        message = f"{text!r} is not a list of integers such as 8,16,32"
        raise argparse.ArgumentTypeError(message) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _folder_or_none(text: str) -> str | None:
    return None if text == "none" else text


@dataclass(frozen=True, slots=True)
class Flag:
    """The flag of one field of `MorphOptions`."""

    field: str
    parse: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def dest(self) -> str:
        """Its name in `MorphServerArgs`."""
        return self.field if self.field == "memory_backend" else f"morph_{self.field}"

    @property
    def name(self) -> str:
        return "--" + self.dest.replace("_", "-")

    @property
    def default(self) -> Any:
        return getattr(DEFAULTS, self.field)


FLAGS: tuple[Flag, ...] = (
    Flag(
        "memory_backend",
        str,
        "NAME",
        "Who owns the memory of weights and KV cache: static (stock SGLang, nothing moves), "
        "layer_swap (decoder layers give up bytes by taking smaller variants in place) or "
        "semi_unified (weights in two halves; the memory of the lower ones is mapped to KV pages).",
    ),
    Flag(
        "policy",
        str,
        "NAME",
        "Who decides on the precision level: threshold (memory pressure), slo (latency targets and "
        "a quality budget), two_mode (full or lowest, by solved thresholds) or manual (the "
        "operator, by POST /morph/level).",
    ),
    Flag(
        "variants",
        _names,
        "A,B",
        "Variants a layer passes through, largest first, such as int8,int4. None given: the "
        "device's default.",
    ),
    Flag(
        "variant_checkpoint",
        str,
        "PATH",
        "Folder of a quantized checkpoint of the same model that int4 (AutoAWQ, or "
        "compressed-tensors pack-quantized) or fp8 (float-quantized) is taken from. None given: "
        "that variant is quantized as the server starts.",
    ),
    Flag(
        "bundle",
        _folder_or_none,
        "DIR|auto|none",
        "Morph bundle (`sglang-morph profile`): its plan, and its variants instead of quantizing "
        "at start. auto: variants kept in the user's cache, made if they are missing.",
    ),
    Flag(
        "plan", str, "PATH", "Precision plan (JSON). None given: a default plan in --morph-order."
    ),
    Flag(
        "levels",
        _numbers,
        "N,N",
        "How many plan steps (layers times variants) are applied at level 1, 2, ..., such as "
        "8,16,32; steps past the last are never taken. Every level has its own CUDA graphs. None "
        "given: the plan's; in a default plan a quarter, half and all of the layers at the first "
        "variant, then all at each later one.",
    ),
    Flag(
        "order",
        str,
        "ORDER",
        "Layer order of the default plan: front (first layer first) or back.",
    ),
    Flag(
        "max_level",
        int,
        "LEVEL",
        "Highest precision level the policy may choose, at most the plan's last (none given).",
    ),
    Flag(
        "enter_pressure",
        float,
        "FRACTION",
        "threshold: precision falls when the KV pages in use, without evictable ones, reach this "
        "fraction of those that exist. two_mode: of the base pages, those wanted included.",
    ),
    Flag(
        "leave_pressure",
        float,
        "FRACTION",
        "threshold, two_mode: precision returns when the KV pages in use fall to this fraction of "
        "the base pages.",
    ),
    Flag(
        "enter_queue_delay_s",
        float,
        "SECONDS",
        "threshold: precision falls when the oldest request that finds no room waited this long.",
    ),
    Flag(
        "enter_late_s",
        float,
        "SECONDS",
        "threshold, slo: precision falls also when the oldest request waited this long although "
        "there is room for it (none given: it does not). For GPUs, where FP8 computes faster.",
    ),
    Flag("enter_hold_s", float, "SECONDS", "How long a reason to lower precision must hold."),
    Flag("leave_hold_s", float, "SECONDS", "How long the reason to restore precision must hold."),
    Flag("min_dwell_s", float, "SECONDS", "Shortest stay at a level."),
    Flag(
        "mode",
        str,
        "MODE",
        "threshold: presets, accuracy, default or performance. Other flags override them.",
    ),
    Flag("max_transitions_per_minute", int, "N", "Most level changes in any 60 s, at least 2."),
    Flag(
        "lookahead_s",
        float,
        "SECONDS",
        "threshold: how far to look ahead along the excess of arriving over served tokens.",
    ),
    Flag("ttft_target_s", float, "SECONDS", "slo: time to first token to keep."),
    Flag("tpot_target_s", float, "SECONDS", "slo: time per output token after the first to keep."),
    Flag(
        "slo_percentile",
        float,
        "PERCENT",
        "Percentile at which TTFT and TPOT are reported and compared with their targets.",
    ),
    Flag(
        "quality_budget",
        float,
        "FRACTION",
        "slo: share of time that may pass below full precision; 1 sets no limit.",
    ),
    Flag(
        "quality_burst_s",
        float,
        "SECONDS",
        "slo: seconds below full precision that may be spent ahead of the budget.",
    ),
    Flag(
        "two_mode_solution",
        str,
        "PATH",
        "two_mode: thresholds written by `sglang-morph policy solve`. None given: built-in ones.",
    ),
    Flag(
        "eviction_quality_price",
        float,
        "TOKENS",
        "Cached prefixes are kept by lowering precision where computing them again would cost "
        "more than this many computed tokens for each token at the lower level.",
    ),
    Flag(
        "eviction_victim_reuse",
        float,
        "FRACTION",
        "Reuse expected of the prefixes evicted next, over that of the average one.",
    ),
    Flag(
        "eviction_dwell_s",
        float,
        "SECONDS",
        "How long precision is expected to stay low when that price is weighed.",
    ),
    Flag(
        "eviction_min_pressure",
        float,
        "FRACTION",
        "KV pages in use over base pages below which prefixes are evicted without weighing.",
    ),
    Flag(
        "unit_mib",
        int,
        "MIB",
        "semi_unified: physical memory that moves at a time, a multiple of 2 MiB and no more than "
        "the first level lends. Larger units cost less to map. None given: 2 on a CPU, else 64.",
    ),
    Flag(
        "restore_gb_per_s",
        float,
        "GB/S",
        "How fast a restore uploads weights while requests decode, on average, in 10^9 bytes a "
        "second; POST /morph/limits changes it. None given: as fast as the link goes.",
    ),
    Flag(
        "floor_policy",
        str,
        "POLICY",
        "A request that asks for more precision (min_precision) than there is: hold (it waits, and "
        "precision returns for it), reject (answered with 503) or ignore (served and counted).",
    ),
    Flag(
        "prefix_policy",
        str,
        "POLICY",
        "Cached prefixes computed below full precision: share (reused and counted), namespace "
        "(reused at their own level only) or refresh (dropped once precision is full again).",
    ),
    Flag("event_log", str, "PATH", "Write events to this file, one JSON object a line."),
    Flag(
        "sample_interval_s",
        float,
        "SECONDS",
        "Shortest time between two readings of the signals in the event log.",
    ),
)
"""One flag per field of `MorphOptions`."""


class OneLineParser(argparse.ArgumentParser):
    """Bad flags raise `MorphRefusal`: SGLang's usage text would bury a message under pages."""

    def error(self, message: str) -> NoReturn:
        raise MorphRefusal(f"{message}; see --help for the flags")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to `parser`, in a group of their own."""
    group = parser.add_argument_group("elastic memory (sglang_morph)")
    for flag in FLAGS:
        group.add_argument(
            flag.name,
            dest=flag.dest,
            type=flag.parse,
            default=flag.default,
            metavar=flag.metavar,
            help=f"{flag.help} Default: {_shown_default(flag)}.",
        )


def _shown_default(flag: Flag) -> str:
    if isinstance(flag.default, tuple):
        return ",".join(map(str, flag.default)) or "none"
    if flag.default is not None:
        return str(flag.default)
    return "the policy's" if flag.field in _POLICY_DEFAULTS else "none"


def options_of(values: object) -> MorphOptions:
    """`MorphOptions` from an object that has every flag's `dest` as an attribute."""
    return MorphOptions(**{flag.field: getattr(values, flag.dest) for flag in FLAGS})


def parse_options(argv: Sequence[str]) -> MorphOptions:
    """`MorphOptions` from flags of this module alone. Raises `MorphRefusal` for any other."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    return options_of(parser.parse_args(list(argv)))


def options_from_text(text: str) -> MorphOptions:
    """`MorphOptions` from the value of `ENVIRONMENT`. Raises `MorphRefusal`."""
    try:
        return parse_options(shlex.split(text))
    except ValueError as error:
        raise MorphRefusal(f"{ENVIRONMENT}: {error}") from error


def to_argv(options: MorphOptions) -> list[str]:
    """The shortest flags that `parse_options` turns into `options`."""
    argv: list[str] = []
    for flag in FLAGS:
        value = getattr(options, flag.field)
        if value != flag.default:
            argv += [
                flag.name,
                ",".join(map(str, value)) if isinstance(value, tuple) else str(value),
            ]
    return argv

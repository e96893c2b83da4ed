"""A quality report as a table of text, for the terminal and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sglang_morph.quality.metrics import Interval, mean_interval, perplexity
from sglang_morph.quality.results import (
    AnswerResult,
    ContinuationResult,
    LevelResult,
    QualityReport,
    TextResult,
)

Table = list[list[str]]
"""Rows of cells, the header first."""

_MIB = 1 << 20
TEXT_HEADER = ["perplexity", "change (%)", "KL (nats)", "same top (%)"]
GREEDY_HEADER = ["agreement (%)", "diverges after"]
ANSWER_HEADER = ["F1", "ROUGE-L"]
_HEADER = [
    *("plan", "level", "served", "layers", "MiB freed"),
    *TEXT_HEADER,
    *GREEDY_HEADER,
    *ANSWER_HEADER,
]


def loss_change(text: TextResult, full: TextResult) -> Interval:
    """Of the perplexity, as a fraction: paired by block."""
    found = mean_interval(np.subtract(text.loss, full.loss))
    return Interval(*(math.expm1(value) for value in (found.mean, found.low, found.high)))


def table(report: QualityReport) -> Table:
    """Means; in brackets 95% bootstrap intervals over blocks."""
    full = report.results[0]
    return [_HEADER, *(_row(result, full) for result in report.results)]


def _row(result: LevelResult, full: LevelResult) -> list[str]:
    layers = ", ".join(f"{count} {variant}" for variant, count in result.layers.items())
    return [
        "any" if result.level == 0 else result.plan,
        str(result.level),
        result.served,
        layers or "all full",
        mib(result.freed_bytes),
        *text_cells(result.text, None if result is full else full.text),
        *greedy_cells(result.continuations),
        *answer_cells(result.answers),
    ]


def mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f}"


def text_cells(text: TextResult | None, full: TextResult | None) -> list[str]:
    """Under `TEXT_HEADER`. Without `full` there is nothing to compare with."""
    if text is None:
        return [""] * len(TEXT_HEADER)
    value = f"{perplexity(text.loss):.3f}"
    if full is None:
        return [value, "", "", ""]
    return [
        value,
        with_interval(loss_change(text, full), 100, "+.2f"),
        with_interval(mean_interval(text.kl), 1, ".4f"),
        _mean(text.same_top, 100, 1),
    ]


def greedy_cells(found: ContinuationResult) -> list[str]:
    """Under `GREEDY_HEADER`."""
    return [_mean(found.agreement, 100, 1), _mean(found.first_divergence, 1, 1)]


def answer_cells(found: AnswerResult) -> list[str]:
    """Under `ANSWER_HEADER`."""
    return [_mean(found.f1, 1, 3), _mean(found.rouge_l, 1, 3)]


def with_interval(value: Interval, scale: float, form: str) -> str:
    mean, low, high = (
        format(scale * number, form) for number in (value.mean, value.low, value.high)
    )
    return f"{mean} [{low}, {high}]"


def _mean(values: Sequence[float], scale: float, digits: int) -> str:
    return f"{scale * float(np.mean(values)):.{digits}f}"


def markdown(rows: Table) -> str:
    header, *body = rows
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *body])


def notes(report: QualityReport) -> list[str]:
    """What a reader must know before the numbers."""
    settings, origin = report.settings, report.settings.text
    return [
        f"Text: {origin['source']}, {settings.blocks} blocks of {settings.block_tokens} tokens "
        f"(SHA-256 {str(origin['evaluation_sha256'])[:12]}, seed {settings.seed}). Prompts: "
        f"{settings.prompts}.",
        "Perplexity, its change and KL(full || level) are over the text; same top: positions whose "
        "likeliest token is full precision's. Brackets: 95% bootstrap over blocks, paired with "
        "full precision.",
        f"Agreement: positions of {settings.continued_tokens} greedy tokens that equal full "
        "precision's; diverges after: tokens before the first that differs. With a change of "
        "level: in the middle of every response.",
        "Weights are what the variants stand for; all else is computed in float32, with the inputs "
        "of fp8 and nested_fp8 layers rounded to E4M3 token by token.",
        f"Measured on {report.provenance['hardware']}, commit {report.provenance['commit']}, "
        f"{report.provenance['date'][:10]}, by `{report.provenance['command']}`.",
    ]

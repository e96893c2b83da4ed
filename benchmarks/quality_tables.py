"""Tables, picture and acceptance rows of what `benchmarks.quality` found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.acceptance import RESULTS, Row
from benchmarks.quality_results import (
    ALL,
    ARMS,
    DEFAULT_ORDER,
    LEVELS,
    ORDERS,
    RAW,
    SEARCHED,
    SEEDS,
    Cell,
    Found,
)
from sglang_morph.precision.names import FULL
from sglang_morph.quality.figure import Point, draw_lines
from sglang_morph.quality.metrics import mean_interval, perplexity
from sglang_morph.quality.results import TextResult
from sglang_morph.quality.tables import (
    ANSWER_HEADER,
    GREEDY_HEADER,
    TEXT_HEADER,
    Table,
    answer_cells,
    greedy_cells,
    markdown,
    mib,
    text_cells,
)

PICTURE = RESULTS / "quality_smollm2.png"
PARTIAL = tuple(level for level in LEVELS if level != ALL)
FAMILIES = ("front", "back", "random", *SEARCHED)
"""Orders, the seeds of `random` taken together."""
_MIB = 1 << 20

Blocks = npt.NDArray[np.float64]
"""A number for each block of the text."""


def tables(found: Found) -> str:
    """Markdown."""
    parts = [
        f"Order `{DEFAULT_ORDER}`; full precision has a perplexity of "
        f"{perplexity(_text_of_full(found).loss):.3f}:",
        markdown(_variants_table(found)),
        f"KL(full || level) in thousandths of a nat. In brackets: how much more than "
        f"`{DEFAULT_ORDER}`, 95% bootstrap over blocks; starred where that is less for sure:",
        markdown(_orders_table(found, "kl", 1000, 2)),
        "Loss added to full precision's, in hundredths of a nat (small ones are about percent of "
        "perplexity), likewise:",
        markdown(_orders_table(found, "loss", 100, 2)),
        f"Of {len(ARMS) * len(PARTIAL)} cells, those in which the row's order is worse than the "
        "column's for sure, by KL / by perplexity:",
        markdown(_duels_table(found)),
        f"Half of the layers, order `{DEFAULT_ORDER}`, level changed in the middle of responses:",
        markdown(_alternating_table(found)),
    ]
    return "\n\n".join(parts)


def _variants_table(found: Found) -> Table:
    rows: Table = [["variant", "layers", "MiB freed", *TEXT_HEADER, *GREEDY_HEADER]]
    full = _text_of_full(found)
    for arm in ARMS:
        for level in LEVELS:
            cell = _cell(found, arm.name, DEFAULT_ORDER, level)
            greedy = [] if cell.continuations is None else greedy_cells(cell.continuations)
            text = text_cells(cell.text, full)
            rows.append([arm.name, level, mib(cell.freed_bytes), *text, *greedy])
    return rows


def _orders_table(found: Found, measure: str, scale: float, digits: int) -> Table:
    rows: Table = [["variant", "layers", *FAMILIES]]
    for arm in ARMS:
        for level in PARTIAL:
            blocks = {
                family: _blocks(found, arm.name, family, level, measure) for family in FAMILIES
            }
            cells = [
                _order_cell(blocks[family], blocks[DEFAULT_ORDER], scale, digits)
                for family in FAMILIES
            ]
            rows.append([arm.name, level, *cells])
    return rows


def _order_cell(blocks: Blocks, default: Blocks, scale: float, digits: int) -> str:
    value = f"{scale * blocks.mean():.{digits}f}"
    if blocks is default:
        return value
    more = mean_interval(blocks - default)
    star = "*" if more.high < 0 else ""
    return f"{value}{star} [{scale * more.low:+.{digits}f}, {scale * more.high:+.{digits}f}]"


def _duels_table(found: Found) -> Table:
    rows: Table = [["worse than", *FAMILIES]]
    for loser in FAMILIES:
        counts = [
            "" if loser == winner else " / ".join(_defeats(found, loser, winner))
            for winner in FAMILIES
        ]
        rows.append([loser, *counts])
    return rows


def _defeats(found: Found, loser: str, winner: str) -> list[str]:
    """In how many cells `loser` is worse, by KL and by loss."""
    cells = [(arm.name, level) for arm in ARMS for level in PARTIAL]
    counts = []
    for measure in ("kl", "loss"):
        pairs = [
            _blocks(found, arm, loser, level, measure) - _blocks(found, arm, winner, level, measure)
            for arm, level in cells
        ]
        counts.append(str(sum(mean_interval(pair).low > 0 for pair in pairs)))
    return counts


def _blocks(found: Found, arm: str, family: str, level: str, measure: str) -> Blocks:
    """By block, what an order adds to full precision; the mean over the seeds of `random`."""
    orders = [order for order in ORDERS if order.partition(" ")[0] == family]
    full = np.asarray(getattr(_text_of_full(found), measure))
    values = [getattr(_cell(found, arm, order, level).text, measure) for order in orders]
    return np.mean(values, axis=0) - full


def _alternating_table(found: Found) -> Table:
    rows: Table = [["variant", "served", *GREEDY_HEADER, *ANSWER_HEADER]]
    for result in (found.full, *found.alternating):
        name = FULL if result is found.full else result.plan
        scores = [*greedy_cells(result.continuations), *answer_cells(result.answers)]
        rows.append([name, result.served, *scores])
    return rows


def _text_of_full(found: Found) -> TextResult:
    if found.full.text is None:
        raise ValueError("full precision has read no text; begin anew with --fresh")
    return found.full.text


def _cell(found: Found, arm: str, order: str, level: str) -> Cell:
    cell = found.cell(arm, order, level)
    if cell is None:
        raise ValueError(f"{arm}, {order}, {level} has not been measured")
    return cell


def draw(found: Found) -> None:
    """KL against bytes freed, a panel for each variant; and the default order of all variants."""
    figure = Figure(figsize=(13, 12), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.08))
    grid = figure.subplots(3, 3)
    *panels, last = grid.flat
    for arm, axes in zip(ARMS, panels, strict=True):
        draw_lines(axes, {family: _line(found, arm.name, family) for family in FAMILIES})
        axes.set(title=arm.name, ylim=(0, None))
    draw_lines(last, {arm.name: _line(found, arm.name, DEFAULT_ORDER) for arm in ARMS})
    last.set(title=f"all, order {DEFAULT_ORDER}", yscale="log")
    for axes in grid.flat:
        axes.set(xlim=(0, None), xlabel="weights freed (MiB)", ylabel="KL(full || level), nats")
    for drawn, title, place in (
        (panels[0], "order of layers", "outside lower left"),
        (last, "lower right panel: variant", "outside lower right"),
    ):
        handles, labels = drawn.get_legend_handles_labels()
        figure.legend(handles, labels, loc=place, ncols=4, frameon=False, title=title)
    figure.suptitle("SmolLM2-135M with a quarter, half and all of its layers lowered")
    figure.savefig(PICTURE, dpi=110)


def _line(found: Found, arm: str, family: str) -> list[Point]:
    order = f"{family} {SEEDS[0]}" if family == "random" else family
    return [
        Point(
            _cell(found, arm, order, level).freed_bytes / _MIB,
            mean_interval(_blocks(found, arm, family, level, "kl")),
        )
        for level in LEVELS
    ]


def acceptance_rows(found: Found) -> list[Row]:
    full = perplexity(_text_of_full(found).loss)
    rtn, awq, gptq, fp8 = (
        perplexity(_cell(found, arm, DEFAULT_ORDER, ALL).text.loss)
        for arm in ("int4 rtn", "int4 awq", "int4 gptq", "fp8")
    )
    half = _cell(found, "fp8", DEFAULT_ORDER, "half").continuations
    if half is None:
        raise ValueError("the default order has no continuations; begin anew with --fresh")
    agreement, tokens = float(np.mean(half.agreement)), found.settings.continued_tokens
    numbers = [
        ("ppl.full", "", round(full, 3), "", "", True),
        ("ppl.int4_rtn", "int4 rtn", round(rtn, 3), "", "", True),
        (
            "ppl.int4_awq",
            "int4 awq",
            round(awq, 3),
            "",
            f"< {rtn:.3f}, that of int4_rtn",
            awq < rtn,
        ),
        (
            "ppl.int4_gptq",
            "int4 gptq",
            round(gptq, 3),
            "",
            f"< {rtn:.3f}, that of int4_rtn",
            gptq < rtn,
        ),
        ("ppl.fp8", "fp8", round(fp8, 3), "", "<= 1.02 x full", fp8 <= 1.02 * full),
        (
            "token_agreement.half_layers_fp8",
            "fp8",
            round(agreement, 3),
            f"of {tokens} tokens",
            "",
            True,
        ),
    ]
    raw = str(RAW.relative_to(RESULTS.parents[1]))
    return [
        Row(f"quality.{name}", *rest, **found.origins.get(arm, found.provenance), raw=raw)
        for name, arm, *rest in numbers
    ]

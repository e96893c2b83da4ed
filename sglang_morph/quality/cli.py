"""`sglang-morph quality`: what each level of a plan does to the answers."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_morph.demo.provenance import provenance
from sglang_morph.profiling.cli import DATASET_HELP
from sglang_morph.refuse import refuse

if TYPE_CHECKING:
    from sglang_morph.quality.results import QualityReport
    from sglang_morph.quality.run import PlanChoice, QualityOptions


def quality(
    model: Annotated[Path, typer.Argument(help="Folder with config, safetensors and tokenizer.")],
    bundle: Annotated[
        Path | None, typer.Option(help="Morph bundle: its plan, and the variants it holds.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Precision plan (JSON); variants are made here.")
    ] = None,
    variants: Annotated[
        str, typer.Option(help="Of default plans, in the order in which a layer takes them.")
    ] = "int8,int4",
    order: Annotated[
        list[str],
        typer.Option(help="Of default plans: front, back or random. Repeat it for several."),
    ] = ["front"],  # noqa: B006 - typer reads it only
    quantizer: Annotated[str, typer.Option(help="Of int4 and below: rtn, awq or gptq.")] = "rtn",
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text. None: the help topics of Python.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help=DATASET_HELP)] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL with LongBench's context, input, answers. None: docstrings."),
    ] = None,
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of text to evaluate on.")] = 16,
    block_tokens: Annotated[int, typer.Option(min=2, help="Length of a block.")] = 256,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of greedy continuations, and at most of answers.")
    ] = 64,
    prompt_tokens: Annotated[
        int, typer.Option(min=2, help="Longer prompts lose their middle.")
    ] = 2048,
    seed: Annotated[int, typer.Option(help="Of the text's split, blocks, prompts, random.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for table, JSON and picture.")] = Path(
        "quality"
    ),
) -> None:
    """Measure quality at every level of a precision plan, against full precision.

    Perplexity and KL on a text, agreement of greedy tokens, F1 and ROUGE-L on prompts with
    references; throughout a response, and with a change of level in its middle.
    """
    if importlib.util.find_spec("matplotlib") is None:
        refuse("the picture needs matplotlib; install: pip install 'sglang-morph[bench]'")
    from sglang_morph.quality.report import write_report
    from sglang_morph.quality.run import PlanChoice, QualityOptions

    options = QualityOptions(
        text=text,
        dataset=dataset,
        prompts=prompts,
        quantizer=quantizer,
        blocks=blocks,
        block_tokens=block_tokens,
        continued_tokens=tokens,
        prompt_tokens=prompt_tokens,
        answer_tokens=tokens,
        seed=seed,
    )
    if bundle is not None and plan is not None:
        refuse("--bundle and --plan are two sources of one plan; give one of them")
    choice = PlanChoice(bundle, plan, variants.split(","), order)
    try:
        report = _run(model, choice, options, device)
    except (ValueError, OSError) as error:
        refuse(str(error).partition("\n")[0])
    _show(report)
    for file in write_report(report, out):
        typer.echo(f"Wrote {file}")


def _run(model: Path, choice: PlanChoice, options: QualityOptions, device: str) -> QualityReport:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from sglang_morph.quality.run import run_quality

    columns = TextColumn("{task.description}"), BarColumn()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("starting", total=None)

        def told(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        origin = provenance(shlex.join(["sglang-morph", *sys.argv[1:]]))
        return run_quality(model, choice, options, origin, told, device)


def _show(report: QualityReport) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sglang_morph.quality.tables import notes, table

    header, *rows = table(report)
    shown = Table(*header, title=escape(report.model))
    for row in rows:
        shown.add_row(*map(escape, row))
    console = Console()
    console.print(shown)
    for note in notes(report):
        console.print(escape(note))

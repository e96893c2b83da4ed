"""`sglang-morph profile`: measure which layers suffer least, and write a morph bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sglang_morph.refuse import refuse

if TYPE_CHECKING:
    import torch

    from sglang_morph.profiling.profile import Profile
    from sglang_morph.profiling.scores import LisWeights

_BATCH = {"cpu": 1, "cuda": 8}
"""Candidates computed at once: a GPU reads a layer's weights once for all of them."""
DATASET_HELP = (
    "Instead of --text: python-docs (the default), a file or folder, FORMAT:PATH (text, jsonl, "
    "parquet, sharegpt, longbench), or OWNER/NAME or OWNER/NAME:CONFIG in the hub's cache."
)


def profile(
    model: Annotated[
        str,
        typer.Argument(help="Folder of a safetensors checkpoint, or a name in the hub's cache."),
    ],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to calibrate on. None: Python's help topics.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help=DATASET_HELP)] = None,
    variants: Annotated[
        str, typer.Option(help="Variants, largest first (int8,int4). Empty: the device's default.")
    ] = "",
    order: Annotated[
        str, typer.Option(help="lis, kl, contiguous (measured), front, back or random.")
    ] = "kl",
    weights: Annotated[
        str, typer.Option(help="lis: shares of LTS, LRS and MDS.")
    ] = "0.25,0.25,0.5",
    quantizer: Annotated[
        str,
        typer.Option(help="rtn, awq or gptq, for variants of up to 4 bits; 8 bits are always rtn."),
    ] = "awq",
    lazy: Annotated[
        bool | None,
        typer.Option(
            "--lazy/--exact",
            help="Take a layer's last score as the least it can do (faster, an approximation), or "
            "measure all that could be best. None given: lazy for kl, which would take long.",
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of tokens to calibrate on.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a block.")] = 128,
    seed: Annotated[int, typer.Option(help="Of the choice of text, and of the random order.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the bundle. None: one in the user's cache.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda: computes, and is what tensors are for. Empty: cuda if any."
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Of the weights as served: float16, bfloat16. Empty: as stored.")
    ] = "",
) -> None:
    """Measure which layers suffer least from smaller weights, and write a morph bundle.

    A run that was ended goes on where it was when it is started again. Serve the bundle with
    --morph-bundle.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sglang_morph.bundle.checkpoint import checkpoint_folder
    from sglang_morph.precision.quantizers.registry import create_layer_quantizer
    from sglang_morph.precision.variants.registry import check_variant, default_variants
    from sglang_morph.profiling.datasets import choose_text
    from sglang_morph.profiling.model import LayeredModel
    from sglang_morph.profiling.profile import Calibration
    from sglang_morph.profiling.profile import profile as make
    from sglang_morph.profiling.ranking import Search, check_order

    disable_progress_bar()  # transformers' own would break up ours
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        names = tuple(n.strip() for n in variants.split(",") if n.strip())
        names = names or default_variants(device)
        for name in names:
            check_variant(name, device)
        check_order(order)
        approximate = order == "kl" if lazy is None else lazy
        search = Search(order, _shares(weights), approximate, _BATCH.get(device, 1), seed)
        chosen = create_layer_quantizer(quantizer)
        split = choose_text(text, dataset, seed)
        folder = checkpoint_folder(model)
        with _progress_bar() as bar:
            bar.phase("loading")
            layered = LayeredModel.load(folder, device, _dtype(dtype))
            done = make(
                folder,
                layered,
                split,
                names,
                chosen,
                Calibration(blocks, length, seed),
                search,
                out,
                bar.update,
            )
    except ValueError as error:
        refuse(str(error))
    _report(done)


class _ProgressBar:
    """The phases of a run, with the time left of the present one."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._phase = ""

    def phase(self, name: str) -> None:
        self._phase = name
        self._progress.reset(self._task, total=None, description=name)

    def update(self, phase: str, done: float) -> None:
        if phase != self._phase:
            self.phase(phase)
        self._progress.update(self._task, total=1.0, completed=done)


@contextmanager
def _progress_bar() -> Iterator[_ProgressBar]:
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=Console(stderr=True)) as progress:
        yield _ProgressBar(progress)


def _shares(text: str) -> LisWeights:
    from sglang_morph.profiling.scores import LisWeights

    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(0 <= share < math.inf for share in shares) or not any(shares):
        raise ValueError(f"--weights is {text!r}; give three numbers, 0 or more, such as 1,1,2")
    return LisWeights(*shares)


def _dtype(name: str) -> torch.dtype | None:
    import torch

    if not name:
        return None
    known = {str(one).removeprefix("torch."): one for one in (torch.float16, torch.bfloat16)}
    if name not in known:
        raise ValueError(f"--dtype is {name!r}; give {' or '.join(known)}, or leave it out")
    return known[name]


def _report(done: Profile) -> None:
    console = Console()
    console.print(f"Bundle {escape(str(done.bundle.folder))}", soft_wrap=True, highlight=False)
    if done.ranking is None:
        console.print("It was there already; nothing was measured.")
        return
    for stage in done.ranking.stages:
        console.print(f"{stage.variant}: layers {', '.join(map(str, stage.layers))}")
    if done.ranking.candidates:
        console.print(
            f"{done.ranking.candidates} candidates in {done.ranking.full_forwards:.1f} full "
            f"forwards, {done.ranking.forwards_saved_ratio:.1%} fewer than "
            f"{done.ranking.full_forwards_plain:.0f}; {done.ranking.seconds:.0f} s"
        )

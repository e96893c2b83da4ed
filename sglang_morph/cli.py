"""The command `sglang-morph`. Spawned server processes import it again, so it stays light."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from typing import Annotated

import typer

from sglang_morph.bench.cli import app as bench_app
from sglang_morph.cpu import cpu_environment, prepare_process, wants_cpu
from sglang_morph.demo.cli import app as demo_app
from sglang_morph.flags import ENVIRONMENT, OneLineParser, add_flags, options_of, to_argv
from sglang_morph.policy_cli.app import app as policy_app
from sglang_morph.profiling.cli import profile
from sglang_morph.quality.cli import quality
from sglang_morph.refusals import MorphRefusal
from sglang_morph.refuse import refuse

app = typer.Typer(
    name="sglang-morph",
    help="SGLang with weight precision and KV-cache capacity as one elastic memory budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(demo_app, name="demo")
app.add_typer(policy_app, name="policy")
app.add_typer(bench_app, name="bench")
app.command()(profile)
app.command("quality")(quality)

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(
    context_settings={**_PASS_THROUGH, "help_option_names": []},
    add_help_option=False,
    help="Serve a model: as `python -m sglang_morph.launch_server`. See `serve --help`.",
)
def serve(context: typer.Context) -> None:
    from sglang_morph.launch_server import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=_PASS_THROUGH)
def env(context: typer.Context) -> None:
    """Print `export` lines for SGLang's own entry points.

    Takes --memory-backend and --morph-* flags, and --device. Use it as:

    eval "$(sglang-morph env --memory-backend layer_swap)"
    """
    for name, value in _environment(context.args).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command("exec", context_settings={"allow_interspersed_args": False, **_PASS_THROUGH})
def execute(context: typer.Context) -> None:
    """Run a command in the environment that `env` prints.

    sglang-morph exec --memory-backend layer_swap -- sglang serve --model-path PATH
    """
    flags, command = _split(context.args)
    if not command:
        refuse("no command given; write `sglang-morph exec [FLAGS] -- COMMAND`")
    environ = {**os.environ, **_environment(flags)}
    try:
        os.execvpe(command[0], command, environ)
    except OSError as error:
        refuse(f"cannot run {command[0]}: {error.strerror}; give a command that is on the PATH")


@app.command()
def patches(
    check: Annotated[
        bool, typer.Option("--check", help="Print only what does not fit, one line a patch.")
    ] = False,
) -> None:
    """Show every change that is made to SGLang, and whether it fits the installed one.

    Exits with status 1 if a patch does not fit.
    """
    prepare_process()
    warnings.simplefilter("ignore")  # SGLang's modules warn of devices that are not there
    from patches.apply import PatchError
    from sglang_morph.patch_table import print_patches

    try:
        fits = print_patches(only_misfits=check)
    except PatchError as error:
        print(f"sglang_morph: {error}", file=sys.stderr)
        fits = False
    raise typer.Exit(0 if fits else 1)


@app.command()
def doctor(
    prebuild: Annotated[
        bool,
        typer.Option(
            "--prebuild",
            help="Also run every variant's kernel once. That compiles and caches those that need "
            "it (Marlin: minutes), so that no server has to. Status 1 if one is wrong or missing.",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="With --prebuild: the weights' type, bfloat16 or float16 on a GPU.")
    ] = "bfloat16",
) -> None:
    """Show versions, device and host memory, as the server would find them."""
    cpu = prepare_process()
    import torch

    from sglang_morph import doctor as machine

    if dtype not in ("bfloat16", "float16", "float32"):
        refuse(f"--dtype {dtype}: give bfloat16, float16 or float32")
    machine.print_report(cpu=cpu)
    if prebuild:
        computed = torch.float32 if cpu else getattr(torch, dtype)
        raise typer.Exit(0 if machine.prebuild("cpu" if cpu else "cuda", computed) else 1)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our flags and the command after them. Every flag has a value; click may have taken `--`."""
    position = 0
    while position < len(arguments) and arguments[position].startswith("--"):
        if arguments[position] == "--":
            return arguments[:position], arguments[position + 1 :]
        position += 1 if "=" in arguments[position] else 2
    rest = arguments[position:]
    return arguments[:position], rest[1:] if rest[:1] == ["--"] else rest


def _environment(arguments: list[str]) -> dict[str, str]:
    """The variables for morph flags and an optional `--device`."""
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--device")
    try:
        values = parser.parse_args(arguments)
    except MorphRefusal as refusal:
        refuse(str(refusal))
    device = [] if values.device is None else ["--device", values.device]
    changes = cpu_environment(os.environ) if wants_cpu(device) else {}
    return {**changes, ENVIRONMENT: shlex.join(to_argv(options_of(values)))}


if __name__ == "__main__":
    app()

"""The ``sgl-kvtier`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from sgl_kvtier import __version__
from sgl_kvtier.config import default_directory, parse_size
from sgl_kvtier.errors import KVTierError

app = typer.Typer(no_args_is_help=True, help="Compressed KV cache storage tier for SGLang.")
bench = typer.Typer(no_args_is_help=True, help="Measure the tier's parts on this machine.")
app.add_typer(bench, name="bench")

_console = Console()
_JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compressed KV cache storage tier for SGLang."""


@app.command()
def stat(
    directory: Annotated[str, typer.Argument(help="The store's folder.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a store holds: pages, raw and stored bytes, by namespace. The store may be in use."""
    from sgl_kvtier.store.inspect import store_usage  # noqa: PLC0415 - compiles nothing before it is needed

    try:
        usage = store_usage(directory or default_directory())
    except KVTierError as error:
        typer.echo(f"sgl-kvtier stat: {error}", err=True)
        raise typer.Exit(2) from error
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(usage)).decode())
        return
    table = Table("namespace", "model", "pool", "pages", "raw MB", "stored MB", "saved", title=usage.directory)
    for row in usage.namespaces:
        saved = 1 - row.slot_bytes / row.raw_bytes if row.raw_bytes else 0.0
        table.add_row(
            row.digest,
            row.model,
            row.pool,
            f"{row.pages}",
            f"{row.raw_bytes / 1e6:.1f}",
            f"{row.slot_bytes / 1e6:.1f}",
            f"{saved:.1%}",
        )
    _console.print(table)
    _console.print(
        f"{usage.pages} pages, {usage.raw_bytes / 1e6:.1f} MB raw in {usage.stored_bytes / 1e6:.1f} MB of slots "
        f"({usage.saved_fraction:.1%} saved); {usage.segments} segments of {usage.segment_bytes / 1e6:.1f} MB in all"
    )


@bench.command()
def kernels(
    page_sizes: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "256KiB,1MiB,4MiB",
    layouts: Annotated[
        str, typer.Option(help="Host layouts, separated by commas.")
    ] = "page_first,layer_first,page_first_direct,page_head",
    dtypes: Annotated[str, typer.Option(help="Element types, separated by commas.")] = "bf16,fp16,fp32,fp8",
    seconds: Annotated[float, typer.Option(help="Time to spend on each case.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the pages' content.")] = 0,
    json: _JsonOption = None,
) -> None:
    """Speed of the fused reorder+split and merge+reorder kernels over memcpy of the same bytes, on one core."""
    from sgl_kvtier.bench import page_kernels  # noqa: PLC0415 - compiles nothing before it is needed

    try:
        sizes = [parse_size("page-sizes", text) for text in page_sizes.split(",")]
        rows = page_kernels.run(sizes, layouts.split(","), dtypes.split(","), seconds, seed)
    except (KVTierError, ValueError) as error:
        typer.echo(f"sgl-kvtier bench kernels: {error}", err=True)
        raise typer.Exit(2) from error
    page_kernels.print_table(rows, _console)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode({"rows": rows})))


if __name__ == "__main__":
    app()

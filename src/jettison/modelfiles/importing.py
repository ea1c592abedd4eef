"""``jettison model import``: a GGUF file becomes a model folder, whole or not at all.

The folder is written beside its place under another name, and renamed when it is complete. Weights pass through memory
a few MiB at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jettison.device.model.generation_file import MODEL_CONFIG, NAME
from jettison.device.model.quantized.config import KEY
from jettison.device.model.tokenizer_files import CONFIG, TOKENIZER
from jettison.errors import ConfigError, ModelError
from jettison.modelfiles.gguf_config import architecture_of, config_values, sampling_values
from jettison.modelfiles.gguf_file import GgufFile
from jettison.modelfiles.gguf_tensors import (
    AUTO,
    DTYPES,
    ImportedTensor,
    dtype_of_matrices,
    has_blocks,
    imported_tensors,
)
from jettison.modelfiles.gguf_tokenizer import import_tokenizer
from jettison.modelfiles.safetensors_file import WEIGHTS, write_safetensors


def import_gguf(path: Path, model_dir: Path, dtype: str = AUTO) -> None:
    """Write the model folder of a GGUF file. ``dtype``: a key of ``DTYPES``, or ``auto``: as stored, and float32 for
    quantized tensors that cannot be served so.

    Raises ConfigError for a wrong ``dtype`` or a folder that is there and not empty; ModelError, one line that names
    the field or the tensor, for a file that cannot be imported; OSError where the disk fails. Nothing is left behind.
    """
    if dtype not in (AUTO, *DTYPES):
        raise ConfigError(f"--dtype must be one of {', '.join([AUTO, *DTYPES])}, not {dtype!r}")
    check_free(model_dir)
    file = GgufFile(path)
    row, config = architecture_of(file), config_values(file, dtype_of_matrices(file, dtype))
    if has_blocks(file, dtype):
        config[KEY] = {"quant_method": "gguf"}
    tensors = imported_tensors(file, row, config, dtype)
    tokenizer = import_tokenizer(file, config["vocab_size"], config["max_position_embeddings"])
    sampling = sampling_values(file)
    with new_folder(model_dir) as folder:
        _write_json(folder / MODEL_CONFIG, config | tokenizer.ids)
        _write_json(folder / NAME, tokenizer.ids | sampling)
        _write_json(folder / CONFIG, tokenizer.config)
        tokenizer.backend.save(str(folder / TOKENIZER))
        contents = (_pieces(file, tensor) for tensor in tensors)
        write_safetensors(folder / WEIGHTS, [tensor.header for tensor in tensors], contents)


def check_free(model_dir: Path) -> None:
    """Raise ConfigError where something is in a new folder's place."""
    if model_dir.exists() and (not model_dir.is_dir() or any(model_dir.iterdir())):
        raise ConfigError(f"{model_dir} exists and is not an empty folder")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled; it gets its name when the block ends well, and is removed otherwise. An OSError of the
    block names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as holder:
        folder = Path(holder) / path.name
        folder.mkdir()
        try:
            yield folder
        except OSError as error:  # a write names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
        folder.rename(path)


def _pieces(file: GgufFile, tensor: ImportedTensor) -> Iterator[Any]:
    try:
        yield from tensor.pieces()
    except OverflowError:
        raise ModelError(
            f"{file.path}: tensor {tensor.source.name} has numbers beyond {tensor.header.dtype}; choose another --dtype"
        ) from None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

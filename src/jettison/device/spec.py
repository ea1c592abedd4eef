"""What a device is told when it is made. Plain values: no torch, nothing that is open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jettison.device.model.hf_config import DecoderConfig
    from jettison.types import LayerRange

HOST = "host"
"""The back end of devices whose memory is the host's."""
CUDA = "cuda"
"""The back end of NVIDIA cards."""
FILES, RANDOM = "auto", "random"
"""Where weights come from: the model folder's files, or a seed (``device.model.seeded``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device with a model on it."""

    model_dir: Path
    dtype: str
    budget_bytes: int
    """Of parameters, KV and workspace together."""
    block_size: int
    """Tokens of a KV block."""
    max_num_tokens: int
    """Of a step."""
    max_num_seqs: int
    """Rows of a step that are sampled."""
    back_end: str = HOST
    """What the device is: a name that ``choose_back_end`` knows."""
    kernels: str = "auto"
    load_format: str = FILES
    tokenizer_dir: Path | None = None
    """Folder of the tokenizer, by which grammars know tokens; None = the model's."""
    page_bytes: int = 65536
    num_threads: int | None = None
    """Compute threads of this *process*; None = leave as they are."""
    layers: LayerRange | None = None
    """What is resident after ``start``; None = the whole model."""
    drop_layers: tuple[LayerRange, ...] = ()
    """What drops of the first layout are likely to leave; see ``PagePool.prepares``."""
    max_model_len: int | None = None
    """See ``read_config``; for a configuration that is not given."""
    config: DecoderConfig | None = None
    """The model's configuration, where it has been read already; None = read it from the folder."""
    starts_empty: bool = False
    """Map the layers and leave them unfilled, for peers or ``load_shard_from_disk`` to fill once ``adopt_weights`` has
    said which weights they are."""
    host_bytes: int = 0
    """Host memory beside the budget, for copies of KV blocks."""
    shared_copy_fd: int | None = None
    """The machine's copy of the parameters for workers that sleep, if there may be one; the caller's."""

"""Whether a model whose configuration ties its head to its embedding has a head of its own: decided once, where a model
is assembled, for all workers.

As in transformers a folder that holds both tensors is tied only where they are equal. All that follows from a head
(shards, memory, the identity of weights) follows from the configuration. Not here: reading (``weights``).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from jettison.device.dtypes import StoredDtype
from jettison.device.model.folder import ModelFolder
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.spec import FILES
from jettison.errors import ModelError
from jettison.types import EMBED_SHARD, HEAD_SHARD

log = logging.getLogger(__name__)


def with_its_own_head(
    config: DecoderConfig, model_dir: Path, dtype: StoredDtype, load_format: str = FILES
) -> DecoderConfig:
    """The configuration, untied where the folder holds a head that differs from the embedding in the serving dtype.

    A folder without both is opened in vain, and one with both is read up to the first difference. Raises ModelError
    where a tensor cannot be read; a folder that is wrong otherwise is refused where it is checked.
    """
    if not config.tied_embeddings or load_format != FILES:
        return config
    untied = replace(config, tied_embeddings=False)
    try:
        ModelFolder(model_dir, untied, dtype).open()
    except ModelError:
        return config
    from jettison.device.model.weights import WeightFolder  # few tied folders hold both tensors, and need torch here

    weights = WeightFolder(model_dir, untied, dtype)
    embedding, head = (weights.layouts[shard].slots[0].sources[0] for shard in (EMBED_SHARD, HEAD_SHARD))
    if weights.holds_equal(embedding, head):
        return config
    log.warning(
        "%s: tie_word_embeddings is true, but %s differs from the embedding, so it is served as it is stored; set "
        "tie_word_embeddings to false", model_dir / "config.json", head.name,
    )  # fmt: skip
    return untied

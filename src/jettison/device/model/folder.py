"""A model folder as it is listed: which files hold which tensors of the decoder, in which form. No torch.

The whole folder is checked against what the decoder needs before a byte of weights is read. Not here: that reading
(``weights``), and where tensors are looked for (``checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from jettison.device.dtypes import StoredDtype
from jettison.device.model.checkpoint import HEAD, INDEX_FILE, FoundWeights, find_weights
from jettison.device.model.hf_config import DecoderConfig
from jettison.device.model.identity import FileMark
from jettison.device.model.integers import IntegerForm
from jettison.device.model.quantized.config import CONFIG_FILE, scheme_of_folder
from jettison.device.model.quantized.recipes import form_without_files
from jettison.device.model.shards import ShardLayout, TensorSlot, TensorSource, final_norm_sources, shard_layouts
from jettison.device.model.tensorfile import errors_of
from jettison.device.spec import FILES, RANDOM
from jettison.errors import ModelError
from jettison.types import ShardId


def folder_by(load_format: str) -> type[ModelFolder]:
    """What lists weights, by ``DeviceSpec.load_format``."""
    return {FILES: ModelFolder, RANDOM: SeededFolder}[load_format]


class ModelFolder:
    """The weights of one model folder, checked once.

    ``open`` reads headers only and is idempotent; no file stays open between calls. All methods raise ModelError, one
    line that names the file, for errors in the folder.
    """

    def __init__(self, model_dir: Path, config: DecoderConfig, dtype: StoredDtype) -> None:
        self.model_dir = Path(model_dir)
        self.layouts: Mapping[ShardId, ShardLayout] = shard_layouts(config, dtype)
        self._config = config
        self._dtype = dtype
        self._final_norm = final_norm_sources(config)
        self._found: FoundWeights | None = None
        self.marks: dict[str, FileMark] = {}
        """Marks of the weight files, by name, at the time the folder was opened."""
        self.doubt: str | None = None
        """For an opened folder with two copies of the weights, a line on the one that is read, and why; else None."""

    def open(self) -> None:
        """Find every tensor, and check that the folder holds exactly the model's tensors, in their shapes."""
        if self._found is None:
            self._found = self._find()
            self._check_kept()
            self.doubt, self.marks = self._found.doubt, {path.name: _mark(path) for path in self._found.files}

    def integer_forms(self) -> dict[tuple[ShardId, str], IntegerForm]:
        """Forms in which matrices are stored, by shard and slot: of those whose parts all have the same one. Opens the
        folder if need be."""
        return {
            (layout.shard, slot.name): form
            for layout in self.layouts.values() for slot in layout.slots
            if len(slot.shape) > 1 and (form := self._stored_form(slot)) is not None
        }  # fmt: skip

    def _stored_form(self, slot: TensorSlot) -> IntegerForm | None:
        recipes = (self._opened().recipes[source.key].integers for source in slot.sources)
        forms = {None if integers is None else integers.form for integers in recipes}
        return forms.pop() if len(forms) == 1 else None

    def _check_kept(self) -> None:
        """Raise ModelError where the folder is not what the controller has read: it has been changed since."""
        for layout in self.layouts.values():
            for slot in layout.slots:
                if slot.form is not None and self._stored_form(slot) != slot.form:
                    path, self._found = self._opened().files_of(slot.sources[0])[0], None
                    what = f"tensor {slot.sources[0].name} was quantized in another way at the start"
                    raise ModelError(f"{path}: {what}; put the old file back, or restart the server")

    def _find(self) -> FoundWeights:
        """With experts one by one, or all of a layer in one tensor: a folder has one of the two."""
        scheme = scheme_of_folder(self.model_dir)
        try:
            return find_weights(self.model_dir, list(self._sources()), self._is_spare, scheme)
        except ModelError:
            if self._config.arithmetic.experts is None:
                raise
            before, self.layouts = self.layouts, shard_layouts(self._config, self._dtype, is_stacked=True)
            try:
                return find_weights(self.model_dir, list(self._sources()), self._is_spare, scheme)
            except ModelError:
                self.layouts = before
            raise

    def forget(self) -> None:
        """Open the folder anew before the next reading, as it may hold other files by now."""
        self._found = None

    def listing(self) -> dict[str, FileMark]:
        """Marks of the weight files in the folder now, and of the file that says how to read them, by name; equal marks
        mean that another reading would give the same."""
        marks = {}
        others = (self.model_dir / name for name in (INDEX_FILE, CONFIG_FILE))
        for path in (*self.model_dir.glob("*.safetensors"), *others):
            with suppress(OSError):
                marks[path.name] = FileMark.of(path)
        return marks

    def files_of(self, shard: ShardId) -> list[Path]:
        """The files of a shard's tensors. Opens the folder if need be."""
        found = self._opened()
        sources = (source for slot in self.layouts[shard].slots for source in slot.sources)
        return list(dict.fromkeys(path for source in sources for path in found.files_of(source)))

    def _opened(self) -> FoundWeights:
        """Opens the folder if need be."""
        self.open()
        assert self._found is not None
        return self._found

    def _sources(self) -> Iterator[TensorSource]:
        for layout in self.layouts.values():
            for slot in layout.slots:
                yield from slot.sources
        yield from self._final_norm

    def _is_spare(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is one that old exporters wrote although it follows from others, or of a layer that guesses
        tokens ahead. (A tied head that differs from the embedding is none: see ``tying``.)"""
        is_head = name == HEAD and shape == (self._config.vocab_size, self._config.hidden_size)
        if name.endswith("rotary_emb.inv_freq") or (self._config.tied_embeddings and is_head):
            return True
        layer = name.removeprefix("model.layers.").partition(".")[0]
        return self._config.has_spare_layers and layer.isdecimal() and int(layer) >= self._config.num_layers


class SeededFolder(ModelFolder):
    """Weights that follow from a seed (``seeded``): the folder has a configuration, and need not have more."""

    def open(self) -> None:
        """Mark the configuration, if it is still there: nothing else is needed of the folder."""
        with suppress(OSError):
            self.marks = self.marks or {CONFIG_FILE: FileMark.of(self.model_dir / CONFIG_FILE)}

    def integer_forms(self) -> dict[tuple[ShardId, str], IntegerForm]:
        """What ``config.json`` implies, for projections: quantizers leave all else as it is."""
        scheme, forms = scheme_of_folder(self.model_dir), {}
        for layout in self.layouts.values():
            for slot in layout.slots:
                if not slot.name.endswith("_weight") or slot.name == "router_weight":
                    continue
                if (form := form_without_files(scheme, slot.sources[0])) is not None:
                    forms[layout.shard, slot.name] = form
        return forms

    def forget(self) -> None:
        """Nothing is kept that could change."""

    def listing(self) -> dict[str, FileMark]:
        """No weight files."""
        return {}

    def files_of(self, shard: ShardId) -> list[Path]:
        """What decides the shape."""
        return [self.model_dir / CONFIG_FILE]


def _mark(path: Path) -> FileMark:
    with errors_of(path):
        return FileMark.of(path)

"""What is read of a safetensors file is what the library finds there, however it is cut out."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from jettison.device.model import stored
from jettison.device.model.stored import StoredFile
from jettison.errors import ModelError

TENSORS = {
    "matrix": torch.arange(7 * 30, dtype=torch.int32).view(7, 30),
    "stack": torch.arange(3 * 5 * 8, dtype=torch.float32).view(3, 5, 8).bfloat16(),
    "one": torch.tensor(2.5, dtype=torch.float16),
    "bytes": torch.arange(9, dtype=torch.uint8),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt", "shape": "not a tensor's"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("window_bytes", [1 << 20, 7 * 4 * 4, 1])
def test_rows_columns_and_wholes(path, window_bytes, monkeypatch):
    monkeypatch.setattr(stored, "WINDOW_BYTES", window_bytes)
    cuts = [lambda t: t[...], lambda t: t[1:3], lambda t: t[0:0], lambda t: t[:, 0:30], lambda t: t[:, 4:9],
            lambda t: t[:, 6:7], lambda t: t[:, 20:30], lambda t: t[:, 3:3], lambda t: t[1:4, 2:5]]  # fmt: skip
    expected = load_file(path)
    with StoredFile(path) as file:
        for name, tensor in expected.items():
            dtype, found = file.tensor(name)
            assert tuple(found.shape) == tuple(tensor.shape) and dtype == {
                "matrix": "I32", "stack": "BF16", "one": "F16", "bytes": "U8"}[name]
            assert torch.equal(found[...], tensor)
        for cut in cuts:
            assert torch.equal(cut(file.tensor("matrix")[1]), cut(expected["matrix"]))
        for at, cut in [(at, cut) for at in (2, 0, 1) for cut in (lambda t: t[...], lambda t: t[:, 2:7])]:
            assert torch.equal(cut(file.tensor("stack")[1][at]), cut(expected["stack"][at]))
        assert torch.equal(file.tensor("stack")[1][1:], expected["stack"][1:])


@pytest.mark.parametrize("keep", [0, 7, 20])
def test_a_file_without_its_header(path, keep):
    os.truncate(path, keep)
    with pytest.raises(ModelError, match=f"^{path}: truncated or not safetensors"), StoredFile(path):
        pass


@pytest.mark.parametrize(("old", "new"), [
    (b'"dtype":"U8"', b'"dtype":"U9"'), (b'"shape":[9]', b'"shape":[8]'), (b'"shape":[9]', b'"shape":"9'),
    (b'"bytes"', b'"bytez"'),
])  # fmt: skip
def test_an_entry_that_cannot_be(path, old, new):
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=f"^{path}: truncated or not safetensors"), StoredFile(path) as file:
        file.tensor("bytes")

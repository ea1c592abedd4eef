"""What is read of a safetensors file is what the library finds there, however it is cut out."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors import safe_open
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


def test_the_headers_of_all_tensors_of_any_type(path):
    save_file(TENSORS | {"mask": torch.ones(2, 0, 3, dtype=torch.bool)}, path)
    with safe_open(path, framework="pt") as library, StoredFile(path) as file:
        slices = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118  (not a dict)
        assert {name: (entry.dtype, list(entry.shape)) for name, entry in file.entries().items()} == {
            name: (found.get_dtype(), found.get_shape()) for name, found in slices.items()}


def written_with(path, change):
    """The file with this change made to its header's entries."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


@pytest.mark.parametrize("change", [
    lambda header: header.pop("one"), lambda header: header["one"].update(data_offsets=[0, 2]),
    lambda header: header["one"].update(data_offsets=[2, 0]), lambda header: header["one"].pop("dtype"),
    lambda header: header["one"].update(data_offsets=[-2, 0]),
])  # fmt: skip
def test_a_header_that_does_not_tell_where_all_bytes_belong(path, change):
    written_with(path, change)
    with pytest.raises(ModelError, match=f"^{path}: truncated or not safetensors"), StoredFile(path) as file:
        file.entries()


@pytest.mark.parametrize("num_bytes", [-1, 1])
def test_a_file_of_another_size_than_its_header_names(path, num_bytes):
    os.truncate(path, path.stat().st_size + num_bytes)
    with pytest.raises(ModelError, match=r"it has \d+ bytes where its header names \d+"), StoredFile(path) as file:
        file.entries()


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

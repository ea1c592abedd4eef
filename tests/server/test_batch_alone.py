"""``jettison batch run``: no output takes the place of the requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from batches_util import jsonl, line

from jettison.errors import UserError
from jettison.server.batches.alone import run_alone

CONFIG = SimpleNamespace(offline=SimpleNamespace(mode="harvest"))
"""As much of a configuration as is asked before the paths are."""


@pytest.mark.parametrize(
    ("name", "out"),
    [("r.jsonl", "r.jsonl"), ("r.jsonl", "./sub/../r.jsonl"), ("a.errors.jsonl", "a.jsonl"), ("a.errors.jsonl", "a"),
     ("a.jsonl.part", "a.jsonl"), ("a.errors.jsonl.part", "a.jsonl")],
)
def test_an_output_that_is_the_input_is_refused(tmp_path, name, out):
    path = tmp_path / name
    (tmp_path / "sub").mkdir()
    path.write_bytes(jsonl(line("a")))
    with pytest.raises(UserError, match=f"{name} has the requests.*name another output"):
        run_alone(CONFIG, path, tmp_path / out, lambda *_: None)
    assert path.read_bytes() == jsonl(line("a"))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, "sub"])


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_so_is_another_name_of_it(tmp_path, link):
    path, out = tmp_path / "r.jsonl", tmp_path / "a.jsonl"
    path.write_bytes(jsonl(line("a")))
    getattr(out, link)(path)
    with pytest.raises(UserError, match="name another output"):
        run_alone(CONFIG, path, out, lambda *_: None)


def test_requests_among_the_work_in_progress_are_refused(tmp_path):
    out = tmp_path / "a.jsonl"
    path = tmp_path / "a.jsonl.batch" / "files" / "r.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(jsonl(line("a")))
    with pytest.raises(UserError, match="name another output"):
        run_alone(CONFIG, path, out, lambda *_: None)

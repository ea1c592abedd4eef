"""Compute kernels of a device behind one protocol, and the choice between the back ends.

``load_kernels`` is the only way in. The native back end (a C library beside this file, called through ctypes)
is built with the package or by ``python -m jettison.device.kernels.build``; torch is the fallback.
"""

from __future__ import annotations

import logging

from jettison.device.kernels.base import Kernels
from jettison.device.kernels.torch_kernels import TorchKernels
from jettison.errors import ConfigError

__all__ = ["Kernels", "load_kernels"]

logger = logging.getLogger(__name__)


def load_kernels(name: str = "auto") -> Kernels:
    """The kernels called ``name``: ``"auto"``, ``"native"``, ``"native-<variant>"`` or ``"torch"``.

    ``auto`` is native where the library was built and works on this CPU, else torch with one note in the log.
    Raises ConfigError for an unknown name, or when native kernels were asked for and cannot be had.
    """
    if name == "torch":
        return TorchKernels()
    if name != "auto" and name != "native" and not name.startswith("native-"):
        raise ConfigError(f"kernels must be auto, native or torch, not {name!r}")
    from jettison.device.kernels.native import NativeUnavailableError, load_native

    try:
        return load_native(None if name in ("auto", "native") else name.removeprefix("native-"))
    except NativeUnavailableError as error:
        if name != "auto":
            raise ConfigError(str(error)) from error
        logger.warning("using the slower torch kernels: %s", error)
        return TorchKernels()

"""Compute kernels of a device behind one protocol (``base``), and the choice among those for tensors in host memory.

``loading.load_kernels`` is the only way in. The native kernels (a C library beside this file, called through ctypes)
are built with the package or by ``python -m jettison.device.kernels.build``; torch is the fallback. The controller
resolves the configured name once (``choosing.resolve_kernels``, without torch), and all workers of a cluster load what
it names. Sets of kernels are known by name (``registry``); one that is not asked for is not imported.
"""

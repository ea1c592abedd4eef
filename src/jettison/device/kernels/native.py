from __future__ import annotations


class NativeUnavailableError(Exception):
    pass


def load_native(variant):
    raise NativeUnavailableError("not built")

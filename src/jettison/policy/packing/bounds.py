"""How few devices could hold given requests: lower bounds for any number of requests, the exact optimum for a few.
Pure.

Sizes and capacity are blocks; sizes are between 1 and the capacity (ValueError otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def _checked(sizes: Sequence[int], capacity: int) -> NDArray[np.int64]:
    array = np.sort(np.asarray(sizes, dtype=np.int64))
    if array.size and not (array[0] >= 1 and array[-1] <= capacity):
        raise ValueError(f"sizes between {array[0]} and {array[-1]} blocks on devices of {capacity}")
    return array


def volume_bound(sizes: Sequence[int], capacity: int) -> int:
    """Devices that the blocks alone would fill."""
    return -(-int(_checked(sizes, capacity).sum()) // capacity)


def l2_bound(sizes: Sequence[int], capacity: int) -> int:
    """Martello and Toth's L2 (Knapsack Problems, 1990, section 8.3.2). O(n log n); never below the volume bound.

    For a threshold k: a request above C - k shares its device with none of k or more; each request above C/2 takes a
    device; requests from k to C/2 fill what those leave free, then devices of their own.
    """
    array = _checked(sizes, capacity)
    if not array.size:
        return 0
    sums = np.concatenate([[0], np.cumsum(array)])
    half = int(np.searchsorted(array, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], np.unique(array[:half])])
    above = np.searchsorted(array, capacity - thresholds, side="right")
    above = np.maximum(above, half)
    from_k = np.searchsorted(array, thresholds, side="left")
    left = (above - half) * capacity - (sums[above] - sums[half])
    more = -(-(sums[half] - sums[from_k] - left) // capacity)
    return int(np.max(len(array) - half + np.maximum(0, more)))


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> int:
    """Devices of a full repack by first-fit decreasing: at most 11/9 of the optimum and 2/3. O(n times devices)."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= size), None)
        if at is None:
            rooms.append(capacity - size)
        else:
            rooms[at] -= size
    return len(rooms)


def optimum(sizes: Sequence[int], capacity: int, time_limit_s: float = 10.0) -> int | None:
    """The fewest devices, by integer programming (HiGHS); None where it is not found within the limit.

    For about thirty requests. One variable for each request and device (a request uses no device beyond its own number:
    devices are alike), tried between the lower bound and first-fit decreasing.
    """
    _checked(sizes, capacity)
    low, high = l2_bound(sizes, capacity), first_fit_decreasing(sizes, capacity)
    ordered = sorted(sizes, reverse=True)
    for num_devices in range(low, high):
        fits = _fits_on(ordered, capacity, num_devices, time_limit_s)
        if fits is None or fits:
            return num_devices if fits else None
    return high


def _fits_on(sizes: Sequence[int], capacity: int, num_devices: int, time_limit_s: float) -> bool | None:
    # Loaded where it is needed: the command line starts without it.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    count = len(sizes)
    matrix = lil_matrix((count + num_devices, count * num_devices))
    upper = np.ones(count * num_devices)
    for i, size in enumerate(sizes):
        for j in range(num_devices):
            matrix[i, i * num_devices + j] = 1
            matrix[count + j, i * num_devices + j] = size
            if j > i:
                upper[i * num_devices + j] = 0
    least = np.concatenate([np.ones(count), np.zeros(num_devices)])
    most = np.concatenate([np.ones(count), np.full(num_devices, capacity)])
    found = milp(
        np.zeros(count * num_devices), integrality=np.ones(count * num_devices), bounds=Bounds(0, upper),
        constraints=LinearConstraint(matrix.tocsr(), least, most), options={"time_limit": time_limit_s},
    )  # fmt: skip
    return {0: True, 2: False}.get(found.status)

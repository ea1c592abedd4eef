"""Leases between the controller and a keeper on another host: a cut cable gives no end of file.

    keeper                                       controller
    Beat(n), every beat_s            ->          Grantor.hear: lost_s of silence from now on
    Tenant.granted(n)                <-          Granted(n)

The keeper ends its workers ``fence_s`` after it has *sent* the last beat that was granted; the controller declares them
lost ``lost_s`` after it has *received* the last beat. No clock is compared with another's: only their rates count.

Why the fence comes first. Let n be the last beat that the controller has received, and g the last one that the keeper
knows to be granted: g <= n, as none is granted before it is received. So g was sent no later than n, and n was sent
before it was received. From that moment on (real time) the keeper's fence is at most fence_s * (1 + DRIFT) away, and
the declaration at least (lost_s - 2 * beat_s) * (1 - DRIFT): it may come two beats early with another keeper of the
same host. The difference (``spare_s``) is what the fence itself may take. A host that is stopped altogether cannot
fence itself; what wakes up on it finds that it is over: links are fenced by lives, whatever clocks say.

Times are seconds of a clock that goes on while a host sleeps (``boot_clock_s``).
"""

from __future__ import annotations

import time
from typing import NamedTuple

DRIFT = 1e-3
"""By which the rate of a clock may be wrong: twice what NTP corrects at most (500 ppm)."""
_BEATS_A_LEASE = 20
"""A tenth or so of all beats may be late without one lease's end, and the traffic is nothing."""


def boot_clock_s() -> float:
    """The clock of leases: it counts the time in which the host was suspended, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseTimes(NamedTuple):
    """Of one cluster, seconds."""

    beat_s: float
    fence_s: float
    lost_s: float

    @classmethod
    def of(cls, lease_s: float) -> LeaseTimes:
        """A host that is cut off is declared lost after ``lease_s`` at the latest: one beat is left for the
        controller's own look at the clock."""
        beat_s = lease_s / _BEATS_A_LEASE
        return cls(beat_s, 0.7 * lease_s, lease_s - beat_s)

    @property
    def together_s(self) -> float:
        """Silence from which a keeper is lost together with another one of its host."""
        return self.lost_s - 2 * self.beat_s

    @property
    def spare_s(self) -> float:
        """What the end of the workers may take once the fence has fallen: 0.15 of the lease."""
        return self.together_s * (1 - DRIFT) - self.fence_s * (1 + DRIFT)


class Grantor:
    """The controller's side of one keeper's lease."""

    def __init__(self, times: LeaseTimes, now_s: float) -> None:
        self._times = times
        self._heard_s = now_s

    def hear(self, now_s: float) -> None:
        """A beat has come: it is granted."""
        self._heard_s = max(self._heard_s, now_s)

    def excuse(self, away_s: float, now_s: float) -> None:
        """The controller was away for so long: that is no keeper's fault. It counts as heard now at the latest,
        whatever has come meanwhile."""
        self._heard_s = min(now_s, self._heard_s + away_s)

    def silence_s(self, now_s: float) -> float:
        """How long the keeper has been silent."""
        return now_s - self._heard_s

    def is_lost(self, now_s: float) -> bool:
        """Whether it has been silent for too long."""
        return self.silence_s(now_s) >= self._times.lost_s

    def is_lost_with_another(self, now_s: float) -> bool:
        """Whether it is lost, too, where another keeper of its host is: they went silent together."""
        return self.silence_s(now_s) >= self._times.together_s


class Tenant:
    """The keeper's side."""

    def __init__(self, times: LeaseTimes, now_s: float) -> None:
        """``now_s``: before the first word was sent, from whose coming on the controller counts."""
        self._times = times
        self._sent_s: dict[int, float] = {}
        """Beats that are not granted yet."""
        self._num_beats = 0
        self.ends_s = now_s + times.fence_s
        """When the workers are ended, unless another beat is granted before."""

    def beat(self, now_s: float) -> int:
        """The number of the beat that is sent now, and not before."""
        self._num_beats += 1
        self._sent_s[self._num_beats] = now_s
        return self._num_beats

    def granted(self, number: int) -> None:
        """The controller has received this beat, and with it all before it. One that was never sent grants nothing."""
        sent_s = self._sent_s.get(number)
        if sent_s is None:
            return
        self._sent_s = {later: at for later, at in self._sent_s.items() if later > number}
        self.ends_s = max(self.ends_s, sent_s + self._times.fence_s)

    def is_over(self, now_s: float) -> bool:
        """Whether the workers must end now."""
        return now_s >= self.ends_s

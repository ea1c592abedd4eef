"""How long tests wait for what must come.

A bound on a wait asserts no time: it only ends a test that would hang. So it is longer than a start of a process takes
on a machine that does five other things.
"""

from __future__ import annotations

PATIENCE_S = 120.0

"""The word by which a step is given up: one memory, two mappings."""

from __future__ import annotations

import os

from jettison.live.wire.stepflag import StepFlag


def test_both_ends_map_one_word():
    ours, fd = StepFlag.open()
    theirs = StepFlag.attach(os.dup(fd))
    os.close(fd)
    assert not theirs.names(1)
    ours.name(2**40)
    assert theirs.names(2**40) and not theirs.names(1)
    for end in (ours, theirs):
        end.close()
        end.close()


def test_a_word_in_one_process():
    flag = StepFlag()
    flag.name(7)
    assert flag.names(7) and not flag.names(8)

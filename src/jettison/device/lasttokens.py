"""The tokens that a device has sampled last, which a step that was planned ahead begins with.

Not here: how a runner samples, or when it may start the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jettison.device.step import Int32s, StepInput, StepOutput
from jettison.errors import TokensLostError
from jettison.types import SampledToken


class LastTokens:
    """Of one device."""

    def __init__(self) -> None:
        self._step_id: int | None = None
        self._tokens: Sequence[SampledToken] = ()

    def note(self, output: StepOutput) -> None:
        """A last stage has ended with this."""
        self._step_id, self._tokens = output.step_id, output.tokens

    def check_followed(self, step: StepInput) -> None:
        """Raise TokensLostError where a step follows one that was not the last to end here with tokens: for a step that
        was started before that one ended."""
        if step.follows_step not in (None, self._step_id):
            raise TokensLostError(f"step {step.step_id} follows step {step.follows_step}, which has sampled nothing")

    def token_ids(self, step: StepInput) -> Int32s:
        """The step's token ids [T], with the tokens of the step that it follows in their places. Raises TokensLostError
        where that is not the last one that ended here."""
        if step.follows_step is None:
            return step.token_ids
        self.check_followed(step)
        # Any token in place of one that could not be sampled: nothing counts that follows on it.
        sampled = np.array([max(0, token.token_id) for token in self._tokens], dtype=np.int32)
        token_ids = step.token_ids.copy()
        unknown = token_ids < 0
        token_ids[unknown] = sampled[-1 - token_ids[unknown]]
        return token_ids

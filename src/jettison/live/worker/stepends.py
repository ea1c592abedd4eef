"""What a worker tells of a step that was not computed to its end, and why (rule 6 of ``core.controlstream``)."""

from __future__ import annotations

import logging

from jettison.core import ports
from jettison.core.controlstream import Failure
from jettison.device.step import StepInput
from jettison.errors import GrammarLostError, RemoteAttentionError, RowsLostError, TokensLostError
from jettison.live.wire import messages as m

log = logging.getLogger(__name__)


def why_failed(step: StepInput, error: Exception) -> Failure:
    """The failure that later stages and the controller are told of, for what computing a stage has raised; logged."""
    if isinstance(error, RemoteAttentionError):
        log.warning("step %d: %s", step.step_id, error)
        return Failure(str(error), error.lost_worker, True)
    if isinstance(error, TokensLostError):
        log.warning("%s", error)
        return Failure.of_lost_tokens(step.follows_step)
    if isinstance(error, GrammarLostError | RowsLostError):
        log.warning("%s", error)
        return Failure(str(error), recompute=True)
    log.error("step %d failed", step.step_id, exc_info=error)
    return Failure(f"{type(error).__name__}: {error}")


def ended_early(
    step_id: int, failure: Failure, kept: m.StepDone | None = None
) -> ports.StepFailed | ports.StepAbandoned | m.StepDone:
    """The event for the controller. ``kept``: what is told where the first stage keeps all rows of the step."""
    if failure.kept_layers is not None and kept is not None:
        return kept
    if failure.abandoned:
        return ports.StepAbandoned(step_id)
    return ports.StepFailed(step_id, failure.message, failure.lost_worker, failure.recompute)

"""What a finished step means for its requests, as a group reports it to ``core.driving.stepping``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jettison.core.requests import RequestState
from jettison.types import FinishReason, SampledToken


class RowEnd(NamedTuple):
    """A request that ends with this step."""

    state: RequestState
    token: SampledToken | None
    """Its last token; None where it asked for none."""
    finish_reason: FinishReason
    stop_token_id: int | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the request got a token in this step: it asked for one, and sampling did not fail."""
        return self.token is not None and self.finish_reason is not FinishReason.ERROR


@dataclass(slots=True)
class StepOutcome:
    """What a commit yields. Entry i of ``tokens`` belongs to entry i of ``going_on``."""

    going_on: list[RequestState]
    """Requests that got a token and go on."""
    tokens: list[SampledToken]
    ended: list[RowEnd]
    """Requests to be ended by the caller."""
    with_first: list[RequestState]
    """Of all of these, requests whose first token this is."""
    is_plain: bool
    """No request of the step ends, starts again, attends to KV elsewhere or is another group's."""

    def with_token(self) -> list[RequestState]:
        """Requests that got a token in this step, those that end with it included."""
        return [*self.going_on, *[end.state for end in self.ended if end.is_fresh]]

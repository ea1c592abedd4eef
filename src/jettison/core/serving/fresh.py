"""Fresh tokens: those that a group has computed for the first time, by class. Throughput counts these alone."""

from __future__ import annotations

from dataclasses import dataclass

from jettison.core.requests import RequestState


@dataclass(slots=True)
class FreshTokens:
    """Tokens computed for the first time, by class: none of the prefix cache, none computed again."""

    online_prompt: int = 0
    online_output: int = 0
    offline_prompt: int = 0
    offline_output: int = 0
    offline_ns: int = 0
    """When a step last computed fresh offline tokens."""
    num_abandoned_steps: int = 0
    """Steps of offline requests that were given up since."""

    @property
    def num_offline(self) -> int:
        """Fresh offline tokens, of prompts and outputs."""
        return self.offline_prompt + self.offline_output

    def note_step(self, num_offline_before: int, now_ns: int) -> None:
        """A step with offline requests in it has ended. If fresh offline tokens have come since there were
        ``num_offline_before``, note the time, and that no step was given up since."""
        if self.num_offline > num_offline_before:
            self.offline_ns, self.num_abandoned_steps = now_ns, 0

    def add(self, other: FreshTokens) -> None:
        """Add the tokens of a group that is gone; its time and its abandoned steps are left out."""
        self.online_prompt += other.online_prompt
        self.online_output += other.online_output
        self.offline_prompt += other.offline_prompt
        self.offline_output += other.offline_output

    def note_prompt(self, state: RequestState) -> None:
        """Count the prompt tokens of a request that steps have computed for the first time, in its class. The request
        remembers how far it was counted."""
        reached = min(state.num_computed, state.num_prompt)
        num_new = reached - state.num_prompt_seen
        if num_new > 0:
            state.num_prompt_seen = reached
            if state.is_offline:
                self.offline_prompt += num_new
            else:
                self.online_prompt += num_new

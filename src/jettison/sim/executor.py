"""The time of a step: the executor port of the simulator, and the executor that asks the cost model.

Times follow from totals of a microbatch, which are whole numbers. So a caller that adds the rows up in another order,
or a step at a time, gets the same nanoseconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jettison.cost.model import GRAPH_ROWS, CostModel
from jettison.cost.stepwork import StepWork
from jettison.types import NANOSECONDS, LayerRange, WorkerId


class StepLoad(NamedTuple):
    """Totals of one microbatch."""

    num_tokens: int
    num_pairs: int
    """Query-key pairs under the causal mask."""
    num_kv_tokens: int
    """Tokens of context and of the chunks themselves, each read once by its chunk."""
    num_samples: int
    hides_host: bool = False
    """It was ready when the step before it ended, so the host's work for both was done beside them."""
    num_rows: int | None = None
    """None: see ``CostModel.launch_excess_s``."""

    @classmethod
    def of(cls, work: StepWork, num_samples: int) -> StepLoad:
        """Of a step whose rows add up to so much, so many of which draw a token."""
        num_kv_tokens = work.num_kv_tokens + work.num_tokens
        return cls(work.num_tokens, work.num_pairs, num_kv_tokens, num_samples, num_rows=work.num_rows)

    def after(self, num_steps: int) -> StepLoad:
        """The same rows, one token each, ``num_steps`` steps later."""
        grown = num_steps * self.num_tokens
        return StepLoad(self.num_tokens, self.num_pairs + grown, self.num_kv_tokens + grown, self.num_samples)


class StageShape(NamedTuple):
    """The part of the model that a stage runs."""

    num_layers: int
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, layers: LayerRange, num_layers: int) -> StageShape:
        """A stage of ``layers``, in a model of ``num_layers``."""
        return cls(len(layers), layers.lo == 0, layers.hi == num_layers)


class Executor(Protocol):
    """Predicts times; a prediction changes no state."""

    def stage_ns(self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape) -> int:
        """Whole nanoseconds of one stage for one microbatch, the worker's ``number``-th step."""
        ...

    def decode_ns(
        self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape, count: int
    ) -> npt.NDArray[np.int64]:
        """``stage_ns`` of ``count`` decode steps of the same rows that follow each other."""
        ...

    def attention_ns(self, num_kv_tokens: int, num_rows: int) -> int:
        """Whole nanoseconds of one layer's attention at a peer: ``num_rows`` decodes over ``num_kv_tokens`` tokens in
        all."""
        ...


@dataclass(frozen=True, slots=True)
class ModelledExecutor:
    """Step times by the cost model, with an overhead of the host, and optional noise.

    Tensor parallelism is in the model's coefficients: a worker stands for all devices of an instance.
    """

    cost: CostModel
    overhead_s: float = 0.0
    """Seconds that the host works before and after the device, for each step on each stage; none where the host works
    beside the device (a step that was planned ahead)."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time over its prediction."""
    seed: int = 0

    def stage_ns(self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape) -> int:
        """See ``Executor``. Noise depends on the seed, the worker and the number alone."""
        samples = load.num_samples if stage.is_last else 0
        seconds = self.cost.totals_cost_s(
            load.num_tokens, load.num_pairs, load.num_kv_tokens, stage.num_layers,
            is_first=stage.is_first, num_samples=samples, num_rows=load.num_rows,
        )
        if self.noise:
            seconds *= random.Random(f"{self.seed}/{worker_id}/{number}").lognormvariate(0.0, self.noise)
        return round((seconds + (0.0 if load.hides_host else self.overhead_s)) * NANOSECONDS)

    def decode_ns(
        self, worker_id: WorkerId, number: int, load: StepLoad, stage: StageShape, count: int
    ) -> npt.NDArray[np.int64]:
        """See ``Executor``. The same arithmetic for all steps at once, so the same nanoseconds."""
        if self.noise or (self.cost.launch_layer_s and load.num_tokens > GRAPH_ROWS):
            singly = [self.stage_ns(worker_id, number + i, load.after(i), stage) for i in range(count)]
            return np.array(singly, dtype=np.int64)
        grown = np.arange(count, dtype=np.int64) * load.num_tokens
        samples = load.num_samples if stage.is_last else 0
        pairs: Any = load.num_pairs + grown
        kv_tokens: Any = load.num_kv_tokens + grown
        seconds: Any = self.cost.totals_cost_s(
            load.num_tokens, pairs, kv_tokens, stage.num_layers,
            is_first=stage.is_first, num_samples=samples, has_chunks=False,
        )
        whole: npt.NDArray[np.int64] = np.rint((seconds + self.overhead_s) * NANOSECONDS).astype(np.int64)
        return whole

    def attention_ns(self, num_kv_tokens: int, num_rows: int) -> int:
        """See ``Executor``."""
        per_token_s = self.cost.pair_layer_s + self.cost.kv_token_layer_s
        seconds = num_kv_tokens * per_token_s + num_rows * self.cost.pair_layer_s
        return round(seconds * NANOSECONDS)

"""A back end whose memory counts as a device's: its tensors refuse what only host memory can do.

Outside of this file nothing may take a tensor's address, see it as a numpy array or a buffer, or put it in one
operation with a tensor of the host. Whatever tries is refused, and noted in ``BYPASSES``, since a worker survives an
error in a transfer. Inside, tensors are unwrapped, and the host's own code does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from underway import StepsUnderWay

from jettison.device.devicebytes_host import HostBytes
from jettison.device.dtypes import name_of
from jettison.device.hostpool import HostBuffers
from jettison.device.kernels.choosing import resolve_kernels
from jettison.device.kernels.loading import load_kernels
from jettison.device.kernels.operands import IntegerMatrix, LayerConstants, LayerWeights, PackedMatrix
from jettison.device.model.shards import model_shape
from jettison.device.model.workspace import StepBuffers
from jettison.device.pages_host import PagePool
from jettison.device.runner import Runner
from jettison.device.sampler import Sampler
from jettison.device.step import StepOutput
from jettison.device.stepcheck import check_input

POLLS_A_STEP = 3
"""How often a step is asked whether it is over before it is."""
_REFUSED = {"numpy", "data_ptr", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage"}
_MAY_MIX = {"copy_", "__setitem__", "__getitem__", "index_put_"}

UNDER_WAY = StepsUnderWay()
"""Of all doubles of the process."""
BYPASSES: list[str] = []
"""Every access that was refused, since the list was last cleared."""


class HostAccessError(Exception):
    """Something went around the port."""


class DeviceTensor(torch.Tensor):
    """A tensor of the double. Views and results of it are such tensors too."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in _REFUSED:
            _refuse(f"{name} of a device's tensor")
        if name not in _MAY_MIX and any(_is_of_host(value) for value in _flat((args, kwargs))):
            _refuse(f"{name} of tensors of the host and of a device")
        return super().__torch_function__(func, types, args, kwargs)


def _refuse(what: str) -> None:
    BYPASSES.append(what)
    raise HostAccessError(what)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _is_of_host(value: Any) -> bool:
    """A number in a tensor may lie anywhere."""
    return type(value) is torch.Tensor and value.dim() > 0


def wrapped(tensor: torch.Tensor) -> DeviceTensor:
    return tensor.as_subclass(DeviceTensor)


def bare(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a device's tensor; a tensor of the host is no such thing."""
    if type(tensor) is not DeviceTensor:
        _refuse("a tensor of the host where the device's is due")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class DoubleBytes:
    """Copies, always: nothing may count on seeing the device's memory."""

    _host = HostBytes()

    def read(self, source):
        assert source.is_contiguous()
        return self._host.read(bare(source)).copy()

    def copy_out(self, source, out):
        assert source.is_contiguous()
        self._host.copy_out(bare(source), out)

    def copy_in(self, data, target):
        assert target.is_contiguous()
        with UNDER_WAY.writing([bare(target).data_ptr()], target.nbytes):
            self._host.copy_in(data, bare(target))

    @contextmanager
    def writing(self, target):
        assert target.is_contiguous()
        staged = torch.empty(target.shape, dtype=target.dtype)
        staged.view(-1).view(torch.uint8).fill_(0xA5)
        yield staged
        with UNDER_WAY.writing([bare(target).data_ptr()], target.nbytes):
            bare(target).copy_(staged)

    def tensor(self, data, dtype, shape):
        return wrapped(self._host.tensor(data.copy(), dtype, shape))

    pin = None

    def gather(self, tables, rows, out):
        UNDER_WAY.read(_places(tables, rows))
        self._host.gather([bare(table) for table in tables], rows, out)

    def scatter(self, tables, rows, data):
        with UNDER_WAY.writing(_places(tables, rows), tables[0].shape[1]):
            self._host.scatter([bare(table) for table in tables], rows, data)


def _places(tables, rows):
    return [bare(table).data_ptr() + row * table.shape[1] for table in tables for row in rows.tolist()]


class DoublePool(PagePool):
    """The host's pages under the double's tensors."""

    def reserve(self, num_pages):
        arena = super().reserve(num_pages)
        whole = wrapped(arena.tensor())
        arena.tensor = lambda: whole
        return arena


class DoubleKernels:
    """The host's kernels, for tensors of the double alone."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self.name = inner.name

    def packs(self, shape, dtype):
        return self._inner.packs(shape, dtype)

    def __getattr__(self, name):
        call = getattr(self._inner, name)

        def unwrapping(*args, **kwargs):
            return call(*map(_bare_operand, args), **{key: _bare_operand(value) for key, value in kwargs.items()})

        return unwrapping


_LAYER_TENSORS = [name for name in LayerWeights.__slots__ if name not in ("arena", "bound")]
_BUFFERS = [name for name in StepBuffers.__slots__ if name not in ("bound", "routed")]


def _bare_operand(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return bare(value)
        case PackedMatrix():
            return PackedMatrix(bare(value.data))
        case IntegerMatrix():
            return value._replace(data=bare(value.data))
        case LayerWeights():
            if value.bound is None:
                tensors = {name: _bare_operand(getattr(value, name)) for name in _LAYER_TENSORS}
                value.bound = LayerWeights(tensors, bare(value.arena))
            return value.bound
        case StepBuffers():
            if value.bound is None:
                value.bound = SimpleNamespace(bound=None, **{name: bare(getattr(value, name)) for name in _BUFFERS})
            return value.bound
        case LayerConstants():
            return replace(value, cos=bare(value.cos), sin=bare(value.sin), bound=None)
    return value


class DoubleSampler(Sampler):
    """The host's, over the device's logits."""

    def sample(self, logits, *more):
        return super().sample(bare(logits), *more)

    def prompt_logprobs(self, logits, *more):
        return super().prompt_logprobs(bare(logits), *more)


class DoubleRunner(Runner):
    """The host's layers over the double's memory. A step is under way until it has been polled often enough."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self._likeliest = wrapped(self._likeliest)
        self._sampler = DoubleSampler(self.config.vocab_size)
        self._shape = model_shape(self.config, name_of(self.dtype))

    def start_step(self, step, hidden, port=None, gives_up=None):
        number = UNDER_WAY.begin(step, self._memory, self._shape, lambda tensor: bare(tensor).data_ptr())

        def run():
            try:
                return self.run(step, hidden, port, gives_up)
            finally:
                UNDER_WAY.end(number)

        return DoubleStep(run)

    def _enter(self, step, hidden, buffers):
        if hidden is not None:
            super()._enter(step, hidden, buffers)
            return
        check_input(step, hidden, self.config.hidden_size, self.dtype)
        self._decoder.embed(wrapped(torch.tensor(self._last.token_ids(step), dtype=torch.int64)), buffers.residual)

    def _leave(self, step, x):
        row_ends = np.cumsum(step.query_lens)
        prompt_logprobs = self._prompt_logprobs(step, x, row_ends)
        if len(step.sample_rows) == 0:
            return StepOutput(step.step_id, [], prompt_logprobs)
        sampled = x[torch.from_numpy(row_ends[step.sample_rows] - 1)]
        tokens = self._sample(self._decoder.logits(sampled), step.sample_rows.tolist(), step.sampling)
        return StepOutput(step.step_id, tokens, prompt_logprobs)


class DoubleStep:
    """Runs on the caller's thread at its last poll, or where its result is asked for."""

    may_be_followed = has_prepared = False

    def __init__(self, run) -> None:
        self._run = run
        self._polls_left = POLLS_A_STEP
        self._result: Any = None
        self._error: Exception | None = None

    def poll(self):
        self._polls_left -= 1
        if self._polls_left > 0:
            return False
        if self._run is not None:
            run, self._run = self._run, None
            try:
                self._result = run()
            except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
                self._error = error
            if isinstance(self._result, StepOutput):
                self._result.compute_ns = 1
        return True

    is_launched = True

    def wait(self, most_s):
        pass

    def result(self):
        while not self.poll():
            pass
        if self._error is not None:
            raise self._error
        return self._result


class DoubleKind:
    """See ``DeviceKind``."""

    goes_ahead = True
    keeps_rows = True
    link_bytes_per_s = 2e9

    def check_addresses(self, budget_bytes, workspace_bytes, shape, sizes):
        pass

    def resolve_kernels(self, name, dtype, processor=None):
        return resolve_kernels(name, dtype, processor)


class DoubleBackEnd:
    """See ``BackEnd``."""

    bytes = DoubleBytes()
    computes_by_itself = True
    kind = DoubleKind()

    def load_kernels(self, name, dtype):
        return DoubleKernels(load_kernels(name, dtype))

    def make_pool(self, budget_bytes, page_bytes):
        return DoublePool(budget_bytes, page_bytes)

    def make_runner(self, config, dtype, memory, kernels, max_num_tokens, max_num_seqs):
        return DoubleRunner(config, dtype, memory, kernels, max_num_tokens, max_num_seqs, self.bytes)

    def make_host_pool(self, num_slots, num_layers, block_bytes):
        return HostBuffers(num_slots, num_layers, block_bytes)

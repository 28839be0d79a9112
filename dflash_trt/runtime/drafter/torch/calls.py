# SPDX-License-Identifier: Apache-2.0
"""Calls of torch functions on named values, and runs of them that torch.compile fuses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from itertools import groupby
from operator import getitem
from typing import Any, NamedTuple

import torch

from dflash_trt.device.fused import Fused
from dflash_trt.runtime.drafter.torch import operators

VIEWS = (operators.identity, operators.reshape)
"""Operators that cost no kernel."""
WITH_FP8_CODES = (operators.quantize, operators.quantize_fp4, operators.dequantize)
"""Operators that Triton compiles only for GPUs with FP8 (3.6: "fp8e4nv not supported" on others)."""


class Call(NamedTuple):
    """A function on named values; further keywords are bound to it by `partial`."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_elementwise: bool = False
    """Whether it is worth a kernel together with its neighbours."""

    @property
    def operator(self) -> Callable[..., Any]:
        """The function without its keywords."""
        return self.function.func if isinstance(self.function, partial) else self.function

    @property
    def keywords(self) -> tuple[tuple[str, Any], ...]:
        """The keywords, in the order in which they were bound."""
        return tuple(self.function.keywords.items()) if isinstance(self.function, partial) else ()


def fused(calls: Sequence[Call], outputs: Collection[str], left: Collection[Callable[..., Any]] = ()) -> list[Call]:
    """The calls, each run of elementwise ones as one compiled call; `outputs` are the values that the program returns.

    The operators `left` stay as they are.
    """
    made, index = list[Call](), 0
    for is_fused, run in groupby(calls, lambda call: call.is_elementwise and call.operator not in left):
        part = list(run)
        index += len(part)
        if not is_fused or all(call.operator in VIEWS for call in part):
            made += part
            continue
        read_later = {name for call in calls[index:] for name in call.inputs} | set(outputs)
        made.append(_joined(part, read_later))
    return made


def _joined(calls: Sequence[Call], read_later: Collection[str]) -> Call:
    """One call for several, compiled once for all runs of the same shape: the layers of a draft are alike."""
    made = [name for call in calls for name in call.outputs]
    inputs = list(dict.fromkeys(name for call in calls for name in call.inputs if name not in made))
    outputs = [name for name in made if name in read_later]
    place = {name: index for index, name in enumerate([*inputs, *made])}
    steps = tuple((c.operator, c.keywords, tuple(place[i] for i in c.inputs), len(c.outputs)) for c in calls)
    function = fused_function(steps, len(inputs), tuple(place[name] for name in outputs))
    return Call(function, tuple(inputs), tuple(outputs))


Steps = tuple[tuple[Callable[..., Any], tuple[tuple[str, Any], ...], tuple[int, ...], int], ...]


@cache
def fused_function(steps: Steps, num_inputs: int, outputs: tuple[int, ...]) -> Fused:
    """A function of `num_inputs` tensors; further values are numbered in the order of computation."""
    graph = torch.fx.Graph()
    values = [graph.placeholder(f"x{index}") for index in range(num_inputs)]
    for function, keywords, inputs, count in steps:
        made = graph.call_function(function, tuple(values[index] for index in inputs), dict(keywords))
        is_one = count == 1 and function is not operators.split
        values += [made] if is_one else [graph.call_function(getitem, (made, i)) for i in range(count)]
    graph.output(tuple(values[index] for index in outputs))
    name = ", ".join(dict.fromkeys(function.__name__ for function, *_ in steps))
    return Fused(torch.fx.GraphModule({}, graph), f"a draft's {name}")

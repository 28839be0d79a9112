# SPDX-License-Identifier: Apache-2.0
"""A GPU that is pretended: tensors said to lie there keep their real values on the CPU, and mixing both is an error.

Code under test must move its tensors to the right device, as torch requires on a GPU: operands of one call lie on one
device, but for tensors without axes, the indices of a tensor and what `copy_` reads; NumPy takes none of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
MARK = "pretended_device"
"""Attribute of a storage that is said to lie on another device."""
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
CROSSING = {
    torch.Tensor.copy_, torch.Tensor.grad.__get__, torch.Tensor.grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__, torch._has_compatible_shallow_copy_type,  # type: ignore[attr-defined]
}  # fmt: skip
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}
READING = (
    *("__bool__", "__float__", "__index__", "__int__", "allclose", "equal", "is_nonzero", "item"),
    *("masked_select", "nonzero", "tolist", "unique"),
)
"""Names of functions whose result depends on values, so that the host waits for the device."""


class PretendDevice(TorchFunctionMode):
    """Within the context `device` exists, and each tensor is on it or on the CPU."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = torch.device(device)
        self.calls = 0
        """Calls with operands on the device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.place(args[0])
        if function == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.place(args[0]) == self.device
        if function in NUMPY and self.place(args[0]) == self.device:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        if function in MOVES:
            return self._moved(function, args, keywords)
        place = self._common(function, args, keywords)
        if (asked := keywords.get("device")) is not None:
            place = torch.device(asked)
            if place.type == self.device.type:
                del keywords["device"]
        if (place != CPU or function in CROSSING) and waits(self, function, args, keywords):
            self.wait(function.__name__)
        result = function(*args, **keywords)
        self._mark(result, place)
        self.called(function, args, keywords, result)
        return result

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor lies."""
        there: torch.device = getattr(tensor.untyped_storage(), MARK, tensor.device)
        return there

    def wait(self, name: str) -> None:
        """The host waits for the device, in the function of this name."""

    def called(self, function: Callable[..., Any], args: Sequence[Any], keywords: Any, result: Any) -> None:
        """A call is made."""

    def _moved(self, function: Any, args: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor:
        tensor, *rest = args
        named = [keywords.pop("device", None), *(x for x in rest if isinstance(x, str | torch.device))]
        named += [self.place(x) for x in rest if isinstance(x, torch.Tensor)]
        named += [{torch.Tensor.cpu: CPU, torch.Tensor.cuda: self.device}.get(function)]
        target = next((torch.device(place) for place in named if place is not None), self.place(tensor))
        others = [x for x in rest if isinstance(x, torch.dtype | torch.Tensor)]
        is_moved = target != self.place(tensor)
        if is_moved and tensor.numel() and not keywords.get("non_blocking"):
            self.wait(function.__name__)
        result = tensor.to(*others, **keywords) if others or keywords else tensor
        if is_moved and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            result = result.clone()
        self._mark(result, target)
        self.called(function, [tensor], {}, result)
        return result

    def _common(self, function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> torch.device:
        """The device of the operands; RuntimeError for two."""
        tensors = list(tensors_in([args, keywords]))
        if function in INDEXING:
            tensors = [args[0], *(t for t in tensors[1:] if self.place(t) != CPU)]
        places = {self.place(tensor) for tensor in tensors if tensor.dim() and tensor.numel()}
        if len(places) > 1 and function not in CROSSING:
            raise RuntimeError(f"{function.__name__}: expected all tensors on one device, found {self.device} and cpu")
        place = self.place(args[0]) if function in CROSSING else next(iter(places), None)
        place = place or next(iter({self.place(tensor) for tensor in tensors} - {CPU}), CPU)
        self.calls += place != CPU
        return place

    def _mark(self, result: Any, place: torch.device) -> None:
        if place.type == self.device.type:
            for tensor in tensors_in([result]):
                setattr(tensor.untyped_storage(), MARK, self.device)


def waits(gpu: PretendDevice, function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether torch copies between host and device in this call, or the host reads a result of the device."""
    if function == torch.Tensor.copy_:
        is_copied = gpu.place(args[0]) != gpu.place(args[1]) and args[1].numel() > 0
        return is_copied and not keywords.get("non_blocking")
    if function in INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        tensors = [part for part in index if isinstance(part, torch.Tensor)]
        is_host = any(isinstance(part, list) for part in index) or any(gpu.place(t) == CPU and t.dim() for t in tensors)
        return is_host or any(tensor.dtype == torch.bool for tensor in tensors)
    if function.__name__ in ("grouped_mm", "_grouped_mm"):  # read in ATen (GroupedBlas.cpp): else offsets are copied
        return bool(args[0].dtype != torch.bfloat16)
    return function is torch.tensor or function.__name__ in READING


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and mappings."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)

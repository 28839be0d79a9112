# SPDX-License-Identifier: Apache-2.0
"""A GPU that is pretended: tensors said to lie there keep their real values on the CPU, and mixing both is an error.

What runs under it moves its tensors where they belong, as torch asks of a program on a GPU: operands of one call lie on
one device, but for tensors without axes, the indices of a tensor and what `copy_` reads; NumPy takes none of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
CROSSING = {torch.Tensor.copy_, torch.Tensor.grad.__get__, torch.Tensor.grad.__set__}  # type: ignore[attr-defined]
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}


class PretendDevice(TorchFunctionMode):
    """Within the context `device` exists, and each tensor is on it or on the CPU."""

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.device = torch.device(device)
        self._there: dict[int, torch.UntypedStorage] = {}
        """Storages on the device by address; they are kept, so that no other tensor gets their addresses."""
        self.calls = 0
        """Calls with operands on the device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.place(args[0])
        if function == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.place(args[0]) != CPU
        if function in NUMPY and self.place(args[0]) != CPU:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy")
        if function in MOVES:
            return self._moved(function, args, keywords)
        asked = keywords.pop("device", None)
        place = self._common(function, args, keywords)
        result = function(*args, **keywords)
        self._mark(result, place if asked is None else torch.device(asked))
        return result

    def place(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor lies."""
        return self.device if tensor.untyped_storage().data_ptr() in self._there else CPU

    def _moved(self, function: Any, args: Sequence[Any], keywords: dict[str, Any]) -> torch.Tensor:
        tensor, *rest = args
        named = [keywords.pop("device", None), *(x for x in rest if isinstance(x, str | torch.device))]
        named += [self.place(x) for x in rest if isinstance(x, torch.Tensor)]
        named += [{torch.Tensor.cpu: CPU, torch.Tensor.cuda: self.device}.get(function)]
        target = next((torch.device(place) for place in named if place is not None), self.place(tensor))
        others = [x for x in rest if not isinstance(x, str | torch.device)] if function is torch.Tensor.to else []
        result = tensor.to(*others, **keywords) if others or keywords else tensor
        if target != self.place(tensor) and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            result = result.clone()
        self._mark(result, target)
        return result

    def _common(self, function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> torch.device:
        """The device of the operands; RuntimeError for two."""
        tensors = list(_tensors([args, keywords]))
        if function in INDEXING:
            tensors = [args[0], *(t for t in tensors[1:] if self.place(t) != CPU)]
        places = {self.place(tensor) for tensor in tensors if tensor.dim()}
        if len(places) > 1 and function not in CROSSING:
            raise RuntimeError(f"{function.__name__}: expected all tensors on one device, found {self.device} and cpu")
        place = self.place(args[0]) if function in CROSSING else next(iter(places), None)
        place = place or next(iter({self.place(tensor) for tensor in tensors} - {CPU}), CPU)
        self.calls += place != CPU
        return place

    def _mark(self, result: Any, place: torch.device) -> None:
        for tensor in _tensors([result]):
            storage = tensor.untyped_storage()
            if place != CPU and storage.data_ptr():
                self._there[storage.data_ptr()] = storage


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)

# SPDX-License-Identifier: Apache-2.0
"""TensorRT's builder as far as it runs without a GPU: TensorRT-RTX's under the names of another release.

Every attribute, argument and enum member that is used must be in that release's real bindings; the calls then reach the
real parser and builder, for SM 12.0. Calls that only TensorRT supports are answered by `answers`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.engine.plans import machine
from dflash_trt.engine.plans.tensorrt_api import installed_library
from tests.contract.host_runtime import accepts, offer_of
from tests.contract.machine import H200
from tests.engine.plans.rtx import tensorrt_rtx


class Checked:
    """A stand-in for `import tensorrt`; `calls` lists what was called, by dotted name, with its arguments."""

    def __init__(self, version: str) -> None:
        self._real, self._offer = tensorrt_rtx(), offer_of(version)
        self.__version__ = version
        self.__spec__ = ModuleSpec("tensorrt", None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {}
        """Result of a dotted method that replaces the real one's; an exception is raised."""
        for name in ("IProgressMonitor", "ILogger", "IStreamWriter"):  # subclassed by our code
            setattr(self, name, getattr(self._real, name))
        for name, members in self._offer["enums"].items():
            known = getattr(self._real, name, None)
            setattr(self, name, SimpleNamespace(**{m: getattr(known, m, None) for m in members}))

    def __getattr__(self, name: str) -> Any:
        if name in self._offer["functions"]:
            return self.method(name, self._offer["functions"][name], getattr(self._real, name))
        if name in self._offer["classes"]:
            return CheckedClass(self, name)
        raise AttributeError(f"TensorRT {self.__version__} has no {name!r}")

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `name`."""
        return [arguments for called, arguments in self.calls if called == name]

    def parsed(self) -> list[str]:
        """Graphs that it was given since the last call."""
        files = [Path(file).name for (file,) in self.arguments("OnnxParser.parse_from_file")]
        self.calls.clear()
        return files

    def method(self, name: str, overloads: list[list[str]], real: Callable[..., Any]) -> Callable[..., Any]:
        """`real`, called only as one of `overloads` is."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(accepts(overload, len(args), set(kwargs)) for overload in overloads):
                raise TypeError(f"TensorRT {self.__version__}: {name}{args}{kwargs}: none of {overloads}")
            self.calls.append((name, (*args, *kwargs.values())))
            if isinstance(answer := self.answers.get(name), Exception):
                raise answer
            if name in self.answers:
                return answer
            return self.wrap(real(*map(_unwrap, args), **{key: _unwrap(value) for key, value in kwargs.items()}))

        return call

    def wrap(self, value: Any) -> Any:
        """An object of the bindings, whose own calls are checked as well."""
        name = type(value).__name__
        if name not in self._offer["classes"] or name == "IHostMemory":  # only the object itself has its buffer
            return value
        if name == "IBuilderConfig":
            value.num_compute_capabilities = 1
            value.set_compute_capability(self._real.ComputeCapability.SM120, 0)
        return CheckedObject(self, name, value)


class CheckedClass:
    """A class of the module: it is constructed, or has constants."""

    def __init__(self, module: Checked, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *args: Any) -> Any:
        overloads = self._module._offer["classes"][self._name]["methods"]["__init__"]
        return self._module.method(f"{self._name}.__init__", overloads, getattr(self._module._real, self._name))(*args)

    def __getattr__(self, key: str) -> Any:
        if key not in self._module._offer["classes"][self._name]["attributes"]:
            raise AttributeError(f"TensorRT {self._module.__version__}: {self._name} has no {key!r}")
        return getattr(getattr(self._module._real, self._name), key)


class CheckedObject:
    """An object of one of its classes."""

    def __init__(self, module: Checked, name: str, real: Any) -> None:
        for key, value in (("_module", module), ("_name", name), ("_real", real)):
            object.__setattr__(self, key, value)

    def __getattr__(self, key: str) -> Any:
        offer, dotted = self._module._offer["classes"][self._name], f"{self._name}.{key}"
        if key in offer["methods"]:
            return self._module.method(dotted, offer["methods"][key], getattr(self._real, key))
        if key in offer["attributes"] or key in offer["writable"]:
            return self._module.wrap(getattr(self._real, key))
        raise AttributeError(f"TensorRT {self._module.__version__}: {self._name} has no {key!r}")

    def __setattr__(self, key: str, value: Any) -> None:
        if key not in self._module._offer["classes"][self._name]["writable"]:
            raise AttributeError(f"TensorRT {self._module.__version__}: {self._name}.{key} cannot be set")
        self._module.calls.append((f"{self._name}.{key}", (value,)))
        setattr(self._real, key, value)


def on_h200(monkeypatch: pytest.MonkeyPatch, version: str) -> Checked:
    """A machine with an H200 and this TensorRT."""
    checked = Checked(version)
    monkeypatch.setitem(sys.modules, "tensorrt", checked)
    monkeypatch.setattr(machine, "gpu", lambda index=0: H200)
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))
    return checked


def _unwrap(value: Any) -> Any:
    return value._real if isinstance(value, CheckedObject) else value

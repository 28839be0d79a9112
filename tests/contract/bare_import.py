# SPDX-License-Identifier: Apache-2.0
"""Imports single modules of a package that cannot be imported here: what they miss is replaced by names without sense.

For `tensorrt_llm` from a checkout, on a machine without its compiled bindings or CUDA: pydantic classes need only the
types of their own fields. Packages' `__init__` files do not run; a module that raises becomes such a name itself, and
is listed. It changes this process for good: run it in one of its own.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar


class _Name(type):
    """Every public attribute of such a class is one more of its kind."""

    __members__: ClassVar[dict[str, Any]] = {}  # as an enum without members

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nonsense(f"{cls.__name__}.{name}")

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Nonsense(metaclass=_Name):
    """A class, function, enum or type of a field: called it gives an instance, which is false and knows everything."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> _Nonsense:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        return import_module("pydantic_core.core_schema").any_schema()


def nonsense(name: str) -> Any:
    """A name without sense."""
    return _Name(name, (_Nonsense,), {})


class BareImport(MetaPathFinder, Loader):
    """Finds the modules of one package, and other packages that they asked for in vain."""

    def __init__(self, package: Path, needed: str) -> None:
        """`package` is the directory of the package, `needed` the module whose own errors are to be seen."""
        self._root, self._directory, self._needed = package.name, package, needed
        self._missing: set[str] = set()
        self.replaced: dict[str, str] = {}
        """Why a module was replaced, by name."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in {self._root, *self._missing}:
            return None
        return ModuleSpec(name, self, is_package=not self._file(name).is_file())

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, file = module.__name__, self._file(module.__name__)
        if not file.is_file():  # a package, compiled bindings, or a package that is not installed
            module.__dict__["__getattr__"] = _attributes(name)
            return
        code = compile(file.read_text(), file, "exec")
        for _ in range(100):
            try:
                exec(code, module.__dict__)
                return
            except ModuleNotFoundError as problem:
                root = (problem.name or "").partition(".")[0]
                if not root or root in self._missing or root == self._root:
                    self._replace(module, problem)
                    return
                self._missing.add(root)
            except Exception as problem:
                self._replace(module, problem)
                return
        raise ImportError(f"{name}: expected an end of missing packages, found {sorted(self._missing)}")

    def _replace(self, module: ModuleType, problem: Exception) -> None:
        if module.__name__ == self._needed:
            raise problem
        self.replaced[module.__name__] = f"{type(problem).__name__}: {problem}"
        module.__dict__["__getattr__"] = _attributes(module.__name__)

    def _file(self, name: str) -> Path:
        return self._directory.joinpath(*name.split(".")[1:]).with_suffix(".py")


def _attributes(module: str) -> Any:
    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nonsense(f"{module}.{name}")

    return get


def import_bare(package: Path, module: str) -> tuple[Any, BareImport]:
    """`module` of the package in the directory `package`, and what was replaced on the way."""
    if find_spec("strenum") is None:  # what Python has had since 3.11, and what fields are checked against
        sys.modules["strenum"] = enum
    finder = BareImport(package, module)
    sys.meta_path.insert(0, finder)
    return import_module(module), finder

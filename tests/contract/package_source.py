# SPDX-License-Identifier: Apache-2.0
"""Modules of an installed package or a checkout, read from files without importing."""

from __future__ import annotations

import ast
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class PackageSource:
    """Modules by their full name, each parsed once."""

    def __init__(self, directory: Path) -> None:
        """`directory` is the package's own."""
        self.directory = directory
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None where there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def find(self, module: str, path: str) -> ast.stmt | None:
        """The function, class or assignment called `path`, Class.name inside a class."""
        node: ast.Module | ast.stmt | None = self.module(module)
        for name in path.split("."):
            body = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
            node = next((statement for statement in body if name in _defined(statement)), None)
        return node if isinstance(node, ast.stmt) else None

    def parameters(self, module: str, path: str) -> list[str] | None:
        """Names in the order of the signature; None where there is no such function."""
        function = self.find(module, path)
        return parameters(function) if isinstance(function, FUNCTIONS) else None

    def imported(self, module: str, name: str) -> tuple[str, str] | None:
        """Module and name that `from MODULE import NAME`, anywhere in `module`, binds to `name`."""
        tree = self.module(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _absolute(module, node), alias.name
        return None

    def _parse(self, name: str) -> ast.Module | None:
        base = self.directory.joinpath(*name.split(".")[1:])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not file.is_file():
            return None
        return ast.parse(file.read_bytes(), file)


def parameters(function: Function) -> list[str]:
    """Names of a signature, in its order."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    return [argument.arg for argument in listed if argument is not None]


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]

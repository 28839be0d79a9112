# SPDX-License-Identifier: Apache-2.0
"""Uses of the drafter in a TensorRT-LLM, read from its files without importing them.

A use is a text: `fc.weight.dtype` is read or set, `project_target_hidden(1)` is called with one positional argument,
`f(a=, **)` with keywords; `passed to NAME` and `kept as NAME` are where it leaves what can be followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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


ATTRIBUTE = "draft_model"  # names by which owners of a drafter refer to it
BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
HARMLESS = ("id", "len", "repr", "str", "type")
Chain = tuple[str, ...]
Aliases = dict[str, Chain]
Classes = list[tuple[str, ast.ClassDef]]
"""A class and its bases, each with its module."""


class DrafterUses:
    """Gathers uses in functions and in those, of the same part of the package, that they hand the drafter on to."""

    def __init__(self, source: PackageSource, part: str) -> None:
        """Functions of modules below `part` are followed."""
        self._source, self._part = source, part
        self._done: set[tuple[str, int, frozenset[str]]] = set()
        self.found: set[str] = set()

    def read_class(self, module: str, name: str) -> None:
        """All methods of a class and of its bases in the package; the drafter is what they call draft_model."""
        classes = list(self._classes(module, name))
        for at, node in classes:
            for method in node.body:
                if isinstance(method, FUNCTIONS):
                    self._read(at, method, {ATTRIBUTE} & set(parameters(method)), classes)

    def read_function(self, module: str, path: str, parameter: str) -> None:
        """One function or method, which has the drafter as `parameter`."""
        function = self._source.find(module, path)
        if isinstance(function, FUNCTIONS):
            self._read(module, function, {parameter}, [])

    def _classes(self, module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
        node = self._source.find(module, name)
        if not isinstance(node, ast.ClassDef):
            if imported := self._source.imported(module, name):
                yield from self._classes(*imported)
            return
        yield module, node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from self._classes(module, base.id)

    def _read(self, module: str, function: Function, names: set[str], classes: Classes) -> None:
        key = (module, id(function), frozenset(names))
        if key not in self._done:
            self._done.add(key)
            _Body(self, module, classes, dict.fromkeys(names, ())).visit_function(function)

    def follow(self, module: str, classes: Classes, call: ast.Call, given: set[int | str]) -> bool:
        """Reads the function that `call` hands the drafter to as its arguments `given`; False where that is nowhere."""
        for at, function, has_self in self._called(module, classes, call.func):
            names = parameters(function)[has_self:]
            bound = {names[g] if isinstance(g, int) else g for g in given if isinstance(g, str) or g < len(names)}
            self._read(at, function, bound & set(names), classes)
            return len(bound) == len(given)
        return False

    def _called(self, module: str, classes: Classes, called: ast.expr) -> Iterator[tuple[str, Function, bool]]:
        if isinstance(called, ast.Name):
            at, name = module, called.id
            if self._source.find(at, name) is None:
                at, name = self._source.imported(module, name) or ("", "")
            function = self._source.find(at, name) if at.startswith(self._part) else None
            if isinstance(function, FUNCTIONS):
                yield at, function, False
        if isinstance(called, ast.Attribute) and ast.unparse(called.value) in ("self", "cls", "super()"):
            for at, node in classes:
                for method in node.body:
                    if isinstance(method, FUNCTIONS) and method.name == called.attr:
                        static = any(ast.unparse(mark) == "staticmethod" for mark in method.decorator_list)
                        yield at, method, not static


class _Body(ast.NodeVisitor):
    """One function; `aliases` are names of the drafter and of what hangs on it."""

    def __init__(self, uses: DrafterUses, module: str, classes: Classes, aliases: Aliases) -> None:
        self._uses, self._module, self._classes, self._aliases = uses, module, classes, aliases

    def visit_function(self, function: Function) -> None:
        """Names first, wherever they are bound: a use may stand above the assignment in a loop."""
        assignments = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.NamedExpr))]
        for _ in assignments:
            before = len(self._aliases)
            for node in assignments:
                chain = self._chain(node.value)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if chain is not None and isinstance(target, ast.Name):
                        self._aliases[target.id] = chain
            if len(self._aliases) == before:
                break
        for statement in function.body:
            self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = self._chain(node)
        if chain is None:
            self.generic_visit(node)
        elif chain:
            self._uses.found.add(".".join(chain))

    def visit_Assign(self, node: ast.Assign) -> None:
        if self._chain(node.value) == ():
            for target in node.targets:
                if isinstance(target, (ast.Attribute, ast.Subscript)) and self._chain(target) is None:
                    self._uses.found.add(f"kept as {ast.unparse(target)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        chain = self._chain(node.func)
        if name in BY_NAME and node.args and self._chain(node.args[0]) is not None:
            self._by_name(node)
            return
        if chain:
            shape = f"({_shape(node)})" if len(chain) == 1 else ""
            self._uses.found.add(".".join(chain) + shape)
        elif name not in HARMLESS:
            arguments = [*enumerate(node.args), *((keyword.arg, keyword.value) for keyword in node.keywords)]
            handed = {at for at, value in arguments if at is not None and self._chain(value) == ()}
            if handed and not self._uses.follow(self._module, self._classes, node, handed):
                self._uses.found.add(f"passed to {ast.unparse(node.func)}")
        if not chain:
            self.visit(node.func)
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(value)

    def _by_name(self, node: ast.Call) -> None:
        chain = self._chain(node)
        base = self._chain(node.args[0])
        self._uses.found.add(".".join(chain or (*(base or ()), "(a name computed at run time)")))
        for value in node.args[2:]:
            self.visit(value)

    def _chain(self, node: ast.expr) -> Chain | None:
        """The attributes that lead from the drafter to `node`; None for what is not the drafter's."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._chain(node.value)
            if base is not None:
                return (*base, node.attr)
            return () if node.attr == ATTRIBUTE else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            base = self._chain(node.args[0])
            if base is not None and node.func.id == "type":
                return base
            if base is not None and node.func.id in BY_NAME and len(node.args) > 1:
                name = node.args[1]
                return (*base, str(name.value)) if isinstance(name, ast.Constant) else None
        return None


def _shape(call: ast.Call) -> str:
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    parts = [str(len(positional))] if positional else []
    parts += ["*"] * (len(call.args) - len(positional))
    parts += [f"{keyword.arg}=" if keyword.arg else "**" for keyword in call.keywords]
    return ", ".join(parts)

# SPDX-License-Identifier: Apache-2.0
"""Every use of the drafter in a TensorRT-LLM, read from its files, against those that our drafter implements.

`generations.json` has what was read in NVIDIA/TensorRT-LLM, below tensorrt_llm/_torch: speculative/dflash.py at the
commits of its generations (864a4300, a branch's, by name only) and at 00679c66c3e3, which is like 414ba69f without FA4,
speculative/interface.py (SpecWorkerBase) at 00b6d5a25c30, models/modeling_dflash.py at 009d8fa431bd,
models/checkpoints/base_weight_mapper.py at 0c8de69a1ca6, models/modeling_utils.py and models/modeling_speculative.py
of the same months. No release's wheel has been read.

A use is a text: `fc.weight.dtype` is read or set, `project_target_hidden(1)` is called with one positional argument,
`f(a=, **)` with keywords; `passed to NAME` and `kept as NAME` are where it leaves what can be followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.trtllm.registration import INTERFACE, PACKAGE, WORKER

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


ATTRIBUTE = "draft_model"  # what objects that own a drafter call it
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


MODELS, SPECULATIVE = f"{PACKAGE}._torch.models", f"{PACKAGE}._torch.speculative"
LOADER, MAPPER = f"{MODELS}.modeling_speculative", f"{MODELS}.checkpoints.base_weight_mapper"
DRAFTER_INPUTS = "speculative.dflash:DFlashWorker.prepare_1st_drafter_inputs"
CLASSES = ((WORKER, "DFlashWorker"), (LOADER, "SpecDecOneEngineForCausalLM"))


class WorkerVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that engine mode was written for."""

    commit: str
    uses: tuple[str, ...]
    """Groups of uses of the drafter that it may have."""
    marks: tuple[str, ...]
    """Uses that tell it from the generations before."""
    description: str
    """Summary for messages."""
    inputs: tuple[str, ...] = ()
    """Parameters of DRAFTER_INPUTS in addition to the first generation's."""

    @property
    def known(self) -> frozenset[str]:
        """All uses of its groups."""
        return frozenset(use for group in self.uses for use in contract_data().uses[group])


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A release of TensorRT-LLM that was read, at least in part."""

    version: str
    generation: str | None
    """Commit of its worker; None where only its files can tell."""
    known_by: str


class ContractData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """generations.json."""

    uses: dict[str, tuple[str, ...]]
    """Uses of the drafter by group: all of our drafters implement `ours`, that of a DFlash2 draft also `dflash2`, and
    none the others, which workers only reach with drafters of other kinds."""
    generations: tuple[WorkerVersion, ...]
    releases: tuple[Release, ...]
    signatures: dict[str, str]
    """Parameters by MODULE:FUNCTION below tensorrt_llm._torch; of DRAFTER_INPUTS, the first generation's."""
    builder: str
    """Parameters of the builder that TensorRT-LLM itself registers for DFlash."""
    called: tuple[str, ...]
    """Methods that the worker of every generation calls."""


@cache
def contract_data() -> ContractData:
    """The facts that were read of TensorRT-LLM."""
    return read_json(Path(__file__).parent / "generations.json", ContractData, ConfigError, what="the contract")


NEEDED = {
    "speculative/dflash.py": "the worker",
    "speculative/interface.py": "its base, and the name of its method",
    "models/modeling_utils.py": "the registry of drafters",
    "models/modeling_dflash.py": "the drafter that ours stands in for, and its builder",
    "models/modeling_speculative.py": "what builds and loads a drafter",
    "models/checkpoints/base_weight_mapper.py": "what loads its weights",
}
"""Files below tensorrt_llm/_torch that the reading needs, and what of them is compared."""


def missing_files(directory: Path) -> list[str]:
    """Needed files that are not in the package in `directory`, one line each."""
    files = ((f"_torch/{name}", what) for name, what in NEEDED.items())
    return [f"{directory.name}/{name}: {what}" for name, what in files if not (directory / name).is_file()]


def target_specific(directory: Path) -> list[str]:
    """One line for each target with a worker or a drafter of its own, which `read_package` does not judge.

    Targets of _torch/_experimental/modeling_v2 replace the worker that TensorRT-LLM has built, and `_build_draft_model`
    builds a drafter past the registry.
    """
    source, lines = PackageSource(directory), []
    known = [use for group in contract_data().uses.values() for use in group]
    for file in sorted(directory.joinpath("_torch").rglob("*.py")):
        module = ".".join((PACKAGE, *file.relative_to(directory).with_suffix("").parts))
        text = file.read_bytes()
        tree = source.module(module) if b"(DFlashWorker" in text or b"_build_draft_model" in text else None
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef) and "DFlashWorker" in map(ast.unparse, node.bases):
                uses = DrafterUses(source, f"{PACKAGE}._torch")
                uses.read_class(module, node.name)
                new = sorted(use for use in uses.found if not any(_covers(each, use) for each in known))
                lines.append(f"{module}.{node.name}: a worker that asks the drafter for {', '.join(new) or 'no more'}")
            elif isinstance(node, FUNCTIONS) and node.name == "_build_draft_model":
                lines.append(f"{module}._build_draft_model({', '.join(parameters(node))}): builds a drafter of its own")
    return lines


class PackageReading(msgspec.Struct, frozen=True):
    """The uses of the drafter in a TensorRT-LLM, and the generation that it is or is nearest to."""

    uses: frozenset[str]
    generation: WorkerVersion
    differences: tuple[str, ...]
    """Differences to that generation, each in one line."""


def read_package(directory: Path) -> PackageReading:
    """Read the package in `directory`, installed or of a checkout.

    Nothing of it is imported.
    """
    source = PackageSource(directory)
    uses = _drafter_uses(source)
    candidates = contract_data().generations
    marked = [g for g in candidates if any(_covers(mark, use) for mark in g.marks for use in uses)] or candidates[:1]
    by_generation = {g.commit: tuple(differences(source, uses, g)) for g in marked}
    nearest = min(reversed(marked), key=lambda g: len(by_generation[g.commit]))
    return PackageReading(uses, nearest, by_generation[nearest.commit])


def differences(source: PackageSource, uses: frozenset[str], generation: WorkerVersion) -> Iterator[str]:
    """One line each: names that are missing, parameters that differ, uses of the drafter that are new."""
    data = contract_data()
    for place, expected in data.signatures.items():
        module, _, name = f"{PACKAGE}._torch.{place}".partition(":")
        more = generation.inputs if place == DRAFTER_INPUTS else ()
        yield from _signature(f"{module}.{name}", source.parameters(module, name), " ".join((expected, *more)))
    if source.find(INTERFACE, "SpeculativeDecodingMode.DFLASH") is None:
        yield f"{INTERFACE}.SpeculativeDecodingMode.DFLASH: expected it, found none"
    yield from _signature("the builder of DFlash drafters", _builder(source), data.builder)
    for module, name in CLASSES:
        if source.find(module, name) is None:
            yield f"{module}.{name}: expected it, found none"
    for use in sorted(uses):
        if not any(_covers(known, use) for known in generation.known):
            yield f"TensorRT-LLM uses {use} of the drafter, which engine mode does not implement"
    for name in data.called:
        if not any(use.startswith(f"{name}(") for use in uses):
            yield f"TensorRT-LLM never calls {name} of the drafter, which engine mode relies on"


def _drafter_uses(source: PackageSource) -> frozenset[str]:
    uses = DrafterUses(source, SPECULATIVE)
    for module, name in CLASSES:
        uses.read_class(module, name)
    uses.read_function(MAPPER, "BaseWeightMapper.init_model_and_config", "model")
    return frozenset(uses.found)


def _covers(known: str, use: str) -> bool:
    """Whether `use` is `known`, a part of it, or, behind a star, anything below it."""
    if known.endswith(".*"):
        return use == known[:-2] or use.startswith((known[:-1], f"{known[:-2]}("))
    return use == known or known.startswith(f"{use}.")


def _signature(name: str, found: list[str] | None, expected: str) -> Iterator[str]:
    if found is None:
        yield f"{name}: expected ({expected.replace(' ', ', ')}), found none"
    elif found != expected.split():
        yield f"{name}: expected ({expected.replace(' ', ', ')}), found ({', '.join(found)})"


def _builder(source: PackageSource) -> list[str] | None:
    """Parameters of the function that one of its model files registers for DFlash."""
    for file in sorted(source.directory.joinpath("_torch", "models").glob("*.py")):
        if b"register_draft_model(" not in file.read_bytes():
            continue
        tree = source.module(f"{MODELS}.{file.stem}")
        for node in tree.body if tree else ():
            if isinstance(node, FUNCTIONS) and any(map(_registers_dflash, node.decorator_list)):
                return parameters(node)
    return None


def _registers_dflash(mark: ast.expr) -> bool:
    return (
        isinstance(mark, ast.Call)
        and ast.unparse(mark.func).endswith("register_draft_model")
        and any(ast.unparse(argument).endswith(".DFLASH") for argument in mark.args)
    )

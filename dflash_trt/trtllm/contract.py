# SPDX-License-Identifier: Apache-2.0
"""What engine mode relies on inside TensorRT-LLM, checked in its files before anything is registered.

`generations.json` has what was read in NVIDIA/TensorRT-LLM, below tensorrt_llm/_torch: speculative/dflash.py at the
commits of its generations (864a4300 by name only) and at 00679c66c3e3, which is like 414ba69f without FA4,
speculative/interface.py (SpecWorkerBase) at 00b6d5a25c30, models/modeling_dflash.py at 009d8fa431bd,
models/checkpoints/base_weight_mapper.py at 0c8de69a1ca6, models/modeling_utils.py and models/modeling_speculative.py
of the same months. No release's wheel has been read: `make contract TENSORRT_LLM=DIR` reads one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.errors import ConfigError, EngineError, MissingDependencyError
from dflash_trt.files.json_file import read_json
from dflash_trt.files.read import read_bytes
from dflash_trt.trtllm.drafter_uses import DrafterUses
from dflash_trt.trtllm.package_source import FUNCTIONS, MAX_SOURCE_BYTES, PackageSource, parameters

PACKAGE = "tensorrt_llm"
MODELS, SPECULATIVE = f"{PACKAGE}._torch.models", f"{PACKAGE}._torch.speculative"
INTERFACE, WORKER = f"{SPECULATIVE}.interface", f"{SPECULATIVE}.dflash"
REGISTRY = f"{MODELS}.modeling_utils"
LOADER, MAPPER = f"{MODELS}.modeling_speculative", f"{MODELS}.checkpoints.base_weight_mapper"
DRAFTER_INPUTS = "speculative.dflash:DFlashWorker.prepare_1st_drafter_inputs"
CLASSES = ((WORKER, "DFlashWorker"), (LOADER, "SpecDecOneEngineForCausalLM"))


class WorkerVersion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that engine mode was written for."""

    commit: str
    uses: tuple[str, ...]
    """Groups of uses of the drafter that it may have."""
    marks: tuple[str, ...]
    """Uses that the generations before it had not."""
    description: str
    """What it has, and what that means here."""
    inputs: tuple[str, ...] = ()
    """Parameters of DRAFTER_INPUTS beside the first generation's."""

    @property
    def known(self) -> frozenset[str]:
        """The uses of its groups."""
        return frozenset(use for group in self.uses for use in contract_data().uses[group])


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A release of TensorRT-LLM of which something was read."""

    version: str
    generation: str | None
    """Commit of its worker; None where nothing says which it is, so that only its files can."""
    known_by: str


class ContractData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """generations.json."""

    uses: dict[str, tuple[str, ...]]
    """Of the drafter, by group: `ours` are those that all of our drafters serve, `dflash2` those that one of a DFlash2
    draft does, the others are never taken with them."""
    generations: tuple[WorkerVersion, ...]
    releases: tuple[Release, ...]
    signatures: dict[str, str]
    """MODULE:FUNCTION below tensorrt_llm._torch, with the parameters it is called with: by us, or by the worker on our
    drafter. Those of DRAFTER_INPUTS are the first generation's."""
    builder: str
    """Parameters of what TensorRT-LLM itself registers for DFlash."""
    called: tuple[str, ...]
    """By every generation: a worker that does not call these is none that our drafter was written for."""


@cache
def contract_data() -> ContractData:
    """What was read of TensorRT-LLM."""
    return read_json(Path(__file__).parent / "generations.json", ContractData, ConfigError, what="the contract")


RELEASES = tuple(release.version for release in contract_data().releases)
"""Of which something was read, the newest last."""


class PackageReading(msgspec.Struct, frozen=True):
    """What the files of a TensorRT-LLM say."""

    version: str
    uses: frozenset[str]
    """Of the drafter, by worker, loader and weight mapper."""
    generation: WorkerVersion
    """That it is, or is nearest to."""
    differences: tuple[str, ...]
    """To that generation, each in one line."""


def import_tensorrt_llm(asked_by: str) -> Any:
    """The package; MissingDependencyError, in the name of `asked_by`, where it cannot be imported."""
    try:
        return import_module(PACKAGE)
    except ImportError as problem:
        raise _missing(asked_by, str(problem)) from None


def check_contract() -> WorkerVersion:
    """The installed worker's generation, from its files.

    Raises MissingDependencyError without TensorRT-LLM, EngineError with every difference to what was read.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise _missing("engine mode", f"No module named {PACKAGE!r}")
    package = read_package(Path(next(iter(spec.submodule_search_locations))))
    unknown = (
        () if package.version in RELEASES else (f"version: expected {' or '.join(RELEASES)}, found {package.version}",)
    )
    if differences := (*unknown, *package.differences):
        listed = "".join(f"\n  - {difference}" for difference in differences)
        others = [version for version in RELEASES if version != package.version]
        raise EngineError(
            f"engine mode: expected a TensorRT-LLM that it was written for, found {package.version}, which differs from"
            f" the worker of {package.generation.commit[:12]} ({package.generation.description}):{listed}",
            hint=f"serve in native mode, or install tensorrt_llm {' or '.join(others)}",
        )
    return package.generation


def read_package(directory: Path) -> PackageReading:
    """What the package in `directory`, installed or of a checkout, does with a drafter, and how that differs.

    Nothing of it is imported. Raises EngineError for a file that is not Python.
    """
    source = PackageSource(directory)
    uses = _drafter_uses(source)
    candidates = contract_data().generations
    marked = [g for g in candidates if any(_covers(mark, use) for mark in g.marks for use in uses)] or candidates[:1]
    by_generation = {g.commit: tuple(differences(source, uses, g)) for g in marked}
    nearest = min(reversed(marked), key=lambda g: len(by_generation[g.commit]))
    return PackageReading(_version(source), uses, nearest, by_generation[nearest.commit])


def differences(source: PackageSource, uses: frozenset[str], generation: WorkerVersion) -> Iterator[str]:
    """Each in one line: what is missing, what has other parameters, what is newly asked of a drafter."""
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
            yield f"the drafter: expected nothing that ours was not written for, found {use}"
    for name in data.called:
        if not any(use.startswith(f"{name}(") for use in uses):
            yield f"the drafter: expected a call of {name}, found none"


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
    """Parameters of the function that TensorRT-LLM itself registers for DFlash, in whichever of its model files."""
    for file in sorted(source.directory.joinpath("_torch", "models").glob("*.py")):
        if b"register_draft_model(" not in read_bytes(file, EngineError, limit=MAX_SOURCE_BYTES):
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


def _version(source: PackageSource) -> str:
    statement = source.find(f"{PACKAGE}.version", "__version__")
    value = statement.value if isinstance(statement, ast.Assign) else None
    return str(value.value) if isinstance(value, ast.Constant) else "none"


def _missing(asked_by: str, problem: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"{asked_by}: expected {PACKAGE}, found: {problem}",
        # As NVIDIA's installation guide of 1.3.0rc24 has it.
        hint="in an environment of its own: pip install 'dflash-trt[trtllm]'",
    )

# SPDX-License-Identifier: Apache-2.0
"""Every use of the drafter in a TensorRT-LLM, read from its files, against those that our drafter implements.

`generations.json` has what was read in NVIDIA/TensorRT-LLM, below tensorrt_llm/_torch: speculative/dflash.py at the
commits of its generations (864a4300, a branch's, by name only) and at 00679c66c3e3, which is like 414ba69f without FA4,
speculative/interface.py (SpecWorkerBase) at 00b6d5a25c30, models/modeling_dflash.py at 009d8fa431bd,
models/checkpoints/base_weight_mapper.py at 0c8de69a1ca6, models/modeling_utils.py and models/modeling_speculative.py
of the same months. No release's wheel has been read.
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
from tests.contract.drafter_uses import FUNCTIONS, DrafterUses, PackageSource, parameters

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
    """Uses of the drafter by group: all of our drafters implement `ours`, that of a DFlash2 draft also `dflash2`,
    that of a LiLiCorr draft `lilicorr`, and none the others, which workers only reach with drafters of other kinds."""
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
    """Whether `use` is `known`, a part of it, or, if `known` ends with a star, anything below it."""
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

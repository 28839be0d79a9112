# SPDX-License-Identifier: Apache-2.0
"""`make contract TENSORRT_LLM=DIR`: what a TensorRT-LLM says of all that we write and refuse, and of our drafter.

DIR is a checkout of NVIDIA/TensorRT-LLM or an installed package; neither CUDA nor its compiled bindings are needed.
Prints what its worker, loader and weight mapper do with a drafter that ours was not written for, every shipped
configuration that its pydantic classes refuse, the keys that the release and our schema do not share, and the
deliberately broken configurations on which its verdict and the linter's differ. Exits with 1 for the first two kinds.
A DIR of single files is enough: those that are missing are named with what is not compared then, which also exits
with 1.

Its modules are imported one by one, and what they miss is replaced by names without sense: pydantic classes need only
the types of their own fields. Packages' `__init__` files do not run; a module that raises becomes such a name itself,
and is listed.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import METHODS, load_deployment, shipped_deployments
from dflash_trt.deploy.finding import ERROR
from dflash_trt.deploy.real_classes import check_trtllm
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Schema, load_schema, versions
from dflash_trt.deploy.trtllm_arguments import trtllm_arguments
from dflash_trt.errors import ConfigError
from tests.contract.drafter_contract import missing_files, read_package, target_specific
from tests.deploy.broken.cases import CASES, changed
from tests.deploy.deployments import resolved


class _Name(type):
    """Every public attribute of such a class is one more of its kind."""

    __members__: ClassVar[dict[str, Any]] = {}  # an enum without members

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
        self.absent: set[str] = set()
        """Modules of the package that were asked for and have neither a file nor a directory, by name."""
        self.replaced: dict[str, str] = {}
        """Why a module was replaced, by name."""

    def is_of(self, name: str) -> bool:
        """Whether the module `name` is found here."""
        return name.partition(".")[0] in {self._root, *self._missing}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not self.is_of(name):
            return None
        return ModuleSpec(name, self, is_package=not self._file(name).is_file())

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name, file = module.__name__, self._file(module.__name__)
        if not file.is_file():  # a package, compiled bindings, or a package that is not installed
            if name.startswith(f"{self._root}.") and not file.with_suffix("").is_dir():
                self.absent.add(name)
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


@contextmanager
def imported_bare(package: Path, module: str) -> Iterator[tuple[Any, BareImport]]:
    """`module` of the package in the directory `package`, and what was replaced on the way; afterwards all is gone."""
    before = dict(sys.modules)
    if find_spec("strenum") is None:  # in Python since 3.11; fields are checked against it
        sys.modules["strenum"] = enum
    finder = BareImport(package, module)
    sys.meta_path.insert(0, finder)
    try:
        yield import_module(module), finder
    finally:
        sys.meta_path.remove(finder)
        for name in sys.modules.keys() - before.keys():
            if name == "strenum" or finder.is_of(name):
                del sys.modules[name]


USAGE = """\
expected the directory of a TensorRT-LLM, found none
  git clone --depth 1 --branch v1.4.0rc1 https://github.com/NVIDIA/TensorRT-LLM DIR   (GIT_LFS_SKIP_SMUDGE=1 is enough)
  make contract TENSORRT_LLM=DIR"""
ARGUMENTS = "tensorrt_llm.llmapi.llm_args"
ARGUMENTS_FILE, WORKER_FILE = "llmapi/llm_args.py", "_torch/speculative/dflash.py"
# Rules that repeat what the classes check; the others know models and GPUs, of which the classes know nothing.
OF_THE_CLASSES = {
    "unknown-key", "wrong-type", "out-of-range", "unknown-value", "missing-key", "disk-cache", "cuda-graphs",
    "draft-schedule",
}  # fmt: skip


def main(directory: str | None) -> int:
    """Prints the differences; 1 where engine mode would stop, a configuration is refused, or files are missing."""
    package = None if not directory else find_package(Path(directory))
    if package is None:
        print(USAGE if not directory else USAGE.replace("none", f"no {ARGUMENTS} in {directory}"), file=sys.stderr)
        return 2
    release = release_of(package)
    schema = load_schema("trtllm", release if release in versions("trtllm") else None)
    print(f"TensorRT-LLM {release} in {package}, compared with the schema of {schema.version}")
    missing = missing_files(package)
    has_arguments = (package / ARGUMENTS_FILE).is_file()
    if not has_arguments:
        missing.append(f"{package.name}/{ARGUMENTS_FILE}: the arguments that serve-config writes")
    _print("files that are needed and not here", missing)
    differences: tuple[str, ...] = ()
    if (package / WORKER_FILE).is_file():
        engine = read_package(package)
        differences = engine.differences
        _print(f"engine mode, with the worker of {engine.generation.commit[:12]}: differences", list(differences))
    _print("targets with a worker or drafter of their own, which engine mode does not serve", target_specific(package))
    refused = check_arguments(package, schema) if has_arguments else []
    return 1 if refused or differences or missing else 0


def check_arguments(package: Path, schema: Schema) -> list[str]:
    """Prints what its classes say of configurations and keys; the configurations that they refuse."""
    with imported_bare(package, ARGUMENTS) as (module, finder):
        _print(
            "modules that could not be imported here and were replaced",
            [f"{k}: {v}" for k, v in finder.replaced.items()],
        )
        _print("modules that are not here, compiled ones among them, and were replaced", sorted(finder.absent))
        written = dict(configurations())
        refused = [f"{name}: {line}" for name, document in written.items() for line in refusals(module, document)]
        _print(f"of {len(written)} written configurations, refused", refused)
        _print("keys that are not the same", list(differing_keys(module, schema)))
        _print(f"of {len(CASES)} broken configurations, judged differently", list(differing_verdicts(module, schema)))
        return refused


def find_package(directory: Path) -> Path | None:
    """The directory of the package in a checkout, in site-packages, or `directory` itself."""
    candidates = (directory, directory / "tensorrt_llm")
    files = (ARGUMENTS_FILE, WORKER_FILE)
    return next((path.resolve() for path in candidates if any((path / file).is_file() for file in files)), None)


def release_of(package: Path) -> str:
    """Release in the package's version.py."""
    file = package / "version.py"
    found = re.search(r'__version__\s*=\s*"([^"]+)"', file.read_text()) if file.is_file() else None
    return found[1] if found else "of an unknown release"


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that serve-config can write for TensorRT-LLM."""
    for name, file in shipped_deployments().items():
        deployment = resolve(load_deployment(file), name)
        for method in METHODS if "trtllm" in deployment.runtimes else ():
            with suppress(ConfigError):  # no EAGLE-3 drafter, or no MTP layers
                yield f"{name} --method {method}", trtllm_arguments(deployment, method)


def refusals(module: Any, document: dict[str, Any]) -> list[str]:
    """Errors of TorchLlmArgs for a document."""
    return [f"{finding.key}: {finding.problem}" for finding in check_trtllm(module.TorchLlmArgs, document)]


def differing_keys(module: Any, schema: Schema) -> Iterator[str]:
    """Keys of one side, class by class."""
    for name in schema.json["$defs"]:
        real = getattr(module, name, None)
        if real is None:
            yield f"{name}: not in the release"
            continue
        keys = {key for key in real.model_fields if not key.startswith("_")}
        ours = set(schema.properties(name))
        yield from (f"{name}.{key}: only in the release" for key in sorted(keys - ours))
        yield from (f"{name}.{key}: only in our schema" for key in sorted(ours - keys))


def differing_verdicts(module: Any, schema: Schema) -> Iterator[str]:
    """The linter and the classes on each broken configuration."""
    deployment = resolved("gpt-oss-120b.h200x8.latency")
    for name, case in CASES.items():
        if case.runtime != "trtllm":
            continue
        document = changed("trtllm", case.change)
        said = refusals(module, document)
        found = check(deployment_config(deployment, schema, document))
        ours = [str(f) for f in found if f.severity == ERROR and f.rule in OF_THE_CLASSES]
        if said and not ours:
            yield f"{name}: the linter passes it, the release says {said[0]}"
        elif ours and not said:
            yield f"{name}: the release takes it, the linter says {ours[0]}"


def _print(title: str, lines: list[str]) -> None:
    print(f"{title}: {len(lines) or 'none'}")
    for line in lines:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else None))

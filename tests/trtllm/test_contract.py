# SPDX-License-Identifier: Apache-2.0
"""Engine mode refuses a TensorRT-LLM that is not the one it was written for, with everything that differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_trt.deploy.schema import versions
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.trtllm.contract import GENERATIONS, RELEASES, check_contract
from dflash_trt.trtllm.registration import build_draft_model, register
from dflash_trt.trtllm.start import ENGINE_MODULES
from tests.trtllm.fake_package import FILES, NEWER_WORKER, write_package

INTERFACE, UTILS = "_torch/speculative/interface.py", "_torch/models/modeling_utils.py"
DRAFTER, WORKER = "_torch/models/modeling_dflash.py", "_torch/speculative/dflash.py"
LOADER, MAPPER = "_torch/models/modeling_speculative.py", "_torch/models/checkpoints/base_weight_mapper.py"
OLD_INPUTS = FILES[WORKER][FILES[WORKER].index("\n        spec_metadata, draft_model, total_target_tokens=0") :]
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes the package importable, with edits."""

    def make(edits: dict[str, tuple[str, str]] | None = None) -> None:
        monkeypatch.syspath_prepend(write_package(tmp_path, edits))

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorrt_llm", "dflash_trt_engine")]:
        del sys.modules[name]


def builder() -> object:
    mode = import_module("tensorrt_llm._torch.speculative.interface").SpeculativeDecodingMode.DFLASH
    return import_module("tensorrt_llm._torch.models.modeling_utils").get_registered_draft_model_builder(mode)


def test_it_is_known_to_the_releases_that_a_schema_describes() -> None:
    assert list(RELEASES) == versions("trtllm")


def test_without_the_package() -> None:
    with pytest.raises(MissingDependencyError, match="expected tensorrt_llm, found") as refused:
        register()
    assert refused.value.hint is not None
    assert f"pip install tensorrt_llm=={RELEASES[-1]}" in refused.value.hint


def test_the_known_package_gets_our_builder(install: Install) -> None:
    install()
    assert check_contract().commit == "414ba69f42c2"
    assert builder() is not build_draft_model
    register()
    assert builder() is build_draft_model
    register()  # a second import of the module is harmless


def test_the_directory_for_custom_module_dirs(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM imports it by its name after putting its parent first on sys.path (tools/importlib_utils.py)."""
    install()
    parent = ENGINE_MODULES.parent
    assert [path.name for path in parent.iterdir() if path.name != "__pycache__"] == [ENGINE_MODULES.name]
    monkeypatch.syspath_prepend(parent)
    import_module(ENGINE_MODULES.name)
    assert builder() is build_draft_model


def test_the_newer_worker_is_known_by_its_name(install: Install) -> None:
    install({WORKER: (OLD_INPUTS, NEWER_WORKER)})
    assert check_contract() is GENERATIONS[-1]
    assert register() is GENERATIONS[-1]
    assert builder() is build_draft_model


def test_what_differs_is_told_of_the_generation_that_was_found(install: Install) -> None:
    install({WORKER: (OLD_INPUTS, NEWER_WORKER.replace("_k_norm_eps", "_k_norm_bias"))})
    with pytest.raises(EngineError) as refused:
        register()
    first, *rest = refused.value.message.splitlines()
    assert "with the worker of 864a4300 (prep and ctx_rows_start (kernels of one target" in first
    assert [line.partition("draft_model.")[2] for line in rest] == ["_k_norm_bias, which our drafter lacks, found one"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("__init__.py", "1.4.0rc1", "1.5.0", "version: expected 1.3.0rc27 or 1.4.0rc1, found 1.5.0"),
        ("__init__.py", "__version__", "release", "version: expected 1.3.0rc27 or 1.4.0rc1, found none"),
        (INTERFACE, "DFLASH", "DFLASH2", "SpeculativeDecodingMode.DFLASH: expected it, found none"),
        (UTILS, "def register_draft_model", "def renamed", "register_draft_model: expected (mode), found none"),
        (DRAFTER, "(self, projected_hidden, positions)", "(self, hidden, positions)",
         "precompute_context_kv: expected (self, projected_hidden, positions), found (self, hidden, positions)"),
        (DRAFTER, "ctx_page_table=None,", "ctx_page_table=None, ctx_rows_start=None,",
         "ctx_page_table, ctx_rows_start)"),
        (DRAFTER, "lm_head, model", "lm_head", "the builder of DFlash drafters: expected (model_config, draft_config,"),
        (WORKER, "draft_model.draft_model_full", "draft_model.rope", "no use of draft_model.rope, which our"),
        (WORKER, '"fc"', '"fc2"', "no use of draft_model.fc2, which our drafter lacks"),
        (WORKER, "class DFlashWorker", "class Worker", "DFlashWorker: expected it, found none"),
        (WORKER, "total_target_tokens=0,", "total_target_tokens=0, tree=None,",
         "total_target_tokens), found (self, input_ids, position_ids, hidden_states"),
        (INTERFACE, '"model"', '"rope"', "SpecWorkerBase: expected no use of draft_model.rope, which our"),
        (INTERFACE, "def set_draft_model(self, draft_model)", "def set_draft_model(self, model, draft_model)",
         "SpecWorkerBase.set_draft_model: expected (self, draft_model), found (self, model, draft_model)"),
        (LOADER, "weight_mapper=None", "mapper=None", "load_draft_weights: expected (self, weights, weight_mapper)"),
        (MAPPER, "model.model_config", "model.quant_config", "no use of model.quant_config, which our drafter lacks"),
    ],
)  # fmt: skip
def test_a_difference_is_named(install: Install, file: str, old: str, new: str, message: str) -> None:
    edits = {file: (old, new)}
    if old == "def register_draft_model":
        edits[DRAFTER] = ("import register_draft_model", "import renamed as register_draft_model")
    if old == "DFLASH":
        edits[DRAFTER] = ("SpeculativeDecodingMode.DFLASH", "SpeculativeDecodingMode.DFLASH2")
    install(edits)
    with pytest.raises(EngineError) as refused:
        register()
    assert f"{message}" in refused.value.message
    assert "in native mode" in str(refused.value.hint)
    if file != DRAFTER and old not in ("DFLASH", "def register_draft_model"):
        assert builder() is not build_draft_model


def test_all_differences_are_listed(install: Install) -> None:
    install({"__init__.py": ("1.4.0rc1", "2.0"), WORKER: ("class DFlashWorker", "class Worker")})
    with pytest.raises(EngineError) as refused:
        register()
    assert len(refused.value.message.splitlines()) == 1 + 1 + 4  # the version, three methods and the class


@pytest.mark.parametrize("backend", ["TRTLLM", "FA4"])
def test_a_paged_cache_is_refused(backend: str) -> None:
    spec_config = SimpleNamespace(attention_backend=backend, speculative_model="engine")
    with pytest.raises(EngineError, match=f"expected VANILLA.*found {backend}"):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)


def test_a_directory_that_is_no_engine(tmp_path: Path) -> None:
    spec_config = SimpleNamespace(attention_backend="VANILLA", speculative_model=str(tmp_path))
    with pytest.raises(EngineError, match=str(tmp_path)):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)

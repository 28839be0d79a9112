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
from dflash_trt.trtllm.contract import RELEASES, check_contract, contract_data, read_package
from dflash_trt.trtllm.registration import build_draft_model, register
from tests.trtllm.fake_package import GENERATIONS, write_package

INTERFACE, UTILS = "_torch/speculative/interface.py", "_torch/models/modeling_utils.py"
DRAFTER, WORKER = "_torch/models/modeling_dflash.py", "_torch/speculative/dflash.py"
LOADER, MAPPER = "_torch/models/modeling_speculative.py", "_torch/models/checkpoints/base_weight_mapper.py"
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes the package importable, with edits."""

    def make(edits: dict[str, tuple[str, str]] | None = None, generation: str = "8d62b3e5") -> None:
        lists = {file: (edit,) for file, edit in (edits or {}).items()}
        monkeypatch.syspath_prepend(write_package(tmp_path, lists, generation))

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def builder() -> object:
    mode = import_module("tensorrt_llm._torch.speculative.interface").SpeculativeDecodingMode.DFLASH
    return import_module("tensorrt_llm._torch.models.modeling_utils").get_registered_draft_model_builder(mode)


def test_it_is_known_to_the_releases_that_a_schema_describes() -> None:
    """1.3.0rc29's arguments are those of 1.4.0rc1's schema."""
    assert [release for release in RELEASES if release != "1.3.0rc29"] == versions("trtllm")


def test_without_the_package() -> None:
    with pytest.raises(MissingDependencyError, match="expected tensorrt_llm, found") as refused:
        register()
    assert refused.value.hint is not None
    assert "pip install 'dflash-trt[trtllm]'" in refused.value.hint


def test_the_known_package_gets_our_builder(install: Install) -> None:
    install()
    assert check_contract().commit.startswith("8d62b3e5")
    assert builder() is not build_draft_model
    register()
    assert builder() is build_draft_model
    register()  # a second import of the module is harmless


@pytest.mark.parametrize("commit", GENERATIONS)
def test_each_generation_has_the_uses_that_were_read_of_it(install: Install, tmp_path: Path, commit: str) -> None:
    """The golden result is generations.json; the package here has each use that was read, and no other."""
    install(generation=commit)
    generation = check_contract()
    assert generation.commit.startswith(commit)
    assert register() is generation
    assert builder() is build_draft_model
    found = read_package(tmp_path / "tensorrt_llm").uses
    below = [use for use in generation.known if any(other.startswith(f"{use}.") for other in generation.known)]
    never = {use for use in generation.known - found if use not in below and not use.endswith(".*")}
    # Kimi-K3's line passes one keyword more to the same call; the dtype that only 8d62b3e5 asks for is harmless.
    expected = {"8d62b3e5": 0, "414ba69f": 1, "864a4300": 2}
    assert len(never) == expected[commit], never


def test_nothing_is_imported(tmp_path: Path) -> None:
    package = write_package(tmp_path) / "tensorrt_llm"
    (package / "__init__.py").write_text("raise RuntimeError('no CUDA')\n")
    assert read_package(package).differences == ()
    assert "tensorrt_llm" not in sys.modules


def test_a_release_is_named_for_what_its_page_or_files_show() -> None:
    """1.3.0rc29's worker was not read: whichever generation its files are, they are checked."""
    releases = {release.version: release for release in contract_data().releases}
    commits = {generation.commit for generation in contract_data().generations}
    assert releases["1.3.0rc29"].generation is None
    assert {release.generation for release in releases.values()} - {None} < commits
    assert all("release page" in release.known_by for release in releases.values() if release.generation)


def test_the_hint_does_not_name_the_release_that_is_there(install: Install) -> None:
    install({WORKER: ("draft_model.draft_model_full", "draft_model.whole")})
    with pytest.raises(
        EngineError, match=r"found 1\.4\.0rc1, which differs from the worker of 8d62b3e5f164"
    ) as refused:
        register()
    assert refused.value.hint == "serve in native mode, or install tensorrt_llm 1.3.0rc27 or 1.3.0rc29"


def test_what_differs_is_told_of_the_generation_that_was_found(install: Install) -> None:
    install({WORKER: ("_k_norm_eps", "_k_norm_bias")}, "864a4300")
    with pytest.raises(EngineError) as refused:
        register()
    first, *rest = refused.value.message.splitlines()
    assert "from the worker of 864a4300 (Kimi-K3's line: its fused kernels" in first
    assert [line.partition("written for, ")[2] for line in rest] == ["found _k_norm_bias"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("version.py", "1.4.0rc1", "1.5.0", "version: expected 1.3.0rc27 or 1.3.0rc29 or 1.4.0rc1, found 1.5.0"),
        ("version.py", "__version__", "release", "version: expected 1.3.0rc27 or 1.3.0rc29 or 1.4.0rc1, found none"),
        (INTERFACE, "DFLASH", "DFLASH2", "SpeculativeDecodingMode.DFLASH: expected it, found none"),
        (UTILS, "def register_draft_model", "def renamed", "register_draft_model: expected (mode), found none"),
        (DRAFTER, "(self, projected_hidden, positions)", "(self, positions, projected_hidden)",
         "precompute_context_kv: expected (self, projected_hidden, positions), found (self, positions, projected"),
        (DRAFTER, "ctx_page_table=None,", "ctx_page_table=None, ctx_rows_start=None,",
         "ctx_page_table, ctx_rows_start)"),
        (DRAFTER, "lm_head, model", "lm_head", "the builder of DFlash drafters: expected (model_config, draft_config,"),
        # Hooks renamed and new ones: in the class, a helper beside it, a base class, by a name made at run time.
        (WORKER, "draft_model._build_fused_kv_buffers()", "draft_model._fuse()", "a call of _build_fused_kv_buffers,"),
        (WORKER, "draft_model.project_target_hidden(spec_metadata)", "draft_model.project(spec_metadata)",
         "found project(1)"),
        (WORKER, "draft_model.draft_model_full", "draft_model.rope", "found rope.model.embed_tokens"),
        (WORKER, '"fc", None', '"fc2", None', "found fc2.weight.dtype"),
        (WORKER, "projection.weight.dtype", "projection.weight_scale.dtype", "found fc.weight_scale.dtype"),
        (WORKER, "selector.top_k", "selector.beam", "found candidate_selector.beam"),
        (WORKER, 'getattr(draft_model, "config", None)', "getattr(draft_model, self.name, None)", "a name computed at"),
        (WORKER, "self.block = ", "self.drafter = draft_model\n        self.block = ", "found kept as self.drafter"),
        (WORKER, "self._validate(draft_model)", "validate_elsewhere(draft_model)", "passed to validate_elsewhere"),
        (WORKER, "ctx_page_table=inputs[7]", "page_table=inputs[7]", "ctx_kv_cache=, page_table=)"),
        (WORKER, "project_target_hidden(hidden_states)", "project_target_hidden(hidden_states, 1)",
         "found project_target_hidden(2)"),
        (WORKER, "class DFlashWorker", "class Worker", "DFlashWorker: expected it, found none"),
        (WORKER, "total_target_tokens=0,", "total_target_tokens=0, tree=None,",
         "total_target_tokens), found (self, input_ids, position_ids, hidden_states"),
        (INTERFACE, '"d2t"', '"t2d"', "found model.t2d"),
        (INTERFACE, "def set_draft_model(self, draft_model)", "def set_draft_model(self, model, draft_model)",
         "SpecWorkerBase.set_draft_model: expected (self, draft_model), found (self, model, draft_model)"),
        (LOADER, "weight_mapper=None", "mapper=None", "load_draft_weights: expected (self, weights, weight_mapper)"),
        (LOADER, "self.draft_model.logits_processor", "self.draft_model.processor", "found processor"),
        (MAPPER, "model.model_config", "model.quant_config", "found quant_config.mapping.enable_attention_dp"),
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
    install({"version.py": ("1.4.0rc1", "2.0"), WORKER: ("class DFlashWorker", "class Worker")})
    with pytest.raises(EngineError) as refused:
        register()
    # The version, three methods, the class, and five calls that then nobody makes: the loader is still there.
    assert len(refused.value.message.splitlines()) == 1 + 1 + 3 + 1 + 5


def test_a_file_that_is_not_python(install: Install) -> None:
    install({WORKER: ("class DFlashWorker", "class DFlashWorker)")})
    with pytest.raises(EngineError, match=r"dflash\.py: expected a Python module, found: unmatched"):
        register()


def test_a_backend_whose_cache_is_not_read() -> None:
    spec_config = SimpleNamespace(attention_backend="FA4", speculative_model="engine")
    with pytest.raises(EngineError, match="expected VANILLA or TRTLLM or AUTO for engine mode, found FA4"):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)


def test_a_directory_that_is_no_engine(tmp_path: Path) -> None:
    spec_config = SimpleNamespace(attention_backend="VANILLA", speculative_model=str(tmp_path))
    with pytest.raises(EngineError, match=str(tmp_path)):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)

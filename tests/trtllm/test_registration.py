# SPDX-License-Identifier: Apache-2.0
"""Engine mode refuses a TensorRT-LLM that it was not written for, and one that drafts without our drafter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy.schema import versions
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.trtllm.contract import RELEASES, check_contract
from dflash_trt.trtllm.registration import build_draft_model, register
from tests.contract.drafter_contract import contract_data, read_package
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


def builder() -> Any:
    mode = import_module("tensorrt_llm._torch.speculative.interface").SpeculativeDecodingMode.DFLASH
    return import_module("tensorrt_llm._torch.models.modeling_utils").get_registered_draft_model_builder(mode)


def test_its_releases_are_those_that_were_read() -> None:
    """1.3.0rc29's arguments are those of 1.4.0rc1's schema; its worker was not read, so any generation will do."""
    assert [release for release in RELEASES if release != "1.3.0rc29"] == versions("trtllm")
    releases = {release.version: release for release in contract_data().releases}
    assert tuple(releases) == RELEASES
    assert releases["1.3.0rc29"].generation is None
    assert {release.generation for release in releases.values()} - {None} < {
        g.commit for g in contract_data().generations
    }


def test_without_the_package() -> None:
    with pytest.raises(MissingDependencyError, match="expected tensorrt_llm, found") as refused:
        register()
    assert "pip install 'dflash-trt[trtllm]'" in str(refused.value.hint)


def test_the_known_package_gets_our_builder(install: Install) -> None:
    install()
    assert check_contract() == "1.4.0rc1"
    assert builder() is not build_draft_model
    register()
    step = import_module("tensorrt_llm._torch.speculative.dflash").DFlashWorker._forward_impl
    assert builder() is build_draft_model
    register()  # a second import of the module is harmless
    assert import_module("tensorrt_llm._torch.speculative.dflash").DFlashWorker._forward_impl is step


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("version.py", "1.4.0rc1", "1.5.0", "version: expected 1.3.0rc27 or 1.3.0rc29 or 1.4.0rc1, found 1.5.0"),
        ("__init__.py", "__version__", "__name__", "version: expected 1.3.0rc27 or 1.3.0rc29 or 1.4.0rc1, found none"),
        (UTILS, "def register_draft_model(mode)", "def register_draft_model(mode, name=None)",
         "register_draft_model: expected (mode), found (mode, name)"),
        (UTILS, "def get_registered_draft_model_builder", "def get_builder",
         "get_registered_draft_model_builder: expected (mode), found none"),
        (DRAFTER, "ctx_page_table=None,", "ctx_page_table=None, rows_start=None,", "ctx_page_table, rows_start)"),
        (WORKER, "spec_metadata, draft_model,\n        resource", "metadata, draft_model,\n        resource",
         "DFlashWorker._forward_impl: expected (self, attn_metadata, spec_metadata, draft_model, ...), found"),
        (WORKER, "class DFlashWorker", "class Worker", "_forward_impl: expected (self, attn_metadata"),
    ],
)  # fmt: skip
def test_a_difference_is_refused(install: Install, file: str, old: str, new: str, message: str) -> None:
    install({file: (old, new)})
    with pytest.raises(EngineError) as refused:
        register()
    assert message in refused.value.message
    assert str(refused.value.hint).startswith("serve in native mode, or install tensorrt_llm 1.3.0rc27 or 1.3.0rc29")


def test_all_differences_are_listed(install: Install) -> None:
    install({"version.py": ("1.4.0rc1", "2.0"), WORKER: ("class DFlashWorker", "class Worker")})
    with pytest.raises(EngineError) as refused:
        register()
    assert len(refused.value.message.splitlines()) == 1 + 2


class Drafter:
    """What a step of the fake worker calls; ours notes that it has drafted."""

    lm_head = lilicorr = None

    def __init__(self, *, is_ours: bool) -> None:
        self.is_ours = is_ours

    def dflash_forward(self, **_: Any) -> None:
        if self.is_ours:
            self.has_drafted = True

    def logits_processor(self, *_: Any) -> str:
        return "logits"


def step(drafter: Drafter, *, num_contexts: int, draft_len: int = 7) -> Any:
    """One call of the worker, two requests."""
    worker = import_module("tensorrt_llm._torch.speculative.dflash").DFlashWorker()
    worker._accept_stats = SimpleNamespace(record_draft_confidence=lambda *_: None)
    metadata = SimpleNamespace(num_seqs=2, num_contexts=num_contexts)
    spec_metadata = SimpleNamespace(runtime_draft_len=draft_len)
    return worker._forward_impl(
        None, None, [None] * 9, None, attn_metadata=metadata, spec_metadata=spec_metadata, draft_model=drafter
    )


def test_a_target_that_builds_its_own_drafter_is_refused_in_the_first_drafted_step(install: Install) -> None:
    """Kimi-K3's `_build_draft_model` does so; steps that do not draft prove nothing."""
    install()
    register()
    own, ours = Drafter(is_ours=False), Drafter(is_ours=True)
    assert step(own, num_contexts=2) is None
    step(own, num_contexts=0, draft_len=0)
    assert step(ours, num_contexts=1) == "logits"
    with pytest.raises(
        EngineError, match=rf"found that TensorRT-LLM drafts with {__name__}\.Drafter: this target"
    ) as said:
        step(own, num_contexts=1)
    assert "mode: native" in str(said.value.hint)


@pytest.mark.parametrize("commit", GENERATIONS)
def test_each_generation_has_the_uses_that_were_read_of_it(install: Install, tmp_path: Path, commit: str) -> None:
    """The golden result is generations.json; the package here has each use that was read, and no other."""
    install(generation=commit)
    reading = read_package(tmp_path / "tensorrt_llm")
    assert reading.generation.commit.startswith(commit)
    assert reading.differences == ()
    known = reading.generation.known
    below = [use for use in known if any(other.startswith(f"{use}.") for other in known)]
    never = {use for use in known - reading.uses if use not in below and not use.endswith(".*")}
    # Kimi-K3's line passes one keyword more to the same call; the dtype that only 8d62b3e5 asks for is harmless.
    assert len(never) == {"8d62b3e5": 0, "414ba69f": 1, "864a4300": 2}[commit], never
    assert "tensorrt_llm" not in sys.modules


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (INTERFACE, "DFLASH", "DFLASH2", "SpeculativeDecodingMode.DFLASH: expected it, found none"),
        (DRAFTER, "lm_head, model", "lm_head", "the builder of DFlash drafters: expected (model_config, draft_config,"),
        # Hooks renamed and new ones: in the class, a helper beside it, a base class, by a name made at run time.
        (WORKER, "draft_model._build_fused_kv_buffers()", "draft_model._fuse()", "never calls _build_fused_kv_buffers"),
        (WORKER, '"fc", None', '"fc2", None', "uses fc2.weight.dtype"),
        (WORKER, 'getattr(draft_model, "config", None)', "getattr(draft_model, self.name, None)", "a name computed at"),
        (WORKER, "self.block = ", "self.drafter = draft_model\n        self.block = ", "uses kept as self.drafter"),
        (WORKER, "self._validate(draft_model)", "validate_elsewhere(draft_model)", "passed to validate_elsewhere"),
        (WORKER, "ctx_page_table=inputs[7]", "page_table=inputs[7]", "ctx_kv_cache=, page_table=)"),
        (WORKER, "class DFlashWorker", "class Worker", "DFlashWorker: expected it, found none"),
        (WORKER, "total_target_tokens=0,", "total_target_tokens=0, tree=None,",
         "total_target_tokens), found (self, input_ids, position_ids, hidden_states"),
        (INTERFACE, '"d2t"', '"t2d"', "uses model.t2d"),
        (LOADER, "weight_mapper=None", "mapper=None", "load_draft_weights: expected (self, weights, weight_mapper)"),
        (MAPPER, "model.model_config", "model.quant_config", "uses quant_config.mapping.enable_attention_dp"),
    ],
)  # fmt: skip
def test_make_contract_names_a_difference(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    package = write_package(tmp_path, {file: ((old, new),)})
    assert any(message in difference for difference in read_package(package / "tensorrt_llm").differences)


def test_a_backend_whose_cache_is_not_read() -> None:
    spec_config = SimpleNamespace(attention_backend="FA4", speculative_model="engine")
    with pytest.raises(EngineError, match="expected VANILLA or TRTLLM or AUTO for engine mode, found FA4"):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)


def test_a_directory_that_is_no_engine(tmp_path: Path) -> None:
    spec_config = SimpleNamespace(attention_backend="VANILLA", speculative_model=str(tmp_path))
    with pytest.raises(EngineError, match=str(tmp_path)):
        build_draft_model(SimpleNamespace(spec_config=spec_config), None, None, None)

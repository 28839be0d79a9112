# SPDX-License-Identifier: Apache-2.0
"""Engine mode refuses a TensorRT-LLM that it was not written for; all MPI ranks have our drafter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dflash_trt.deploy.schema import versions
from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.trtllm.registration import MODULE, RELEASES, build_draft_model, check_contract, check_start, register
from tests.contract.drafter_contract import contract_data, read_package
from tests.engines import build
from tests.paths import FIXTURES, REPOSITORY
from tests.trtllm.fake_package import GENERATIONS, write_launcher, write_package, write_server
from tests.trtllm.pool_schedule import open_setup
from tests.trtllm.worker import model_config
from tests.waiting import PATIENCE

MPIEXEC = [f"{sys.prefix}/bin/mpiexec", "-n"]
SCRIPT = [sys.executable, "-m", "mpi4py", "-m"]
"""A rank that fails ends the others."""
OURS = "dflash_trt.trtllm.registration"


def run(command: list[str], path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def gathered(num_ranks: int, *arguments: str) -> list[Any]:
    """Output of the ranks of rank_script.py."""
    result = run([*MPIEXEC, str(num_ranks), *SCRIPT, "tests.trtllm.rank_script", *arguments])
    assert result.returncode == 0, result.stderr
    ranks: list[Any] = json.loads(result.stdout)
    assert len(ranks) == num_ranks
    assert all(rank == ranks[0] for rank in ranks)
    return ranks


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_all_ranks_propose_the_same_tokens(tmp_path: Path, num_ranks: int) -> None:
    target = FIXTURES / "tiny-gpt-oss"
    build(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "engine", target)
    for drafts, expected in gathered(num_ranks, "whole", str(tmp_path / "engine"), str(target))[0]:
        assert drafts == expected
        assert len(drafts) > 1


@pytest.mark.full
@pytest.mark.parametrize("how", ["pooled", "shared"])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_with_their_own_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, num_ranks: int) -> None:
    """Pages lie elsewhere on each; with all heads or their share, ranks propose what one with a dense cache does.

    Shares add up in BF16, which may turn a near-tie: of 140 proposals the two best logits of six are within 0.013.
    """
    open_setup(tmp_path / "engine", monkeypatch, *([num_ranks] if how == "shared" else []))
    drafts, expected = gathered(num_ranks, how, str(tmp_path / "engine"))[0]
    assert len(drafts) > 10
    pairs = list(zip(chain(*drafts), chain(*expected), strict=True))
    assert sum(ours != theirs for ours, theirs in pairs) <= (0.02 * len(pairs) if how == "shared" else 0)


@pytest.mark.parametrize("command", ["trtllm-serve", pytest.param("dynamo.trtllm", marks=pytest.mark.full)])
def test_spawned_ranks_register_the_drafter(tmp_path: Path, command: str) -> None:
    """mpi4py imports the main module into the ranks it spawns; with the console script alone they would not know us."""
    write_server(write_package(tmp_path))
    serve = [*ENGINE_MODE[1:], command, "MODEL", "--config", "FILE"]
    result = run([*MPIEXEC, "1", sys.executable, *serve], tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [OURS, OURS, OURS, command, "MODEL", "--config", "FILE"]


def test_a_python_file_runs_in_place(tmp_path: Path) -> None:
    """The ranks that it spawns have our drafter, and none of them runs the file again."""
    package = write_package(tmp_path)
    write_server(package)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "beside.py").write_text("from tensorrt_llm.commands import main\n")
    (tmp_path / "app" / "my app.py").write_text("from beside import main\n\nprint(__name__)\nmain()\n")
    command = [*ENGINE_MODE[1:], str(tmp_path / "app" / "my app.py"), "--flag"]
    result = run([*MPIEXEC, "1", sys.executable, *command], tmp_path)
    assert result.returncode == 0, result.stderr
    name, output = result.stdout.splitlines()
    assert name == "__main__"
    assert json.loads(output) == [OURS, OURS, OURS, str(tmp_path / "app" / "my app.py"), "--flag"]
    missing = run([sys.executable, *ENGINE_MODE[1:], "no.py"], tmp_path)
    assert (missing.returncode, missing.stderr.splitlines()[-1]) == (1, "error: no.py: No such file or directory")


@pytest.mark.full
def test_ranks_of_the_launcher_register_the_drafter(tmp_path: Path) -> None:
    """Two MPI ranks under trtllm-llmapi-launch: both have our drafter, and propose the same tokens with it."""
    target = FIXTURES / "tiny-gpt-oss"
    build(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "engine", target)
    launch = write_launcher(write_package(tmp_path))
    models = [str(tmp_path / "engine"), str(target)]
    serve = [sys.executable, *ENGINE_MODE[1:], "trtllm-serve", *models]
    result = run([*MPIEXEC, "2", "bash", str(launch), *serve], tmp_path)
    assert result.returncode == 0, result.stderr
    (first, drafts), (second, other_drafts) = json.loads(result.stdout)
    assert (first, second) == (OURS, OURS)
    assert drafts == other_drafts
    assert all(proposed == expected for proposed, expected in drafts)
    # With the console script in the place of our module both would have TensorRT-LLM's.
    script = "from tensorrt_llm.commands import main; main()"
    without = run([*MPIEXEC, "2", "bash", str(launch), sys.executable, "-c", script, *models], tmp_path)
    assert [name for name, _ in json.loads(without.stdout)] == ["tensorrt_llm._torch.models.modeling_dflash"] * 2


def test_a_launcher_that_sends_tasks_otherwise(tmp_path: Path) -> None:
    write_launcher(write_package(tmp_path))
    session = tmp_path / "tensorrt_llm" / "llmapi" / "mpi_session.py"
    session.write_text(session.read_text().replace("def submit(self, task,", "def submit(self, work,"))
    script = "from dflash_trt.trtllm.registration import register_in_remote_ranks as r; r()"
    refused = run([sys.executable, "-c", script], tmp_path)
    assert "submit: expected (self, task, *args, ...), found (self, work, args" in refused.stderr


def test_a_start_that_cannot_work(tmp_path: Path) -> None:
    without = run([sys.executable, *ENGINE_MODE[1:], "trtllm-serve"])
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr.startswith("error: engine mode: expected tensorrt_llm")
    unknown = run([sys.executable, *ENGINE_MODE[1:], "no-such-script"], write_package(tmp_path))
    assert unknown.returncode == 1
    said, usage = unknown.stderr.splitlines()
    assert said == "dflash-trt: drafter registered in TensorRT-LLM 1.4.0rc1"
    assert usage.startswith("usage: python -m dflash_trt.trtllm trtllm-serve|")


def test_a_main_module_that_ranks_would_not_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/dflash-trt", "generate", "a"])
    with pytest.raises(EngineError, match="registers the drafter in every rank") as refused:
        check_start()
    assert str(refused.value.hint).startswith(f"python -m {MODULE} dflash-trt ")
    main = ModuleType("__main__")
    main.__spec__ = type("Spec", (), {"name": f"{MODULE}.__main__"})()
    monkeypatch.setitem(sys.modules, "__main__", main)
    check_start()


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
    assert "pip install '.[trtllm]'" in str(refused.value.hint)


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
    """Called in a step of the fake worker; ours records that it has drafted."""

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


def test_what_the_builder_refuses(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="expected VANILLA or TRTLLM or AUTO for engine mode, found FA4"):
        build_draft_model(model_config(tmp_path, attention_backend="FA4"), None, None, None)
    with pytest.raises(EngineError, match=str(tmp_path)):
        build_draft_model(model_config(tmp_path), None, None, None)

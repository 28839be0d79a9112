# SPDX-License-Identifier: Apache-2.0
"""`make contract` on a package of a few lines that imports what it cannot have, as TensorRT-LLM does here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract.tensorrt_llm_arguments import main
from tests.trtllm.fake_package import WORKER, write_package

BROKEN = "raise RuntimeError('no CUDA')\n"
FILES = {
    "__init__": BROKEN,
    "version": '__version__ = "1.4.0rc1"\n',
    "llmapi/__init__": BROKEN,
    "mapping": BROKEN,
    "logger": "logger = print\n",
    "llmapi/utils": """
from pydantic import BaseModel, ConfigDict
from tensorrt_llm.logger import logger
class StrictBaseModel(BaseModel):
    model_config = ConfigDict(extra="forbid")
""",
    "llmapi/llm_args": """
from enum import Enum
from typing import Annotated, Literal, Optional, Union
import a_package_that_is_not_here.deep as missing
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator
from strenum import StrEnum
from tensorrt_llm.bindings.internal.batch_manager import LinearCacheType
from ..bindings.executor import KvCacheConfig as _KvCacheConfig, SchedulerConfig as _SchedulerConfig
from ..mapping import CpType, Mapping
from .utils import StrictBaseModel

def mirrors(bound):
    assert [name for name in dir(bound) if not name.startswith("_")] == [] and list(bound.__members__) == []
    return lambda cls: cls

class AdvancedSamplingMode(StrEnum):
    FULL = "full"
    NO_TOPK = "no_topk"

@mirrors(_KvCacheConfig)
class KvCacheConfig(StrictBaseModel):
    dtype: str = "auto"
    free_gpu_memory_fraction: Optional[float] = Field(default=0.9, ge=0, le=1)
    enable_block_reuse: bool = True
    use_kv_cache_manager_v2: bool | str = "auto"
    max_attention_window: Optional[list[PositiveInt]] = Field(default=None, min_length=1)

class DFlashDecodingConfig(StrictBaseModel):
    decoding_type: Literal["DFlash"] = "DFlash"
    speculative_model: Optional[str] = None
    max_draft_len: Optional[NonNegativeInt] = None
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = "VANILLA"
    target_layer_ids: Optional[list[int]] = None
    mask_token_id: Optional[int] = None
    enable_penalty: bool = False
    use_rejection_sampling: bool = False
    advanced_sampling_mode: AdvancedSamplingMode = AdvancedSamplingMode.FULL
    draft_len_schedule: Optional[dict[int, int]] = None
    acceptance_rate_window_size: Optional[int] = None
    acceptance_rate_threshold: Optional[float] = None
    a_new_key: int = 0

class MTPDecodingConfig(StrictBaseModel):
    decoding_type: Literal["MTP"] = "MTP"
    max_draft_len: PositiveInt
    enable_penalty: bool = False

class Eagle3DecodingConfig(StrictBaseModel):
    decoding_type: Literal["Eagle3"] = "Eagle3"
    speculative_model: str
    max_draft_len: PositiveInt
    enable_penalty: bool = False

class NGramDecodingConfig(StrictBaseModel):
    model_config = ConfigDict(extra="allow")
    decoding_type: Literal["NGram"] = "NGram"

Methods = Union[DFlashDecodingConfig, MTPDecodingConfig, Eagle3DecodingConfig, NGramDecodingConfig]
Speculative = Annotated[Methods, Field(discriminator="decoding_type")]

class TorchLlmArgs(StrictBaseModel):
    model: str
    trust_remote_code: bool = False
    scheduler: Optional[_SchedulerConfig] = None
    mapping: Mapping = None
    tensor_parallel_size: int = 1
    moe_expert_parallel_size: Optional[int] = None
    enable_attention_dp: bool = False
    attention_dp_config: Optional[dict] = None
    reasoning_parser: Optional[str] = None
    max_batch_size: Optional[int] = 2048
    max_num_tokens: Optional[int] = 8192
    max_seq_len: Optional[int] = None
    enable_chunked_prefill: bool = False
    stream_interval: PositiveInt = 1
    return_perf_metrics: bool = False
    num_postprocess_workers: int = 0
    cuda_graph_config: Optional[dict] = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    moe_config: Optional[dict] = None
    speculative_config: Optional[Speculative] = None

    @model_validator(mode="after")
    def check(self):
        if isinstance(self.speculative_config, DFlashDecodingConfig):
            assert self.speculative_config.max_draft_len > 0, "DFlash max_draft_len must be > 0"
        return self
""",
}
pytest.importorskip("pydantic", reason="the classes of TensorRT-LLM are pydantic's")


def package(directory: Path, **changes: str) -> Path:
    write_package(directory)
    for name, text in {**FILES, **changes}.items():
        file = directory / "tensorrt_llm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory


def section(output: str, title: str) -> list[str]:
    """The lines below a title."""
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if title in line)
    below = lines[start + 1 :]
    return below[: next((i for i, line in enumerate(below) if not line.startswith("  ")), len(below))]


TARGET = """
from tensorrt_llm._torch.speculative.dflash import DFlashWorker

class OneTargetsWorker(DFlashWorker):
    def _more(self, draft_model):
        return draft_model.mask_token_embedding, draft_model.a_kernel_of_its_own

class OneTarget:
    def _build_draft_model(self, draft_config):
        return None
"""


PLACE = "_torch/_experimental/modeling_v2/models/one/targets/one__sm_100__tp1/spec_worker"
WORKER_SECTION = "engine mode, with the worker of 8d62b3e5f164"


def test_everything_written_is_taken_and_differences_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers and drafters of single targets are no difference: only TRTLLM_MODELING_V2 selects them."""
    assert main(str(package(tmp_path, **{PLACE: TARGET}))) == 0
    said = capsys.readouterr().out
    assert "TensorRT-LLM 1.4.0rc1 in" in said
    assert section(said, "replaced") == ["  tensorrt_llm.mapping: RuntimeError: no CUDA"]
    assert section(said, "written configurations, refused") == []
    keys = section(said, "keys that are not the same")
    assert "  DFlashDecodingConfig.a_new_key: only in the release" in keys
    assert "  DFlashDecodingConfig.max_concurrency: only in our schema" in keys
    verdicts = section(said, "judged differently")
    # Neither the linter's null fraction nor its sampling mode in capitals: enums are real, and this model takes null.
    assert any(line.startswith("  no share of the memory: the release takes it") for line in verdicts)
    assert not any("a sampling mode in capitals" in line or "nothing drafted" in line for line in verdicts)
    assert not any("a word for a number" in line for line in verdicts)
    assert section(said, WORKER_SECTION) == []
    module = f"tensorrt_llm.{PLACE.replace('/', '.')}"
    assert section(said, "targets with a worker") == [
        f"  {module}.OneTargetsWorker: a worker that asks the drafter for a_kernel_of_its_own",
        f"  {module}._build_draft_model(self, draft_config): builds a drafter of its own",
    ]


def test_a_release_that_refuses_what_we_write_and_asks_the_drafter_for_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is found in the file: the package cannot be imported here."""
    arguments = FILES["llmapi/llm_args"].replace("    target_layer_ids: Optional[list[int]] = None\n", "")
    worker = package(tmp_path, **{"llmapi/llm_args": arguments}) / "tensorrt_llm" / WORKER
    worker.write_text(worker.read_text().replace("draft_model._num_heads", "draft_model.rope_table"))
    assert main(str(tmp_path)) == 1
    said = capsys.readouterr().out
    refused = section(said, "written configurations, refused")
    assert any("target_layer_ids: TorchLlmArgs says: Extra inputs are not permitted" in line for line in refused)
    differences = section(said, WORKER_SECTION)
    assert differences == ["  TensorRT-LLM uses rope_table of the drafter, which engine mode does not implement"]


def test_a_tree_of_single_files_is_judged_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = package(tmp_path / "whole") / "tensorrt_llm"
    single = tmp_path / "single" / "tensorrt_llm"
    for name in (WORKER, "_torch/speculative/interface.py", "_torch/models/modeling_speculative.py"):
        (single / name).parent.mkdir(parents=True, exist_ok=True)
        (single / name).write_text((whole / name).read_text())
    assert main(str(single.parent)) == 1
    said = capsys.readouterr().out
    missing = section(said, "files that are needed and not here")
    assert [line.split(":")[0].strip() for line in missing] == [
        "tensorrt_llm/_torch/models/modeling_utils.py", "tensorrt_llm/_torch/models/modeling_dflash.py",
        "tensorrt_llm/_torch/models/checkpoints/base_weight_mapper.py", "tensorrt_llm/llmapi/llm_args.py",
    ]  # fmt: skip
    assert WORKER_SECTION in said
    assert "written configurations, refused" not in said


def test_without_a_directory_it_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(None) == 2
    assert "make contract TENSORRT_LLM=DIR" in capsys.readouterr().err
    assert main(str(tmp_path)) == 2
    assert f"found no tensorrt_llm.llmapi.llm_args in {tmp_path}" in capsys.readouterr().err


def test_errors_of_the_classes_themselves_are_seen(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="changed"):
        main(str(package(tmp_path, **{"llmapi/llm_args": "raise RuntimeError('changed')\n"})))
    assert not any(name.startswith("tensorrt_llm") for name in sys.modules)

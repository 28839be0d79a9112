# SPDX-License-Identifier: Apache-2.0
"""Weights that are dequantised before the session against ONNX Runtime's folding of the same graph, to the last bit."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from dflash_trt import _C
from dflash_trt._C import unpack_fp8, unpack_nvfp4
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import EngineError
from dflash_trt.graph import weight_files
from dflash_trt.graph.cpu_lowering import lower_to_cpu
from dflash_trt.graph.cpu_weights import float_weights
from dflash_trt.graph.ort_session import graph_session
from dflash_trt.graph.weight_files import unlink_mapped
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.engines import build
from tests.paths import FIXTURES

DRAFT = FIXTURES / "tiny-gpt-oss-dflash"


def engine(recipe: str, directory: Path) -> Path:
    quantize_checkpoint(read_draft(DRAFT), load_recipe(recipe), directory / "draft")
    build(directory / "draft", directory / "engine")
    return directory / "engine"


def outputs(session: onnxruntime.InferenceSession) -> Sequence[np.ndarray]:
    """Of fixed inputs whose dynamic axes are 3; slot_ids, which may be a table of pages, are slots here."""
    rng = np.random.default_rng(0)
    feed = {}
    for port in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 for size in port.shape or ["B"]]
        is_float = port.type == "tensor(float)"
        feed[port.name] = rng.standard_normal(shape, np.float32) if is_float else np.ones(shape, np.int32)
    return session.run(None, feed)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4", "mixed-nvfp4-fp8"])
@pytest.mark.parametrize("graph", ["context.onnx", "draft.onnx"])
def test_outputs_equal_those_of_folded_constants(
    recipe: str, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "PIECE", 64)  # more than one for each matrix, and rows longer than that
    monkeypatch.setattr(weight_files, "MIN_BYTES", 0)  # as files of large weights are
    directory = engine(recipe, tmp_path)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    options.register_custom_ops_library(_C.__file__)
    lowered = lower_to_cpu(onnx.load(directory / graph, load_external_data=False), keep_attention=True)
    folded = onnxruntime.InferenceSession(lowered.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for actual, expected in zip(outputs(graph_session(directory, graph)), outputs(folded), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_no_weight_is_left_to_onnxruntime(tmp_path: Path) -> None:
    directory = engine("nvfp4", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    with float_weights(model, directory) as folder:
        places = {entry.value for i in model.graph.initializer for entry in i.external_data if entry.key == "location"}
        assert places == {file.name for file in folder.iterdir()}
        assert {i.data_type for i in model.graph.initializer if i.external_data} == {onnx.TensorProto.FLOAT}
    assert not folder.exists()


def test_files_are_unlinked_once_all_are_mapped(tmp_path: Path) -> None:
    files = [tmp_path / "a file", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(range(16)))
    first = np.memmap(files[0], mode="r")
    assert not unlink_mapped(files)
    assert all(file.exists() for file in files)  # whoever maps b, and reads a again, finds both
    second = np.memmap(files[1], mode="r")
    assert unlink_mapped(files)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(first, second)


def test_large_files_are_gone_while_they_are_still_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = engine("fp8", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    sizes = {4 * math.prod(i.dims) for i in model.graph.initializer}
    monkeypatch.setattr(weight_files, "MIN_BYTES", max(sizes))
    with float_weights(model, directory) as folder:
        large = [file for file in folder.iterdir() if file.stat().st_size >= max(sizes)]
        maps = [np.memmap(file, mode="r") for file in large]
        assert len(maps) > 0
        deadline = time.monotonic() + 60
        while any(file.exists() for file in large) and time.monotonic() < deadline:
            time.sleep(0.001)
        left = list(folder.iterdir())
        assert left  # the small ones
        assert not set(large) & set(left)


def test_weights_outside_the_directory_are_refused(tmp_path: Path) -> None:
    directory = engine("bf16", tmp_path)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"expected weights inside it, found model\.safetensors -> .*elsewhere"):
        graph_session(directory, "draft.onnx")


def test_a_short_file_is_said(tmp_path: Path) -> None:
    directory = engine("nvfp4", tmp_path)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"model\.safetensors: expected .* found: mmap length"):
        graph_session(directory, "draft.onnx")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = engine("bf16", tmp_path)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files, "_write", no_room)
    with pytest.raises(EngineError, match=r"expected room for 0\.0 GiB of FLOAT weights .* No space left") as raised:
        graph_session(directory, "draft.onnx")
    assert "TMPDIR" in str(raised.value.hint)


def test_unpackers_refuse_other_shapes() -> None:
    codes, scales = np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"expected out of shape \[2, 16\], found \[2, 32\]"):
        unpack_fp8(codes, 1.0, np.empty((2, 32), np.float32))
    with pytest.raises(ValueError, match=r"expected out of shape \[2, 32\], found \[2, 16\]"):
        unpack_nvfp4(codes, scales, 1.0, np.empty((2, 16), np.float32))
    with pytest.raises(ValueError, match=r"expected scales of shape \[2, 2\], found \[2, 1\]"):
        unpack_nvfp4(codes, scales[:, :1].copy(), 1.0, np.empty((2, 32), np.float32))

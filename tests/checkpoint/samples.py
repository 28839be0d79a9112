# SPDX-License-Identifier: Apache-2.0
"""Writes small checkpoints, right ones and wrong ones, and reads what the errors say."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from dflash_trt.errors import CheckpointError, DFlashError

Header = dict[str, Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(call: Callable[[], object], error: type[DFlashError] = CheckpointError) -> str:
    """The message, hint included, with which `call` refuses."""
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def write_target(path: Path, **facts: object) -> Path:
    """A target of write_random_draft's default sizes, its weights reduced to the embedding table."""
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 48, "num_hidden_layers": 6,
        "vocab_size": 96, "max_position_embeddings": 8192,
    } | facts  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    embedding = np.zeros((config["vocab_size"], config["hidden_size"]), dtype=np.float32)
    save_numpy({"model.embed_tokens.weight": embedding}, path / "model.safetensors")
    return path


def edit_config(directory: Path, *removed: str, **changed: object) -> Path:
    """Removes and sets keys of config.json; `dflash_config__KEY` reaches into the section."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for key in removed:
        section, _, name = key.rpartition("__")
        del (config[section] if section else config)[name]
    for key, value in changed.items():
        section, _, name = key.rpartition("__")
        (config.setdefault(section, {}) if section else config)[name] = value
    file.write_text(json.dumps(config))
    return directory


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Lets `change` alter the tensors of model.safetensors."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return directory


def write_raw(file: Path, header: Header | bytes, data: bytes = b"") -> Path:
    """A safetensors file with exactly this header, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return file


def shard(directory: Path, *, num_shards: int = 2) -> Path:
    """Splits model.safetensors into shards with an index, as huggingface_hub names them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[i::num_shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    """Writes model.safetensors.index.json."""
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(directory: Path) -> dict[str, str]:
    """The weight_map of model.safetensors.index.json."""
    weight_map: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def cache_repository(cache: Path, repository: str, directory: Path) -> Path:
    """Puts a directory into a cache as huggingface_hub does: blobs, and a snapshot of links to them."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for file in directory.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot

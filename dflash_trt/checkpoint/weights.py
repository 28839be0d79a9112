# SPDX-License-Identifier: Apache-2.0
"""Finds the weights of a checkpoint directory: one safetensors file or a sharded index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import REDOWNLOAD, StoredTensor, damaged, read_tensors
from dflash_trt.errors import CheckpointError, shown
from dflash_trt.files.read import is_file_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_weights(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory, sorted by name; a single file wins over an index, as in transformers.

    Raises CheckpointError where there are none (pickles are refused), or where index and shards disagree.
    """
    if (directory / SINGLE).is_file():
        tensors = read_tensors(directory / SINGLE)
    elif (directory / INDEX).is_file():
        tensors = _read_sharded(directory / INDEX)
    else:
        raise _no_weights(directory)
    return dict(sorted(tensors.items()))


def has_weights(directory: Path) -> bool:
    """Whether the directory has safetensors weights, complete or not."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def weight_files(weights: Mapping[str, StoredTensor]) -> list[Path]:
    """The files that hold these weights, sorted by name (shards, or the single file)."""
    return sorted({tensor.file for tensor in weights.values()})


def shard_names(index: Path) -> list[str]:
    """The files that an index names, sorted; CheckpointError for a name that leads out of the directory."""
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if not is_file_name(shard) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: weight_map: expected the name of a .safetensors file in the same directory,"
                f" found {shown(shard)}"
            )
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    facts = Facts.load(index, what="a JSON object with a weight_map", hint=REDOWNLOAD)
    return facts.texts_by_name("weight_map")


def _no_weights(directory: Path) -> CheckpointError:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return CheckpointError(
            f"{directory}: expected {SINGLE} or {INDEX}, found pickle weights ({', '.join(pickles)}),"
            " which can run code when they are loaded and are never read",
            hint="convert them to safetensors: https://huggingface.co/docs/safetensors/convert-weights",
        )
    if unfinished := sorted(p.name for p in directory.iterdir() if p.suffix == ".incomplete"):
        return CheckpointError(
            f"{directory}: missing {SINGLE} or {INDEX}; {unfinished[0]} is a download that was not finished",
            hint="run the download again; it continues where it stopped",
        )
    return CheckpointError(f"{directory}: missing {SINGLE} or {INDEX}", hint="check the path to the checkpoint")


def _read_sharded(index: Path) -> dict[str, StoredTensor]:
    weight_map = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in shard_names(index):
        if not (index.parent / shard).is_file():
            raise damaged(index, f"missing shard {shard}")
        for name, tensor in read_tensors(index.parent / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{index}: weight_map: {shown(name)}: expected {shard}, found {shown(weight_map.get(name))}"
                )
            tensors[name] = tensor
    if missing := sorted(weight_map.keys() - tensors.keys()):
        place = f"{weight_map[missing[0]]} ({len(missing)} missing in all)"
        raise damaged(index, f"missing tensor {shown(missing[0])} in {place}")
    return tensors

# SPDX-License-Identifier: Apache-2.0
"""Recovers what quantising costs a draft: trains it as it will be quantised, then packs it as any other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from dflash_trt import __version__
from dflash_trt.api.runtime_options import choose_device
from dflash_trt.checkpoint.convert_dialect import WRITTEN, copy_other_files
from dflash_trt.checkpoint.decoded_tensor import map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.finite import check_finite
from dflash_trt.checkpoint.safetensors_writer import SafetensorsWriter
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.engine.manifest import sha256
from dflash_trt.errors import CheckpointError
from dflash_trt.files.json_file import write_json
from dflash_trt.files.write import check_replaceable, scratch_directory, sole_writer
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.convert import Summary, quantize_checkpoint
from dflash_trt.quantize.packing import check_quantisable
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.recovery.fake_quantization import recipe_numerics
from dflash_trt.runtime.measure.recovery.objective import read_objective
from dflash_trt.runtime.measure.recovery.settings import Settings
from dflash_trt.runtime.measure.recovery.torch_draft import computed_tensors, trained_shapes
from dflash_trt.runtime.measure.recovery.training import Trainer
from dflash_trt.runtime.measure.recovery.training_state import (
    STATE,
    Progress,
    Tensors,
    load_state,
    save_state,
    state_file,
)

SAVE_EVERY = 100
"""Steps between two states on disk."""
SMALLEST_THREADED = 512
"""hidden_size from which one GEMM of a training step takes milliseconds."""


def recover_checkpoint(
    draft: DraftCheckpoint,
    recipe: Recipe,
    features: Path,
    settings: Settings,
    output: Path,
    *,
    ranges: Ranges | None = None,
    force: bool = False,
    device: str = "cpu",
    threads: int = 0,
    save_every: int = SAVE_EVERY,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> tuple[Summary, Progress]:
    """Writes the checkpoint that `recipe` makes of the draft after training, into the new directory `output`.

    It learns from `features`, a file that `capture` wrote. The linear layers' weights are trained, and all tensors that
    LiLiCorr adds, on `device`: cpu, cuda or auto. The scales of activations come from `ranges`, or from the bounds of
    the given weights. `threads` 0 lets the draft's size decide for the training and takes all for packing. Goes on with
    a state that an interrupted run left. Raises as `quantize_checkpoint` and `open_features` do, and CheckpointError
    for another kind than DFlash and LiLiCorr, or a state of something else.
    """
    spec, device = draft.spec, choose_device(device)
    if spec.kind not in ("DFlash", "LiLiCorr"):
        raise CheckpointError(
            f"{draft.directory}: expected a DFlash or LiLiCorr draft, found {spec.kind}, which `recover` does not"
            " train: it has no candidate selector, no Markov head and no anchor-first blocks",
            hint="quantise it without training: dflash-trt quantize",
        )
    algorithms = recipe.algorithms(draft.spec.linear_modules())
    check_quantisable(draft, algorithms)
    with sole_writer(output, WRITTEN, force=force):
        check_finite(draft.weights.values())
        if ranges is None and recipe.needs_ranges:
            ranges = ranges_from_weights(draft)
        tensors = {name: tensor.to(device) for name, tensor in computed_tensors(draft).items()}
        state = state_file(output)
        with open_features(features, draft.spec) as file:
            trainer = Trainer(
                draft.spec,
                recipe_numerics(draft.spec, recipe, ranges),
                tensors,
                file,
                read_objective(draft, file, device),
                settings,
                _identity(draft, recipe, features, settings, ranges, device),
            )
            with _torch_threads(threads or _threads(draft.spec)):
                _train(trainer, state, settings.steps, save_every, on_step, draft)
        with scratch_directory(output) as scratch:
            trained = _write_dense(draft, trainer.weights(), scratch)
            summary = quantize_checkpoint(trained, recipe, output, ranges=ranges, force=force, threads=threads)
        state.unlink(missing_ok=True)
    return summary, trainer.progress


def _threads(spec: DraftSpec) -> int:
    """Threads that pay: those of small GEMMs spin for each other longer than they compute, on a busy machine most."""
    return torch.get_num_threads() if spec.hidden_size >= SMALLEST_THREADED else 1


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(
    trainer: Trainer,
    state: Path,
    steps: int,
    save_every: int,
    on_step: Callable[[Progress], None],
    draft: DraftCheckpoint,
) -> None:
    if saved := load_state(state, trainer.progress.identity, trained_shapes(draft.spec)):
        trainer.restore(*saved)
    check_replaceable(state, STATE, force=True)
    on_step(trainer.progress)
    while trainer.progress.step < steps:
        trainer.step()
        if not torch.isfinite(torch.tensor(trainer.progress.losses[-1])):
            raise CheckpointError(
                f"step {trainer.progress.step}: expected a finite loss, found {trainer.progress.losses[-1]}",
                hint="lower --learning-rate",
            )
        if trainer.progress.step % save_every == 0 or trainer.progress.step == steps:
            save_state(state, trainer.progress, trainer.state())
        on_step(trainer.progress)


def _identity(
    draft: DraftCheckpoint, recipe: Recipe, features: Path, settings: Settings, ranges: Ranges | None, device: str
) -> str:
    """sha256 of all that decides the trained weights."""
    digest = hashlib.sha256(__version__.encode())
    for document in (draft.spec, recipe.rules, settings, ranges, device):
        digest.update(msgspec.json.encode(document, order="deterministic"))
    for tensor in draft.weights.values():
        digest.update(map_tensor(tensor).data)
    digest.update(sha256(features).encode())
    return digest.hexdigest()


def _write_dense(draft: DraftCheckpoint, weights: Tensors, directory: Path) -> DraftCheckpoint:
    """The draft with other weights, in z-lab's layout at `directory`; all other tensors byte for byte."""
    directory.mkdir()
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in draft.weights.items()}
    with SafetensorsWriter(directory / SINGLE, layout) as writer:
        for name, tensor in draft.weights.items():
            weight = weights.get(name.removesuffix(".weight"))
            if weight is None or tensor.shape != tuple(weight.shape):
                writer.copy(tensor)
            else:
                bits = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
                writer.write(name, bits.cpu().numpy())
    write_json(directory / "config.json", draft.canonical_config())
    copy_other_files(draft, directory)
    return read_draft(directory)

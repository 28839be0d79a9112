# SPDX-License-Identifier: Apache-2.0
"""The training loop: AdamW on FLOAT copies of the weights, whose quantised form computes the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import CAPTURE
from dflash_trt.runtime.measure.features import FeatureFile
from dflash_trt.runtime.measure.recovery.fake_quantization import Numerics, quantised_weights
from dflash_trt.runtime.measure.recovery.objective import Example, Objective
from dflash_trt.runtime.measure.recovery.settings import Settings
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft, trained_shapes
from dflash_trt.runtime.measure.recovery.training_state import PARTS, Progress, Tensors

WARMUP_SHARE = 0.05
CLIP_NORM = 1.0
HELD_OUT_SHARE, MAX_HELD_OUT = 16, 64  # one in 16, at most 64
EVALUATIONS = 10
DENSE = Numerics(algorithms={}, inputs={}, cache={})


class Trainer:
    """Weights, moments and history; `step` until `progress.step` is `settings.steps`."""

    def __init__(
        self,
        spec: DraftSpec,
        numerics: Numerics,
        tensors: Mapping[str, torch.Tensor],
        features: FeatureFile,
        objective: Objective,
        settings: Settings,
        identity: str,
    ) -> None:
        """`tensors`: the dense draft's, by checkpoint name, in its dtypes, on the device that trains."""
        self._spec, self._numerics, self._features = spec, numerics, features
        self._objective, self._settings = objective, settings
        given = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}
        self._dtypes = {name: given[name].dtype for name in trained_shapes(spec)}
        self._masters = {name: given[name].float().clone() for name in self._dtypes}
        self._draft = TorchDraft(spec, numerics, tensors)
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=settings.learning_rate)
        self._training, self._held_out = _split(features)
        self.progress = Progress(identity=identity)
        self._dense = TorchDraft(spec, DENSE, tensors)
        self._dense.weights = {name: given[name].float() for name in self._dtypes}  # the teacher

    def step(self) -> None:
        """One optimiser step; before the first, and now and then, the loss on the held-out sequences."""
        progress = self.progress
        if progress.step == 0:
            progress.dense_held_out = self._held_out_loss(self._dense)
            self._evaluate()
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate * _schedule(progress.step, self._settings.steps)
        progress.losses.append(self._accumulate(self._examples(progress.step)))
        torch.nn.utils.clip_grad_norm_(self._masters.values(), CLIP_NORM)
        self._optimizer.step()
        progress.step += 1
        if progress.step % max(1, self._settings.steps // EVALUATIONS) == 0 or progress.step == self._settings.steps:
            self._evaluate()

    def weights(self) -> Tensors:
        """The trained weights by module, rounded to the checkpoint's dtypes."""
        return {module: master.detach().to(self._dtypes[module]) for module, master in self._masters.items()}

    def state(self) -> Tensors:
        """All tensors that `restore` needs."""
        moments = {module: self._optimizer.state[master] for module, master in self._masters.items()}
        parts = {"master": self._masters, **{p: {m: s[p] for m, s in moments.items()} for p in PARTS[1:]}}
        return {f"{part}/{module}": t.detach() for part, tensors in parts.items() for module, t in tensors.items()}

    def restore(self, progress: Progress, tensors: Tensors) -> None:
        """Goes on where `state` and `progress` were taken."""
        self.progress = progress
        for module, master in self._masters.items():
            master.copy_(tensors[f"master/{module}"])
            moments = {part: tensors[f"{part}/{module}"].to(master.device, copy=True) for part in PARTS[1:]}
            self._optimizer.state[master] = {"step": torch.tensor(float(progress.step)), **moments}

    def _quantise(self, *, requires_grad: bool) -> None:
        weights = quantised_weights(self._spec, self._numerics, self.weights())
        self._draft.weights = {module: weight.requires_grad_(requires_grad) for module, weight in weights.items()}

    def _accumulate(self, examples: list[Example]) -> float:
        """The loss of one step, its gradients left at the masters: straight through rounding."""
        self._quantise(requires_grad=True)
        total, loss = self._objective.total_weight(examples), 0.0
        for example in examples:
            part = self._weighted_loss(self._draft, example) / total
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        for module, master in self._masters.items():
            gradient = self._draft.weights[module].grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient  # a correlator without layers
        return loss

    def _examples(self, step: int) -> list[Example]:
        """Examples of a step, drawn with the seed and the step number."""
        generator = np.random.default_rng([self._settings.seed, step])
        count = min(self._settings.sequences_per_step, len(self._training))
        chosen = generator.choice(len(self._training), size=count, replace=False)
        return [self._example(self._training[index], generator) for index in chosen]

    def _example(self, number: int, generator: np.random.Generator) -> Example:
        sequence = self._features.sequence(number)
        return sequence, torch.from_numpy(sequence.random_anchors(self._settings.anchors, generator))

    def _weighted_loss(self, draft: TorchDraft, example: Example) -> torch.Tensor:
        return self._objective.weighted_sum(draft, example, self._dense, self._settings.distillation)

    def _evaluate(self) -> None:
        self._quantise(requires_grad=False)
        self.progress.held_out.append((self.progress.step, self._held_out_loss(self._draft)))

    @torch.no_grad()
    def _held_out_loss(self, draft: TorchDraft) -> float:
        generator = np.random.default_rng(self._settings.seed)
        total = weight = 0.0
        for number in self._held_out:
            example = self._example(number, generator)
            total += self._weighted_loss(draft, example).item()
            weight += self._objective.total_weight([example])
        return total / weight


def _split(features: FeatureFile) -> tuple[list[int], list[int]]:
    """Sequences to train on, and the last ones, kept apart with their prompts; answers of one token teach nothing."""
    prompts = features.answered_prompts()
    held_out = [*prompts][-min(MAX_HELD_OUT, max(1, len(prompts) // HELD_OUT_SHARE)) :]
    known = {prompts[i] for i in held_out}
    training = [i for i, prompt in prompts.items() if prompt not in known]
    if not training:
        raise CheckpointError(
            f"{features.file}: expected answers of at least 2 tokens to other prompts than the last ones, which are"
            f" held out, found none among {len(prompts)}",
            hint=f"capture more: {CAPTURE}",
        )
    return training, held_out


def _schedule(step: int, steps: int) -> float:
    """The share of the learning rate: a linear start, then half a cosine."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

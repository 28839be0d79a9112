"""Train LiLiCorr's correlator on blocks that the DFlash2 drafter of the same target has drafted once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .architectures import BLOCK_SIZE
from .checkpoint import load_draft, read_config, save_weights
from .draft import DraftModel
from .draft_training import LEARNING_RATE, SLOT_DECAY, run_blocks, sample_anchors
from .generation import Continuations
from .lilicorr import Correlator
from .optimization import Schedule, train

SEQUENCES, DRAWS, BATCH_SIZE = 16, 3, 192
"""Sequences that are drafted at once, draws of anchors in each, and blocks of a step."""


class Blocks(NamedTuple):
    """Drafted blocks, N of them."""

    hidden: torch.Tensor
    """[N, S-1, H] FP16."""
    log_probs: torch.Tensor
    """[N, S-1, k]."""
    candidates: torch.Tensor
    """[N, S-1, k]."""
    labels: torch.Tensor
    """[N, S-1]."""
    context: torch.Tensor
    """[N, H] FP16: the context row before each anchor's."""

    def select(self, index: torch.Tensor) -> Blocks:
        """The chosen blocks."""
        return Blocks(*(tensor[index] for tensor in self))


@torch.no_grad()
def drafted_blocks(draft: DraftModel, target: PreTrainedModel, continuations: Continuations, seed: int) -> Blocks:
    """Blocks at random anchors of all continuations."""
    assert draft.lilicorr is not None
    generator, parts = torch.Generator().manual_seed(seed), []
    for indices in torch.arange(len(continuations)).split(SEQUENCES):
        batch = continuations.select(indices)
        context = draft.context(batch.features.float())
        for _ in range(DRAWS):
            anchors = sample_anchors(batch, generator)
            drafted, block = run_blocks(draft, target, batch, anchors)
            log_probs, candidates = target.get_output_embeddings()(drafted).log_softmax(-1).topk(draft.lilicorr.top_k)
            rows = torch.take_along_dim(context, anchors[..., None] - 1, dim=1)
            parts.append((drafted.half(), log_probs, candidates, block[..., 1:], rows.half()))
    return Blocks(*(torch.cat(columns).flatten(0, 1) for columns in zip(*parts, strict=True)))


def correlator_loss(correlator: Correlator, embedding: nn.Module, blocks: Blocks) -> torch.Tensor:
    """Cross entropy of the candidates of each slot after the true one of the slot before, weighted as DFlash's.

    A true token that is no candidate takes the last one's place.
    """
    candidates, k = blocks.candidates.clone(), correlator.top_k
    is_label = candidates == blocks.labels[..., None]
    missing = ~is_label.any(-1)
    candidates[..., -1] = torch.where(missing, blocks.labels, candidates[..., -1])
    place = torch.where(missing, k - 1, is_label.int().argmax(-1))
    scores = correlator.scores(embedding(candidates), blocks.log_probs, blocks.hidden.float(), blocks.context.float())
    before = F.pad(place[:, :-1], (1, 0))
    after = scores.gather(2, before[..., None, None].expand(-1, -1, 1, k)).squeeze(2)
    loss = F.cross_entropy(after.flatten(0, 1), place.flatten(), reduction="none").view(place.shape)
    weights = torch.exp(-torch.arange(BLOCK_SIZE - 1) / SLOT_DECAY)
    return (loss * weights).sum() / (weights.sum() * len(place))


def train_correlator(
    directory: Path, target: PreTrainedModel, training: Continuations, held_out: Continuations, steps: int, seed: int
) -> None:
    """Save the DFlash2 drafter beside the directory there, with a trained correlator in the place of its selector."""
    torch.manual_seed(seed)
    draft = DraftModel(read_config(directory)).eval()
    layers = load_draft(directory.with_name(directory.name.replace("lilicorr", "dflash2"))).state_dict()
    draft.load_state_dict(layers, strict=False)
    correlator, embedding = draft.lilicorr, target.get_input_embeddings()
    assert correlator is not None
    blocks, unseen = (drafted_blocks(draft, target, each, seed) for each in (training, held_out))
    generator = torch.Generator().manual_seed(seed)

    def loss_of_step(step: int) -> torch.Tensor:
        chosen = torch.randint(len(blocks.labels), (BATCH_SIZE,), generator=generator)
        return correlator_loss(correlator, embedding, blocks.select(chosen))

    @torch.no_grad()
    def validation_loss() -> float:
        return correlator_loss(correlator, embedding, unseen).item()

    train(correlator, loss_of_step, Schedule(steps, LEARNING_RATE, muon=True), validation_loss)
    save_weights(directory, draft)

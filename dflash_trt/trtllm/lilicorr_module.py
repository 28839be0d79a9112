# SPDX-License-Identifier: Apache-2.0
"""The drafter module of a LiLiCorr draft, which also scores a block's candidates.

TensorRT-LLM's worker asks for this since 1.4.0rc1 (speculative/dflash.py @ 8d62b3e5, models/modeling_lilicorr.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_scorer import DraftedBlock
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.lilicorr_scorer import LilicorrScorer
from dflash_trt.engine.signatures import CONTEXT_HIDDEN
from dflash_trt.trtllm.drafter_module import EngineDrafter


class LilicorrEngineDrafter(EngineDrafter):
    """Scores candidates that the worker finds with the target's lm_head."""

    def __init__(
        self, draft_config: Any, spec: DraftSpec, executor: Executor, directory: Path, *, in_pool: bool = False
    ) -> None:
        """`directory` is the engine's, with the correlator's tensors."""
        super().__init__(draft_config, spec, executor, in_pool=in_pool)
        assert spec.lilicorr is not None
        self._spec = spec
        self._directory = directory
        self._scorer: LilicorrScorer | None = None
        self.lilicorr = SimpleNamespace(candidate_topk=spec.lilicorr.top_k)

    def _build_fused_kv_buffers(self) -> None:
        """Read the correlator, too: the executor has its GPU, and no cache exists yet."""
        super()._build_fused_kv_buffers()
        if self._scorer is None:
            self._scorer = LilicorrScorer.read(self._directory, self._spec, self._executor.device)

    def select_lilicorr_path(
        self, candidate_ids: Tensor, candidate_log_probs: Tensor, draft_hidden: Tensor, anchor_hidden: Tensor
    ) -> Tensor:
        """Scores [B, K, k] FLOAT of the greedy path: the argmax is the path, and sampling a row gives a candidate.

        `candidate_ids` and `candidate_log_probs` [B, K, k] are the best of the whole vocabulary, `draft_hidden`
        [B, K, H] the final rows. `anchor_hidden` [B, A*H] are the rows of `project_target_hidden` for the last accepted
        tokens, taps here, so that the context graph projects them once more.
        """
        assert self._scorer is not None, "_build_fused_kv_buffers comes first"
        assert self.model.embed_tokens is not None
        positions = torch.zeros(len(anchor_hidden), dtype=torch.int32, device=anchor_hidden.device)  # only K turns
        context_hidden = self._executor.context(anchor_hidden, positions)[CONTEXT_HIDDEN]
        anchors = candidate_ids.new_empty(0)  # the correlator reads the anchors' context rows instead
        block = DraftedBlock(draft_hidden, anchors, context_hidden, self.model.embed_tokens)
        return self._scorer.lattice(block, candidate_ids, candidate_log_probs.float()).greedy_rows()

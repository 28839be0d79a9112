# SPDX-License-Identifier: Apache-2.0
"""The drafter module of a DFlash2 draft, which also chooses the path through a block's candidates.

TensorRT-LLM's own DFlash2 drafter does so, too (pull request 18155 with its `test_dflash2_semantics.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_scorer import CandidateSelector, DraftedBlock
from dflash_trt.engine.executor import Executor
from dflash_trt.trtllm.drafter_module import EngineDrafter


class DFlash2EngineDrafter(EngineDrafter):
    """Proposes a path; the worker finds the candidates with the target's lm_head."""

    is_dflash2 = has_candidate_selector = True

    def __init__(
        self, draft_config: Any, spec: DraftSpec, executor: Executor, directory: Path, *, in_pool: bool = False
    ) -> None:
        """`directory` is the engine's, with the selector's tensors."""
        super().__init__(draft_config, spec, executor, in_pool=in_pool)
        self._spec = spec
        self._directory = directory
        self.candidate_selector: CandidateSelector | None = None

    def _build_fused_kv_buffers(self) -> None:
        """Read the selector, too: the executor has its GPU, and no cache exists yet."""
        super()._build_fused_kv_buffers()
        if self.candidate_selector is None:
            self.candidate_selector = CandidateSelector.read(self._directory, self._spec, self._executor.device)

    def select_candidate_path(
        self,
        block_logits: Tensor,
        candidate_ids: Tensor,
        unary_logits: Tensor,
        block_hidden_states: Tensor,
        anchor_token_ids: Tensor,
    ) -> Tensor:
        """block_logits [B, K, V] FLOAT, reduced in place to the scores of the greedy path's candidates.

        The argmax is the path; sampling a row gives one of its candidates. `candidate_ids` and `unary_logits`
        [B, K, k] are the best of block_logits, `block_hidden_states` [B, K, H] the final rows, and `anchor_token_ids`
        [B] the last verified tokens.
        """
        selector = self.candidate_selector
        assert selector is not None, "_build_fused_kv_buffers comes first"
        logits = selector.final_logits(unary_logits)
        assert self.model.embed_tokens is not None
        block = DraftedBlock(block_hidden_states, anchor_token_ids, None, self.model.embed_tokens)
        rows = selector.lattice(block, candidate_ids, logits).greedy_rows()
        return block_logits.float().fill_(-torch.inf).scatter_(-1, candidate_ids, rows)

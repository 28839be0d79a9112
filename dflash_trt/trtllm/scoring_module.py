# SPDX-License-Identifier: Apache-2.0
"""The drafter modules of DFlash2 and LiLiCorr drafts, which also score the candidates that the worker finds.

TensorRT-LLM's worker finds them with the target's lm_head and asks for DFlash2's path since pull request 18155 (its
`test_dflash2_semantics.py`), for LiLiCorr's since 1.4.0rc1 (speculative/dflash.py @ 8d62b3e5,
models/modeling_lilicorr.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_scorer import CandidateScorer, CandidateSelector, DraftedBlock, read_scorer
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.signatures import CONTEXT_HIDDEN
from dflash_trt.trtllm.drafter_module import EngineDrafter


class ScoringEngineDrafter(EngineDrafter):
    """A drafter with the candidate scorer of its engine directory."""

    def __init__(
        self, draft_config: Any, spec: DraftSpec, executor: Executor, directory: Path, *, in_pool: bool = False
    ) -> None:
        """`directory` is the engine's, with the scorer's tensors."""
        super().__init__(draft_config, spec, executor, in_pool=in_pool)
        self._spec = spec
        self._directory = directory
        self._scorer: CandidateScorer | None = None

    def _build_fused_kv_buffers(self) -> None:
        """Read the scorer, too: the executor has its GPU, and no cache exists yet."""
        super()._build_fused_kv_buffers()
        if self._scorer is None:
            self._scorer = read_scorer(self._directory, self._spec, self._executor)

    def _greedy_rows(
        self, hidden: Tensor, anchors: Tensor, context_hidden: Tensor | None, ids: Tensor, values: Tensor
    ) -> Tensor:
        """Scores [B, K, k] FLOAT of the greedy path through candidates `ids` [B, K, k] with the scorer's `values`."""
        assert self._scorer is not None, "_build_fused_kv_buffers comes first"
        assert self.model.embed_tokens is not None
        block = DraftedBlock(hidden, anchors, context_hidden, self.model.embed_tokens)
        return self._scorer.lattice(block, ids, values).greedy_rows()


class DFlash2EngineDrafter(ScoringEngineDrafter):
    """Reduces a block's logits to the scores of a path."""

    is_dflash2 = has_candidate_selector = True

    @property
    def candidate_selector(self) -> CandidateSelector:
        """The selector, whose codebook and number of candidates the worker reads."""
        assert isinstance(self._scorer, CandidateSelector), "_build_fused_kv_buffers comes first"
        return self._scorer

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
        values = self.candidate_selector.final_logits(unary_logits)
        rows = self._greedy_rows(block_hidden_states, anchor_token_ids, None, candidate_ids, values)
        return block_logits.float().fill_(-torch.inf).scatter_(-1, candidate_ids, rows)


class LilicorrEngineDrafter(ScoringEngineDrafter):
    """Scores candidates by the block's rows and the last accepted token's."""

    def __init__(self, draft_config: Any, spec: DraftSpec, *given: Any, in_pool: bool = False) -> None:
        super().__init__(draft_config, spec, *given, in_pool=in_pool)
        assert spec.lilicorr is not None
        self.lilicorr = SimpleNamespace(candidate_topk=spec.lilicorr.top_k)

    def select_lilicorr_path(
        self, candidate_ids: Tensor, candidate_log_probs: Tensor, draft_hidden: Tensor, anchor_hidden: Tensor
    ) -> Tensor:
        """Scores [B, K, k] FLOAT of the greedy path: the argmax is the path, and sampling a row gives a candidate.

        `candidate_ids` and `candidate_log_probs` [B, K, k] are the best of the whole vocabulary, `draft_hidden`
        [B, K, H] the final rows. `anchor_hidden` [B, A*H] are the rows of `project_target_hidden` for the last accepted
        tokens, taps here, so that the context graph projects them once more.
        """
        positions = torch.zeros(len(anchor_hidden), dtype=torch.int32, device=anchor_hidden.device)  # only K turns
        context_hidden = self._executor.context(anchor_hidden, positions)[CONTEXT_HIDDEN]
        anchors = candidate_ids.new_empty(0)  # the correlator reads the anchors' context rows instead
        return self._greedy_rows(draft_hidden, anchors, context_hidden, candidate_ids, candidate_log_probs.float())

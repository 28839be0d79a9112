# SPDX-License-Identifier: Apache-2.0
"""A package named tensorrt_llm with nothing but the names and signatures that engine mode relies on.

Written from NVIDIA/TensorRT-LLM at the commits that `contract.py` names; bodies are the least that runs.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "__init__.py": '__version__ = "1.4.0rc1"\n',
    "_torch/__init__.py": "",
    "_torch/models/__init__.py": "",
    "_torch/speculative/__init__.py": "",
    "_torch/speculative/interface.py": '''
import enum


class SpeculativeDecodingMode(enum.Enum):
    DFLASH = 1


class SpecWorkerBase:
    def set_draft_model(self, draft_model):
        self.vocabulary = getattr(getattr(draft_model, "model", None), "d2t", None)
''',
    "_torch/models/checkpoints/__init__.py": "",
    "_torch/models/checkpoints/base_weight_mapper.py": '''
class BaseWeightMapper:
    def init_model_and_config(self, model, config):
        self.tp_size = model.model_config.mapping.tp_size if hasattr(model, "config") else 1
''',
    "_torch/models/modeling_speculative.py": '''
class SpecDecOneEngineForCausalLM:
    def load_draft_weights(self, weights, weight_mapper=None):
        self.draft_model.load_weights(weights=weights, weight_mapper=weight_mapper)
''',
    "_torch/models/modeling_utils.py": '''
BUILDERS = {}


def register_draft_model(mode):
    def decorate(builder):
        BUILDERS[mode] = builder
        return builder

    return decorate


def get_registered_draft_model_builder(mode):
    from . import modeling_dflash

    return BUILDERS.get(mode)
''',
    "_torch/models/modeling_dflash.py": '''
from ..speculative.interface import SpeculativeDecodingMode
from .modeling_utils import register_draft_model


class DFlashForCausalLM:
    def load_weights(self, weights, weight_mapper=None, **kwargs): ...

    def load_weights_from_target_model(self, target_model): ...

    def _build_fused_kv_buffers(self): ...

    def project_target_hidden(self, hidden_states): ...

    def precompute_context_kv(self, projected_hidden, positions): ...

    def dflash_forward(
        self, noise_embedding, query_positions, num_ctx_per_req, ctx_k_cache, ctx_v_cache, ctx_cache_batch_idx,
        ctx_kv_cache=None, ctx_page_table=None,
    ): ...


@register_draft_model(SpeculativeDecodingMode.DFLASH)
def build(model_config, draft_config, lm_head, model):
    return DFlashForCausalLM()
''',
    "_torch/speculative/dflash.py": '''
from .interface import SpecWorkerBase


class DFlashWorker(SpecWorkerBase):
    def set_draft_model(self, draft_model):
        self.backend = getattr(draft_model, "dflash_attention_backend", None)

    def _store_prefill_context(self, draft_model, spec_metadata, attn_metadata, position_ids, total_target_tokens):
        return hasattr(draft_model, "fc") and draft_model.precompute_context_kv(None, position_ids)

    def prepare_1st_drafter_inputs(
        self, input_ids, position_ids, hidden_states, accepted_tokens, num_accepted_tokens, attn_metadata,
        spec_metadata, draft_model, total_target_tokens=0,
    ):
        return draft_model.draft_model_full
''',
}  # fmt: skip
NEWER_WORKER = """
        spec_metadata, draft_model, total_target_tokens=0, prep=None,
    ):
        mask = getattr(draft_model, "mask_token_embedding", None)
        if prep is not None:
            prep = (draft_model._fused_kv_weight, draft_model._k_norm_eps, getattr(draft_model, "_input_ln_eps", None))
        return draft_model.draft_model_full, mask, prep
"""


SERVE = """
import json
import sys


def ours():
    from tensorrt_llm._torch.models.modeling_utils import get_registered_draft_model_builder
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    return get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH).__module__


def main():
    from mpi4py.futures import MPIPoolExecutor

    with MPIPoolExecutor(max_workers=2, path=sys.path) as ranks:
        futures = [ranks.submit(ours) for _ in range(2)]
        print(json.dumps([ours(), *(future.result() for future in futures), *sys.argv]))
"""


def write_server(directory: Path) -> None:
    """A trtllm-serve beside the package, which spawns ranks as TensorRT-LLM does (llmapi/mpi_session.py)."""
    (directory / "tensorrt_llm" / "commands.py").write_text(SERVE)
    metadata = directory / "tensorrt_llm-1.4.0rc1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.4.0rc1\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\ntrtllm-serve = tensorrt_llm.commands:main\n")


def write_package(directory: Path, edits: dict[str, tuple[str, str]] | None = None) -> Path:
    """Writes it into `directory`; each of `edits` replaces a text of one file."""
    for name, text in FILES.items():
        old, new = (edits or {}).get(name, ("", ""))
        assert old in text
        file = directory / "tensorrt_llm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(old, new) if old else text)
    return directory

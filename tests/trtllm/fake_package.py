# SPDX-License-Identifier: Apache-2.0
"""A package named tensorrt_llm with what engine mode relies on: names, signatures and uses of the drafter.

Written from NVIDIA/TensorRT-LLM at the commits that tests/contract/drafter_contract.py names: each use of the drafter
that was read there stands here once, as the least that parses; what is registered also runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

FILES = {
    "__init__.py": "from .version import __version__\n",
    "version.py": '__version__ = "1.4.0rc1"\n',
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
        self._model = model
        mapping = model.model_config.mapping
        self.tp_size = 1 if mapping.enable_attention_dp or not hasattr(model, "config") else mapping.tp_size
''',
    "_torch/models/modeling_speculative.py": '''
import inspect


class SpecDecOneEngineForCausalLM:
    def __init__(self, model, model_config):
        self.draft_model = None
        self.epilogue.append(self.draft_model)
        self.draft_model.logits_processor = self.logits_processor
        self.spec_worker.set_draft_model(self.draft_model)

    def setup_aliases(self):
        if self.draft_model is not None and getattr(self.draft_model, "shares_target_kv_cache", False):
            self.draft_model.load_weights_from_target_model(self)

    def forward(self, hidden):
        return self.spec_worker(hidden, draft_model=self.draft_model)

    def load_draft_weights(self, weights, weight_mapper=None):
        from .modeling_utils import _load_weights_impl_v2

        if getattr(self.draft_model, "mtp_layers", None):
            _load_weights_impl_v2(self.draft_model, weights)
        if "weight_mapper" in inspect.getfullargspec(self.draft_model.load_weights).args:
            self.draft_model.load_weights(weights=weights, weight_mapper=weight_mapper)
        else:
            self.draft_model.load_weights(weights=weights)
        self.draft_model.load_weights_from_target_model(self)
''',
    "_torch/models/modeling_utils.py": '''
BUILDERS = {}


def register_draft_model(mode):
    def decorate(builder):
        if mode not in BUILDERS or not builder.__module__.startswith("tensorrt_llm._torch.models."):
            BUILDERS[mode] = builder  # one from outside wins, whichever comes first
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
    def _validate(self, draft_model):
        return getattr(draft_model, "dflash_attention_backend", None) == self.backend

    def set_draft_model(self, draft_model):
        super().set_draft_model(draft_model)
        self._validate(draft_model)
        self.is_second = getattr(draft_model, "is_dflash2", False)

    def _lazy_init_ctx_buffers(self, draft_model):
        config = getattr(draft_model, "config", None)
        self.max_ctx = getattr(config, "max_position_embeddings", None)
        dtype = draft_model.fc.weight.dtype if hasattr(draft_model, "fc") else None
        self.block = getattr(draft_model, "block_size", None)
        assert hasattr(draft_model, "_build_fused_kv_buffers")
        draft_model._build_fused_kv_buffers()
        heads = draft_model._num_heads, draft_model._num_kv_heads, draft_model._head_dim
        draft_model._runtime_position_ceiling = self.max_ctx + getattr(draft_model, "_kv_factor", 2)
        is_paged = getattr(draft_model, "_paged_ctx_cache", False)
        if is_paged and getattr(draft_model, "_uses_worker_attention_backend", True):
            draft_model.validate_block_attention_windows()
            return [draft_model._get_attention_mask_args(i)[0] for i in range(draft_model._num_attn_layers)]

    def _store_prefill_context(self, draft_model, spec_metadata, attn_metadata, position_ids, total_target_tokens):
        if hasattr(draft_model, "fc") and hasattr(draft_model, "hidden_norm"):
            return draft_model.precompute_context_kv(draft_model.project_target_hidden(spec_metadata), position_ids)

    def _forward_impl(
        self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model,
        resource_manager=None,
    ):
        if attn_metadata.num_seqs == attn_metadata.num_contexts:
            return None
        inputs = hidden_states
        hidden = draft_model.dflash_forward(
            noise_embedding=inputs[0], query_positions=inputs[1], num_ctx_per_req=inputs[2], ctx_k_cache=inputs[3],
            ctx_v_cache=inputs[4], ctx_cache_batch_idx=inputs[5], ctx_kv_cache=inputs[6], ctx_page_table=inputs[7],
        )
        logits = draft_model.logits_processor(hidden, draft_model.lm_head, None, True)
        if getattr(draft_model, "has_candidate_selector", False):
            logits = self._apply_dflash2_selector(draft_model, logits)
        self._accept_stats.record_draft_confidence(inputs, draft_model, hidden)
        return logits

    def _apply_dflash2_selector(self, draft_model, logits):
        selector = draft_model.candidate_selector
        ids = self.top(selector.top_k, selector.predecessor_codebook.shape[0])
        return draft_model.select_candidate_path(logits, ids, ids, ids, ids)

    def prepare_1st_drafter_inputs(
        self, input_ids, position_ids, hidden_states, accepted_tokens, num_accepted_tokens, attn_metadata,
        spec_metadata, draft_model, total_target_tokens=0,
    ):
        mask = draft_model.mask_token_id if hasattr(draft_model, "mask_token_id") else draft_model.model.mask_token_id
        embed_tokens = draft_model.draft_model_full.model.embed_tokens
        return embed_tokens(mask), draft_model.project_target_hidden(hidden_states)
''',
}  # fmt: skip
WORKER = "_torch/speculative/dflash.py"
# Differences of later commits' workers: a text of the file, and its replacement.
Edits = tuple[tuple[str, str], ...]
KIMI_K3: Edits = (
    ("total_target_tokens=0,\n    ):", "total_target_tokens=0, prep=None,\n    ):"),
    ("        embed_tokens = ", """        mask = getattr(draft_model, "mask_token_embedding", None)
        if prep is not None:
            prep = (draft_model._fused_kv_weight, draft_model._k_norm_eps, getattr(draft_model, "_input_ln_eps", None))
        embed_tokens = """),
    ("ctx_page_table=inputs[7],\n", "ctx_page_table=inputs[7],\n            **rows_kwargs(draft_model, inputs[8]),\n"),
    ("class DFlashWorker", """def rows_kwargs(draft_model, start):
    return {"ctx_rows_start": start} if takes_rows(type(draft_model)) else {}


def takes_rows(cls):
    return "ctx_rows_start" in inspect.signature(cls.dflash_forward).parameters


class DFlashWorker"""),
)  # fmt: skip
LILICORR: Edits = (
    ("draft_model.fc.weight.dtype if hasattr(draft_model, \"fc\") else None", "dflash_context_dtype(draft_model)"),
    ("class DFlashWorker", """def dflash_context_dtype(draft_model):
    projection = getattr(draft_model, "fc", None)
    return getattr(projection, "dtype", projection.weight.dtype)


class DFlashWorker"""),
    ("        if getattr(draft_model, \"has_cand", """        if getattr(draft_model, "lilicorr", None) is not None:
            logits = self._apply_lilicorr(draft_model, logits)
        elif getattr(draft_model, \"has_cand"""),
    ("    def _apply_dflash2", """    def _apply_lilicorr(self, draft_model, logits):
        ids = self.top(draft_model.lilicorr.candidate_topk, draft_model.config.vocab_size)
        return draft_model.select_lilicorr_path(ids, ids, ids, ids)

    def _apply_dflash2"""),
)  # fmt: skip
GENERATIONS = {"414ba69f": (), "864a4300": KIMI_K3, "8d62b3e5": LILICORR}
"""The workers that were read, by commit."""


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
    """Writes a trtllm-serve and a dynamo.trtllm that spawn ranks as TensorRT-LLM does (llmapi/mpi_session.py)."""
    worker = directory / "dynamo" / "trtllm" / "__main__.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("if __name__ == '__main__':\n    from tensorrt_llm.commands import main\n\n    main()\n")
    (directory / "tensorrt_llm" / "commands.py").write_text(SERVE)
    metadata = directory / "tensorrt_llm-1.4.0rc1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.4.0rc1\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\ntrtllm-serve = tensorrt_llm.commands:main\n")


# The minimum of llmapi/ that runs: a pool of MPI's world on rank 0, tasks of a command that is no MPI process.
LAUNCHER = {
    "trtllm-llmapi-launch": """
rank=${SLURM_PROCID:-${PMI_RANK:-0}}
export TLLM_SPAWN_PROXY_PROCESS=1 TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR="/tmp/launch-$PPID"
export tllm_mpi_size=${SLURM_NTASKS:-$PMI_SIZE}
if [ "$rank" -eq 0 ]; then
    (
        for name in $(compgen -e); do case $name in PMI_* | MPI_* | SLURM_*) unset "$name" ;; esac; done
        "$@"
        status=$?
        "$PYTHON" -m tensorrt_llm.llmapi.mgmn_leader_node --action stop
        exit $status
    ) &
    "$PYTHON" -m tensorrt_llm.llmapi.mgmn_leader_node
    wait $!
else
    "$PYTHON" -m tensorrt_llm.llmapi.mgmn_worker_node
fi
""",
    "llmapi/__init__.py": "",
    "llmapi/mpi_session.py": """
import time
from multiprocessing.connection import Client


class RemoteMpiCommSessionClient:
    def __init__(self, addr, hmac_key):
        while True:
            try:
                self.queue = Client(addr, authkey=hmac_key)
                return
            except (FileNotFoundError, ConnectionRefusedError):  # its name is there before it listens
                time.sleep(0.05)

    def submit(self, task, *args, sync=False, **kwargs):
        self.queue.send((task, args, kwargs))

    def submit_sync(self, task, *args, **kwargs):
        self.submit(task, *args, sync=True, **kwargs)
        return self.queue.recv()
""",
    "llmapi/mgmn_worker_node.py": """
from mpi4py.futures import MPICommExecutor
from mpi4py.MPI import COMM_WORLD

with MPICommExecutor(COMM_WORLD):
    pass
""",
    "llmapi/mgmn_leader_node.py": """
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener

ADDRESS, KEY = os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"], b"key"


def serve():
    from mpi4py.futures import MPICommExecutor
    from mpi4py.MPI import COMM_WORLD

    listener = Listener(ADDRESS, authkey=KEY)
    with ThreadPoolExecutor(1) as here, MPICommExecutor(COMM_WORLD) as ranks:
        while True:
            with listener.accept() as client:
                try:
                    while (message := client.recv()) is not None:
                        task, args, kwargs = message
                        pools = [here] + [ranks] * (COMM_WORLD.Get_size() - 1)
                        futures = [pool.submit(task, *args, **kwargs) for pool in pools]
                        client.send([future.result() for future in futures])
                    return
                except EOFError:
                    pass


if __name__ == "__main__":
    if sys.argv[1:] == ["--action", "stop"]:
        Client(ADDRESS, authkey=KEY).send(None)
    else:
        serve()
""",
    "commands.py": """
import json
import os
import sys


def builder():
    from tensorrt_llm._torch.models.modeling_utils import get_registered_draft_model_builder
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    return get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH).__module__


def builder_and_drafts(engine, target):
    from pathlib import Path

    from tests.trtllm.rank_script import whole

    return builder(), whole(Path(engine), target)


def main():
    from tensorrt_llm.llmapi.mpi_session import RemoteMpiCommSessionClient

    client = RemoteMpiCommSessionClient(os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"], b"key")
    if "--config" in sys.argv:
        with open(sys.argv[-1]) as config:
            print(json.dumps([client.submit_sync(builder), sys.argv, config.read()]))
    else:
        print(json.dumps(client.submit_sync(builder_and_drafts, *sys.argv[1:3])))
""",
}


def write_launcher(directory: Path) -> Path:
    """A trtllm-llmapi-launch and a trtllm-serve beside the package (llmapi/trtllm-llmapi-launch, mgmn_*_node.py)."""
    write_server(directory)
    for name, text in LAUNCHER.items():
        file = directory / "tensorrt_llm" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace("$PYTHON", sys.executable))
    return directory / "tensorrt_llm" / "trtllm-llmapi-launch"


def write_package(directory: Path, edits: dict[str, Edits] | None = None, generation: str = "8d62b3e5") -> Path:
    """Writes it into `directory` with the worker of a generation; `edits` replace texts of its files."""
    changes = {**(edits or {}), WORKER: (*GENERATIONS[generation], *(edits or {}).get(WORKER, ()))}
    for name, text in FILES.items():
        for old, new in changes.get(name, ()):
            assert old in text, old
            text = text.replace(old, new)
        file = directory / "tensorrt_llm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory

# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33's LiLiCorr head on random drafts, as golden values and live.

Its file alone, model_executor/models/lilicorr.py out of the wheel, with plain layers in the place of vLLM's parallel
ones: `unzip vllm-0.33.0-*.whl vllm/model_executor/models/lilicorr.py -d DIR`, and DIR in PYTHONPATH.
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from tests.reference.dflash_float64 import ReferenceDrafter
from tests.reference.synthetic import CORRELATOR, DraftSizes, write_random_draft

SIZES = DraftSizes()
TOP_K = CORRELATOR["lilicorr_candidate_topk"]
MODULE = "vllm/model_executor/models/lilicorr.py"


@dataclass(frozen=True)
class Case:
    """A draft, the rows of its context, and how many slots are proposed for."""

    name: str
    num_context: int
    num_tokens: int
    own_vocabulary: bool = False
    head_scale: float = 1.0
    """A small scale of the target's lm_head leaves some probability to tokens that are no candidates."""

    def write(self, directory: Path) -> Path:
        """The draft, in FP32."""
        return write_random_draft(
            directory, dialect="qwen3", lilicorr="plain", dtype=torch.float32, own_vocabulary=self.own_vocabulary
        )

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Taps [T, A*H], embeddings [V, H], the lm_head [V, H] of a target, and the anchor."""
        generator = torch.Generator().manual_seed(self.num_context)
        taps = torch.randn(self.num_context, SIZES.num_taps * SIZES.hidden, generator=generator)
        table, head = torch.randn(2, SIZES.vocab_size, SIZES.hidden, generator=generator)
        return taps, table, self.head_scale * head, 5


CASES = (
    Case("whole block", 20, 5),
    Case("short draft", 7, 3),
    Case("one slot", 11, 1),
    Case("own head", 12, 5, own_vocabulary=True),
    Case("flat head", 9, 5, head_scale=0.05),
)


def run(case: Case, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """hidden [S, H] of the float64 reference; ids [K, k], scores [K, k, k] and the greedy path [K] of vLLM's head."""
    draft = case.write(directory)
    taps, table, lm_head, anchor = case.inputs()
    reference, tensors = ReferenceDrafter.load(draft), load_file(draft / "model.safetensors")
    positions = np.arange(case.num_context)
    context = reference.context_kv(taps.double().numpy(), positions)
    own = tensors["embed_tokens.weight"] if case.own_vocabulary else table
    noise = own[torch.tensor([anchor] + [SIZES.vocab_size - 1] * (SIZES.block_size - 1))]
    block = case.num_context + np.arange(SIZES.block_size)
    hidden = reference.draft(noise.double().numpy(), *context, block)
    rows = torch.from_numpy(hidden[1 : 1 + case.num_tokens]).float()
    last = reference.norm("hidden_norm", reference.linear("fc", taps[-1:].double().numpy()))
    logits = rows @ (tensors["lm_head.weight"] if case.own_vocabulary else lm_head).T
    log_probs, ids = logits.log_softmax(-1).topk(TOP_K)
    config = json.loads((draft / "config.json").read_text())
    head = head_class()(
        model_hidden_size=SIZES.hidden, block_size=SIZES.block_size, rms_norm_eps=config["rms_norm_eps"],
        config=config["dflash_config"],
    )  # fmt: skip
    stored = {name.removeprefix("lilicorr."): t for name, t in tensors.items() if name.startswith("lilicorr.")}
    head.load_state_dict(stored)
    head.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        valid = torch.ones(1, dtype=torch.bool)
        scores = head(table[ids][None], log_probs[None], rows[None], torch.from_numpy(last).float(), valid)[0]
    taken, path = 0, []
    for slot in range(case.num_tokens):
        taken = int(scores[slot, taken].argmax())
        path.append(int(ids[slot, taken]))
    return {"hidden": hidden, "ids": ids.numpy(), "scores": scores.numpy(), "path": np.array(path)}


def head_class() -> Any:
    """LiLiCorrHead of the file in PYTHONPATH."""
    file = next(Path(entry) / MODULE for entry in sys.path if (Path(entry) / MODULE).is_file())
    with_plain_layers()
    spec = importlib.util.spec_from_file_location("vllm.model_executor.models.lilicorr", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiLiCorrHead


class Replicated(nn.Linear):
    """vLLM's linear layer on one rank."""

    def __init__(self, rows: int, columns: int, **_: Any) -> None:
        super().__init__(rows, columns)


class Mlp(nn.Module):
    """vLLM's NemotronHMLP on one rank."""

    def __init__(self, *, hidden_size: int, intermediate_size: int, output_size: int | None = None, **_: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, output_size or hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(nn.functional.silu(self.up_proj(x)))
        return y


def with_plain_layers() -> None:
    """Puts modules in the place of those that the file imports."""
    layers, models = "vllm.model_executor.layers", "vllm.model_executor.models"
    names = {
        "vllm.compilation.backends": {"set_model_tag": None},
        "vllm.compilation.decorators": {"support_torch_compile": lambda found: found},
        "vllm.config": {"VllmConfig": object},
        f"{layers}.linear": {"ReplicatedLinear": Replicated, "LinearBase": object, "UnquantizedLinearMethod": object},
        f"{layers}.logits_processor": {"LogitsProcessor": object},
        f"{layers}.quantization.base_config": {"QuantizationConfig": object},
        f"{layers}.quantization.modelopt": {"ModelOptLinearMethod": object},
        f"{layers}.quantization.utils.quant_utils": {"kNvfp4Static": None},
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": object},
        f"{models}.nemotron_h": {"NemotronHMLP": Mlp},
        f"{models}.qwen3_dflash": {"DFlashQwen3ForCausalLM": object, "DFlashQwen3Model": object},
        f"{models}.qwen3_dflash2": {"DFlash2Qwen3DecoderLayer": object},
        f"{models}.utils": {"AutoWeightsLoader": object, "maybe_prefix": lambda prefix, name: f"{prefix}.{name}"},
    }
    for name, values in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(sys.modules[name]).update(values)

# SPDX-License-Identifier: Apache-2.0
"""Xiaomi's drafts of MiMo-V2.5 and V2.6: the folder `dflash/` of the target's repository.

z-lab's layout with attention sinks, a factor on V, partial rotation, and a trained embedding of the mask token beside
the weights. Xiaomi publishes the embedding as a pickle, mask_embedding.pt; only mask_embedding.safetensors is read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.keys import SECTION
from dflash_trt.checkpoint.dialects.shared_keys import layer_types, layers, recognised_by
from dflash_trt.checkpoint.draft_spec import MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights, read_tensors
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError

SCALE = "attention_value_scale"
SLIDING_SINKS, FULL_SINKS = "add_swa_attention_sink_bias", "add_full_attention_sink_bias"
PICKLED_MASK, MASK_FILE = "mask_embedding.pt", "mask_embedding.safetensors"
CONVERSION = (
    'once, in that directory: python -c "import torch; from safetensors.torch import save_file;'
    " v = torch.load('mask_embedding.pt', weights_only=True); v = v['embedding'] if isinstance(v, dict) else v;"
    " save_file({'mask_embedding': v.flatten().contiguous()}, 'mask_embedding.safetensors')\""
)


def read(config: Facts, weights: Weights) -> DraftSpec:
    """z-lab's facts and MiMo's. Without model_type the layers are Qwen3's, as in MiMo's modelling code."""
    dflash, types = config.section(SECTION), layer_types(config)
    if "model_type" not in config:
        config = config.replaced(model_type="qwen3")
    spec = zlab.read(config, weights)
    if config.optional("v_head_dim", config.integer) not in (None, spec.head_dim):
        raise config.conflict("v_head_dim", f"head_dim {spec.head_dim}")
    tap_width = config.optional("target_hidden_size", config.integer)
    on_sliding, on_full = (config.flag(key, default=False) for key in (SLIDING_SINKS, FULL_SINKS))
    said = "attention_sink_bias" in dflash and dflash.flag("attention_sink_bias")
    if said != (on_sliding or on_full):
        raise dflash.conflict("attention_sink_bias", f"what {SLIDING_SINKS} and {FULL_SINKS} say of sinks")
    sinks = [on_sliding if each.slides else on_full for each in types]
    return msgspec.structs.replace(
        spec,
        layers=layers(types, spec.layers[0].causal if "is_causal" in config else None, sinks),
        value_scale=dflash.number(SCALE, default=1),
        tap_hidden_size=None if tap_width == spec.hidden_size else tap_width,
        mask_embedding=True,
    )


def load(directory: Path) -> Weights:
    """The weights and the mask token's embedding beside them; CheckpointError without it, as drafts would get worse."""
    weights = read_weights(directory)
    if MASK_EMBEDDING in weights:
        return weights
    if not (directory / MASK_FILE).is_file():
        raise CheckpointError(
            f"{directory}: missing {MASK_FILE}, the trained embedding of the mask token", hint=CONVERSION
        )
    tensors = read_tensors(directory / MASK_FILE)
    if tensors.keys() != {MASK_EMBEDDING}:
        raise CheckpointError(
            f"{directory / MASK_FILE}: expected the one tensor {MASK_EMBEDDING!r}, found {', '.join(tensors) or 'none'}"
        )
    return weights | tensors


MIMO = Dialect(
    name="mimo",
    recognises=recognised_by(section=(SCALE,), keys=(SLIDING_SINKS, FULL_SINKS)),
    read=read,
    is_canonical=False,
    load=load,
    canonical=zlab.canonical,
)

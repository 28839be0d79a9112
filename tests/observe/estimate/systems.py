# SPDX-License-Identifier: Apache-2.0
"""Systems that the tests of the cost model price."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.read_target_shape import shape_of
from dflash_trt.deploy.sizes import shape_sizes
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.inputs import eagle3_shape, system
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import StepModel
from tests.deploy.deployments import resolved

MOE, DENSE, ENGINE = "gpt-oss-120b.b300x8.latency", "qwen3-8b.h200x1.latency", "gpt-oss-120b.b300x8.nvfp4"
LATENT, HYBRID = "DeepSeek-V3", "Qwen3-Next-80B-A3B"
NAMES = (MOE, DENSE, ENGINE, LATENT, HYBRID)
# Layers by the published config.json.
CONFIGS: dict[str, dict[str, object]] = {
    LATENT: {
        **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128},
        **{"num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "intermediate_size": 18432},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "torch_dtype": "bfloat16"},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    HYBRID: {
        **{"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16},
        **{"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
        **{"linear_value_head_dim": 128, "vocab_size": 151936, "intermediate_size": 5120, "num_experts": 512},
        **{"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"},
    },
}

B300 = known_gpu("b300")


def target_of(name: str, **changes: object) -> TargetShape:
    """A target of CONFIGS, some facts changed; None removes a fact."""
    return shape_of(Facts(CONFIGS[name] | changes, Path("config.json")), name)


def system_of(name: str, **changes: object) -> System:
    """The system of build_configs/NAME.yaml under TensorRT-LLM; of CONFIGS, in the place of MOE's target."""
    machine = system(resolved(MOE if name in CONFIGS else name), "trtllm")
    if name in CONFIGS:
        target = target_of(name)
        load = msgspec.structs.replace(machine.memory, target_sizes=shape_sizes(target))
        machine = msgspec.structs.replace(machine, target=target, eagle3=eagle3_shape(target), memory=load)
    return msgspec.structs.replace(machine, **changes)


def model_of(name: str, **changed_rates: float) -> StepModel:
    """The cost model of a system, with some rates changed."""
    machine = system_of(name)
    return StepModel(machine, msgspec.structs.replace(rates(machine.gpu, machine.runtime), **changed_rates))

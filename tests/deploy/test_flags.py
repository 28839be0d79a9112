# SPDX-License-Identifier: Apache-2.0
"""Command lines: what is written is read back, and what is read is never guessed."""

from __future__ import annotations

import pytest

from dflash_trt.deploy.flags import command_text, is_command, normalize, parse_command
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.deploy.deployments import SERVED, rendered


@pytest.mark.parametrize(("name", "runtime"), [served for served in SERVED if served[1] != "trtllm"])
def test_round_trip(name: str, runtime: Runtime) -> None:
    arguments = rendered(name, runtime).arguments
    parsed = parse_command(command_text(runtime, arguments), load_schema(runtime, None))
    given = {key: value for key, value in arguments.items() if runtime == "vllm" or value is not False}
    assert parsed == given


def test_spellings_of_others() -> None:
    schema = load_schema("vllm", None)
    text = (
        "# mine\nvllm serve some/model --max-num-seqs=8 --max_model_len 4096 --enforce-eager \\\n"
        '  --no-enable-prefix-caching --speculative-config \'{"method": "dflash"}\' # end\n'
    )
    assert parse_command(text, schema) == {
        "model_tag": "some/model", "max_num_seqs": 8, "max_model_len": 4096, "enforce_eager": True,
        "enable_prefix_caching": False, "speculative_config": {"method": "dflash"},
    }  # fmt: skip


def test_values_stay_what_they_are() -> None:
    schema = load_schema("sglang", None)
    text = "python -m sglang.launch_server --model-path 123 --tp-size two --cuda-graph-bs-decode 1 2 4 --unknown 7"
    assert parse_command(text, schema) == {
        "model_path": "123", "tp_size": "two", "cuda_graph_bs_decode": [1, 2, 4], "unknown": "7",
    }  # fmt: skip


def test_other_names_of_an_argument() -> None:
    text = 'vllm serve m -tp 8 -sc \'{"method": "dflash"}\' --data-parallel-size -1'
    assert parse_command(text, load_schema("vllm", None)) == {
        "model_tag": "m", "tensor_parallel_size": 8, "speculative_config": {"method": "dflash"},
        "data_parallel_size": -1,
    }  # fmt: skip
    text = "sglang serve --model m --tensor-parallel-size 8"
    assert parse_command(text, load_schema("sglang", None)) == {"model_path": "m", "tp_size": 8}


def test_what_is_a_command() -> None:
    assert is_command("# head\n\nvllm serve x\n", "vllm")
    assert is_command("python3 -m sglang.launch_server", "sglang")
    assert not is_command("vllm serve x\n", "sglang")
    assert not is_command("max-num-seqs: 3\n", "vllm")
    assert not is_command("", "vllm")


def test_names_as_in_python() -> None:
    assert normalize({"max-num-seqs": 1, "zzz": 2}, load_schema("vllm", None)) == {"max_num_seqs": 1, "zzz": 2}
    assert normalize({"tensor-parallel-size": 2}, load_schema("sglang", None)) == {"tp_size": 2}

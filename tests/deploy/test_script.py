# SPDX-License-Identifier: Apache-2.0
"""Command lines as people write them: how the shell and the runtimes' parsers read them, so does `--check`."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tracemalloc
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.schema import load_schema, renamed_flags
from dflash_trt.deploy.script import MAX_EXPANDED, servers
from dflash_trt.errors import ConfigError

DRAFT = '{"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 15}'
SPEC = json.loads(DRAFT)


def parsed(text: str, runtime: str = "vllm") -> dict[str, Any]:
    (server,) = servers(text)
    assert server.runtime == runtime
    document, findings = parse_arguments(server.words, load_schema(runtime))
    assert findings == []
    return document


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve m --max-num-seqs=8 --max_model_len 4096", {"max_num_seqs": 8, "max_model_len": 4096}),
        ("vllm serve --enforce-eager m --port 8001", {"enforce_eager": True, "port": 8001}),
        ("vllm serve m --no-enable-prefix-caching # 'end", {"enable_prefix_caching": False}),
        ("vllm serve m \\\n  -tp 8 -O3", {"tensor_parallel_size": 8, "optimization_level": 3}),
        (f"vllm serve m -sc '{DRAFT}'", {"speculative_config": SPEC}),
        (f"vllm serve m --speculative-config '{DRAFT}' --gpu-memory-util .9",
         {"speculative_config": SPEC, "gpu_memory_utilization": 0.9}),
        ("vllm serve m --speculative-config.method dflash --speculative_config.num_speculative_tokens=15"
         " --speculative-config.model z-lab/Qwen3-8B-DFlash-b16", {"speculative_config": SPEC}),
        ("vllm serve m -cc.cudagraph_capture_sizes+ 1,2 -cc.mode 3",
         {"compilation_config": {"cudagraph_capture_sizes": ["1", "2"], "mode": 3}}),
        ("A=1 B=2 vllm serve m --served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("#!/bin/bash\nset -e\nexport X=1 && vllm serve m --port 1 & wait", {"port": 1}),
        ("export M=m K='9'\nvllm serve ${M} --port $K", {"port": 9}),
        ("vllm serve m --port ${PORT:-8000}", {"port": 8000}),
        ("docker run --gpus all -v vllm:/root -p 1:1 vllm/vllm-openai:v0.33.0 --model m --port 1", {"port": 1}),
        ("docker run --rm vllm/vllm-openai m --port 1", {"port": 1}),
        ("docker run --entrypoint python3 an/image -m vllm.entrypoints.openai.api_server --model m --port 1",
         {"port": 1}),
        ("A='--port 1 --max-num-seqs 8'\nvllm serve m $A", {"port": 1, "max_num_seqs": 8}),
        ("A='a b'\nvllm serve m --served-model-name \"$A\"", {"served_model_name": "a b"}),
        ("A='--port 1'\nA+=' --max-num-seqs 8'\nvllm serve m ${A}", {"port": 1, "max_num_seqs": 8}),
        ("A=(--port 1  # one\n --max-num-seqs 8\n)\nvllm serve m \"${A[@]}\"", {"port": 1, "max_num_seqs": 8}),
        ("A=(m)\nA+=(--port 1)\nvllm serve ${A[*]}", {"port": 1}),
        ("if true; then vllm serve m --port 1; fi", {"port": 1}),
        ("run() {\n (vllm serve m --port 1)\n}", {"port": 1}),
        ("bash -c 'cat > x <<E\nport: 1\nE\nvllm serve m --port 1'", {"port": 1}),
        ("srun -N1 bash -lc 'source x; vllm serve m --port 1'", {"port": 1}),
        ("vllm serve m --port 1 >log 2>&1 &", {"port": 1}),
        ("vllm serve m --port 1 2> \"a b\" &> log", {"port": 1}),
        ("python -m vllm.entrypoints.cli.main serve m --port 1", {"port": 1}),
        ("/opt/venv/bin/vllm serve m --data-parallel-size -1 > log 2>&1", {"data_parallel_size": -1}),
    ],
)  # fmt: skip
def test_vllm(text: str, expected: dict[str, Any]) -> None:
    document = parsed(text)
    assert document.pop("model_tag", None) or document.pop("model") == "m"
    assert document == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--model-path m --tp 8 --dp 2", {"tp_size": 8, "dp_size": 2}),
        ("--model m --tensor-parallel-size 8 --mem-fraction 0.7", {"tp_size": 8, "mem_fraction_static": 0.7}),
        ("--model m --cuda-graph-bs-decode 1 2 4 --trust-remote",
         {"cuda_graph_bs_decode": [1, 2, 4], "trust_remote_code": True}),
    ],
)  # fmt: skip
def test_sglang(text: str, expected: dict[str, Any]) -> None:
    for program in (
        "python3 -m sglang.launch_server",
        "sglang serve",
        "CUDA_VISIBLE_DEVICES=0 python -m sglang.launch_server",
    ):
        assert parsed(f"{program} {text}", "sglang") == {"model_path": "m"} | expected


@pytest.mark.parametrize(
    ("text", "rule", "severity", "words"),
    [
        ("vllm serve m --max-num 4", "ambiguous", ERROR, "which the runtime refuses"),
        ("vllm serve m x", "unknown-key", ERROR, "neither"),
        ("vllm serve m --tp 8", "unknown-key", ERROR, "write -tp"),
        ("vllm serve m --zzz 8", "unknown-key", ERROR, "look it up in the documents of your release"),
        ("vllm serve m --max-num-seq8 8", "unknown-key", ERROR, "write max_num_seqs"),
        ("vllm serve m -tp $TP", "variable", UNCHECKED, "known only to the shell"),
        ("vllm serve m $ARGUMENTS", "variable", UNCHECKED, "may be arguments"),
        ("vllm serve m \"${A[@]}\"", "variable", UNCHECKED, "may be arguments"),
        ("sglang serve --model m --enable-dp-attention-local", "abbreviated", WARNING, "local_control_broadcast"),
        ("sglang serve --model m --enable-dp-attentive", "unknown-key", ERROR, "look it up"),
        ("sglang serve --model m --kp-size 2", "unknown-key", ERROR, "look it up"),  # tp, dp, ep or pp?
    ],
)  # fmt: skip
def test_what_no_parser_takes_or_not_as_it_looks(
    text: str, rule: str, severity: str, words: str, tmp_path: Path
) -> None:
    runtime = "vllm" if text.startswith("vllm") else "sglang"
    (tmp_path / "run.sh").write_text(text)
    (config,) = file_configs(tmp_path / "run.sh", load_schema(runtime))
    (finding,) = [each for each in check(config) if each.rule == rule]
    assert finding.severity == severity
    assert words in str(finding)
    assert "remove" not in finding.fix


class Parser(argparse.ArgumentParser):
    """Raises ValueError in place of an exit."""

    def error(self, message: str) -> NoReturn:
        """Says why."""
        raise ValueError(message)


def test_prefixes_are_those_of_argparse() -> None:
    """Python's own parser, with the names of the schema: what it takes for a prefix, and what it refuses."""
    schema = load_schema("sglang")
    parser = Parser(add_help=False)
    targets: dict[str, list[str]] = {}
    for name, target in schema.names().items():
        targets.setdefault(target, []).append(f"--{name.replace('_', '-')}")
    for target, names in targets.items():
        parser.add_argument(*names, dest=target, nargs="?")
    renamed = renamed_flags().renamed["sglang"]  # told apart from the names that they begin
    for name in list(schema.names())[::7]:
        for length in (n for n in range(2, len(name), 4) if name[:n].rstrip("_") not in renamed):
            flag = f"--{name[:length].rstrip('_').replace('_', '-')}"
            try:
                known, unknown = parser.parse_known_args([flag, "x"])
                expected = {k for k, v in vars(known).items() if v is not None} if not unknown else {flag}
            except ValueError:  # ambiguous, to Python 3.11 even where both are names of one argument
                meant = {t for n, t in schema.names().items() if n.startswith(flag[2:].replace("-", "_"))}
                expected = meant if len(meant) == 1 else set()
            document, _ = parse_arguments([flag, "x"], schema)
            found = {flag if key == flag[2:].replace("-", "_") and key not in targets else key for key in document}
            assert (found - {"x"}) == expected or (not expected and not found), flag


@pytest.mark.parametrize(
    "text", ['a \'b c\' "d \\"e\\" \\$f" g\\ h', "x=\"1 2\" y'z'w", 'a "b\nc" d', "a \\\n b", "a''b ''"]
)
def test_words_are_those_of_a_shell(text: str) -> None:
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' vllm serve {text}"], capture_output=True, check=True).stdout
    (server,) = servers(f"vllm serve {text}")
    assert ["vllm", "serve", *server.words] == shown.decode().split("\0")[:-1]
    assert server.words == shlex.split(text.replace("\\\n", " "))[0:] or "$" in text


def test_scripts_of_several_servers_and_other_files(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("vllm serve a --port 1 &\nvllm serve b --zzz; echo 'vllm serve c'\nsglang serve --model d\n")
    first, second = file_configs(script, load_schema("vllm"))
    assert (first.served.target, second.served.target) == ("a", "b")
    assert len(file_configs(script, load_schema("sglang"))) == 1
    with pytest.raises(ConfigError, match="expected a server of trtllm, found one of vllm"):
        file_configs(script, load_schema("trtllm"))
    script.write_text("max-num-seqs: 3  # don't\n")
    assert file_configs(script, load_schema("vllm"))[0].document == {"max_num_seqs": 3}
    script.write_text("echo nothing")
    with pytest.raises(ConfigError, match="or a command that starts it, found 'echo nothing'"):
        file_configs(script, load_schema("vllm"))


def test_trtllm_serve_with_the_file_that_it_names(tmp_path: Path) -> None:
    script, schema = tmp_path / "run.sh", load_schema("trtllm")
    script.write_text(
        "export K=9\ncat > spec.yaml << 'EOF'\nspeculative_config:\n  decoding_type: DFlash\n  max_draft_len: $K\n"
        "kv_cache_config: {dtype: fp8}\nEOF\n"
        "trtllm-serve m --tp_size 8 --ep-size=2 --host 0.0.0.0 --kv_cache_free_gpu_memory_fraction 0.8"
        " --config spec.yaml --zzz 1 --max_batch_size 4\n"
    )
    (config,) = file_configs(script, schema)
    assert config.document == {
        "tensor_parallel_size": 8, "moe_expert_parallel_size": 2, "max_batch_size": 4,
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8, "dtype": "fp8"},
        "speculative_config": {"decoding_type": "DFlash", "max_draft_len": 9},
    }  # fmt: skip
    assert [finding.key for finding in config.reading] == ["zzz"]
    script.write_text("trtllm-serve m --extra_llm_api_options other.yaml")
    with pytest.raises(ConfigError, match=r"names 'other\.yaml', which is not beside it"):
        file_configs(script, schema)
    (tmp_path / "other.yaml").write_text("max_seq_len: 7\n")
    assert file_configs(script, schema)[0].document == {"max_seq_len": 7}


def doubling(times: int) -> str:
    """A script whose last variable is 10 * 2**times characters long."""
    steps = [f"v{n + 1}=$v{n}$v{n}" for n in range(times)]
    return "\n".join(["v0=0123456789", *steps, f"vllm serve m --served-model-name $v{times}"])


def test_expansion_of_variables_is_bounded(tmp_path: Path) -> None:
    (server,) = servers(doubling(3), max_expanded=10 * (2 + 4 + 8 + 8))
    assert server.words[-1] == "0123456789" * 8
    with pytest.raises(ConfigError, match="variable v3: the script's variables expand to more than 219 characters"):
        servers(doubling(3), max_expanded=10 * (2 + 4 + 8 + 8) - 1)
    (tmp_path / "run.sh").write_text(doubling(40))  # 10 TiB, were it expanded
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"variable v\d+: .* to more than 1048576 characters"):
        file_configs(tmp_path / "run.sh", load_schema("vllm"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 * MAX_EXPANDED


def test_shells_within_each_other_are_bounded() -> None:
    command = shlex.join(["bash", "-c", shlex.join(["bash", "-c", "vllm serve m"])])
    assert [server.runtime for server in servers(command, max_shells=3)] == ["vllm"]
    with pytest.raises(ConfigError, match=r"shells within each other \(bash -c\), found more"):
        servers(command, max_shells=2)

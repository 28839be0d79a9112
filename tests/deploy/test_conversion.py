# SPDX-License-Identifier: Apache-2.0
"""`serve-config --from`: command lines as people write them, with a DFlash draft in the place of other speculation."""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.deploy.checker import check
from dflash_trt.deploy.command_edits import with_value
from dflash_trt.deploy.conversion import SPECULATION, convert
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, WARNING
from dflash_trt.deploy.gpus import parse_gpus
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError
from tests.cli.commands import run
from tests.deploy.documented_commands import COMMANDS, QWEN, converted
from tests.paths import FIXTURES

READING = ("unknown-key", "renamed-key", "ambiguous", "wrong-type", "unknown-value", "out-of-range")


@pytest.mark.parametrize(("runtime", "text", "others"), COMMANDS)
def test_commands_of_the_documentation(runtime: str, text: str, others: tuple[str, ...], tmp_path: Path) -> None:
    """Speculation is the draft's, all else as it was but what is said; a check finds what was before, or asks the user.

    Flags of other releases, which no check knows, are refused by name; no other flag is, of the command as it was. A
    second conversion changes nothing.
    """
    options = {}
    if runtime == "trtllm":  # the YAML names no target
        options = {"draft": "z-lab/gpt-oss-120b-DFlash", "target": "openai/gpt-oss-120b"}
    (tmp_path / "run.sh").write_text(text)
    (before,) = file_configs(tmp_path / "run.sh", load_schema(runtime))
    assert {f.key for f in check(before) if f.severity == ERROR and f.rule in READING} == set(others)
    assert before.document
    done = converted(text, **options)
    if errors := {finding.key for finding in done.findings if finding.severity == ERROR}:
        assert errors <= set(others)
        return
    (tmp_path / "run.sh").write_text(done.text)
    (after,) = file_configs(tmp_path / "run.sh", load_schema(runtime), target=options.get("target"))
    changed, old, new = {change.key for change in done.changes}, before.document, after.document
    assert "DFLASH" in str(new.get("speculative_algorithm") or new["speculative_config"]).upper()
    assert new.get({"sglang": "enable_metrics", "trtllm": "return_perf_metrics"}.get(runtime, ""), True) is True
    differing = {key for key in old.keys() | new.keys() if new.get(key) != old.get(key)}
    assert differing == {key.partition(".")[0] for key in changed if not key.isupper()}
    lost = Counter(shlex.split(text)) - Counter(shlex.split(done.text))
    flags = {word[2:].partition(".")[0].replace("-", "_") for word in lost if word.startswith("--")}
    assert {flag for flag in flags if not SPECULATION.fullmatch(flag)} <= changed
    warnings = [{(f.rule, f.key) for f in check(config) if f.severity == WARNING} for config in (before, after)]
    # A K that the command chose, and whether answers are to think
    assert {rule for rule, _ in warnings[1] - warnings[0]} <= {"draft-length", "chat-mode"}
    again = converted(done.text, **options)
    assert (again.changes, again.text) == ([], done.text)
    subprocess.run(["bash", "-n"], input=done.text, text=True, check=True)


def test_the_rest_of_a_script_stays_as_it_is_written() -> None:
    script = """#!/bin/bash
# ours
export MODEL=Qwen/Qwen3-8B PORT=8000
CUDA_VISIBLE_DEVICES=0 vllm serve "$MODEL" \\
  --port $PORT --served-model-name 'my model' \\
  {} --max-num-seqs 64 \\
  {} > "server log" 2>&1 &  # wait
curl localhost:$PORT | tee x
"""
    old = "--speculative-config.method=eagle3 --speculative-config.model e3 -sc.num_speculative_tokens 3"
    spec = f'{{"method": "dflash", "model": "{QWEN}", "num_speculative_tokens": 15}}'
    done = converted(script.format(old, "--enable-prefix-caching"))
    assert done.text == script.format(f"--speculative-config '{spec}'", "--no-enable-prefix-caching")
    said = [str(change) for change in done.changes]
    assert said[0].startswith('speculative_config: {"method":"dflash"')
    assert said[0].endswith('in the place of {"method":"eagle3","model":"e3","num_speculative_tokens":3}')
    assert said[1].startswith("enable_prefix_caching: false: expected false, found true: tokens that a hit spares")
    plain = converted("vllm serve Qwen/Qwen3-8B \\\n    --port 1 # x\necho")
    added = f"--speculative-config '{spec}' \\\n    --no-enable-prefix-caching"
    assert plain.text == f"vllm serve Qwen/Qwen3-8B \\\n    --port 1 \\\n    {added} # x\necho"


def test_another_dflash_draft_keeps_what_the_command_says_of_drafts() -> None:
    spec = '"num_speculative_tokens": {}, "model": "{}", "attention_backend": "flash_attn", "method": "dflash"'
    text = f"vllm serve m --no-enable-prefix-caching -sc '{{{spec}}}'".replace("{{", "{").replace("}}", "}")
    other = "z-lab/Qwen3.6-27B-DFlash"
    for K, kept in ((7, 7), (40, 15)):
        done = converted(text.replace("{}", str(K), 1).replace("{}", other))
        assert done.text.partition("--speculative-config ")[2] == "'{" + spec.format(kept, QWEN) + "}'"
    same = text.replace("{}", "7", 1).replace("{}", QWEN)
    assert converted(same).text == same


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("A=1 vllm serve {} -tp 2", "A=1 LAYOUT vllm serve {} -tp 2 "),
        ("srun vllm serve {} -tp 2", "LAYOUT srun vllm serve {} -tp 2 "),
        ("docker run --rm vllm/vllm-openai {}", "docker run --env LAYOUT --rm vllm/vllm-openai {} "),
    ],
)
def test_a_variable_stands_where_the_server_sees_it(start: str, found: str) -> None:
    target = "Qwen/Qwen3.6-35B-A3B"
    done = converted(start.format(target), draft="z-lab/Qwen3.6-35B-A3B-DFlash")
    assert done.text.startswith(found.format(target).replace("LAYOUT", "VLLM_KV_CACHE_LAYOUT=BLHNC"))


def test_trtllm_with_its_file_beside_it(tmp_path: Path) -> None:
    """The script rewrites the file, after the lines that Slurm reads; the old one stays."""
    text = (
        "# ours\nmax_batch_size: 32  # few\nmax_seq_len: 4096\nspeculative_config:\n  decoding_type: Eagle3\n"
        "  speculative_model: e3\n  max_draft_len: 3\n# cache\nkv_cache_config: {dtype: fp8}  # small\n"
    )
    (tmp_path / "c.yaml").write_text(text)
    script = "#!/bin/bash\n#SBATCH -N1\n\ntrtllm-serve openai/gpt-oss-120b --config=c.yaml --tp_size 8\n"
    done = convert(script, tmp_path / "run.sh", draft="z-lab/gpt-oss-120b-DFlash")
    head, written, rest = done.text.partition("cat > c.dflash.yaml <<'EOF'\n")
    assert (head, written) != (done.text, "")
    assert head == "#!/bin/bash\n#SBATCH -N1\n\n"
    new, _, command = rest.partition("EOF\n")
    assert command == "trtllm-serve openai/gpt-oss-120b --config=c.dflash.yaml --tp_size 8\n"
    assert new.startswith(
        "# ours\nmax_batch_size: 32  # few\nmax_seq_len: 4096\nspeculative_config:\n  decoding_type: DFlash\n"
    )
    assert "\n# cache\nkv_cache_config: {dtype: fp8, enable_block_reuse: false}  # small\n" in new
    assert (tmp_path / "c.yaml").read_text() == text
    alone = convert(text, tmp_path / "c.yaml", draft="z-lab/gpt-oss-120b-DFlash", runtime="trtllm")
    assert yaml.safe_load(alone.text) == yaml.safe_load(new)
    none = convert("trtllm-serve m --max_seq_len 4096\n", tmp_path / "x", draft="z-lab/gpt-oss-120b-DFlash")
    assert none.text.endswith("EOF\ntrtllm-serve m --max_seq_len 4096 --config dflash.yaml\n")
    on_gpus = convert(
        text, tmp_path / "c.yaml", draft="z-lab/gpt-oss-120b-DFlash", runtime="trtllm", gpus=parse_gpus("b300x8", "")
    )
    assert yaml.safe_load(on_gpus.text)["speculative_config"]["attention_backend"] == "TRTLLM"


@pytest.mark.parametrize("caching", ["--enable-prefix-caching ", "--no-enable-prefix-caching ", ""])
def test_a_command_that_drafts_already_gets_what_its_drafts_need(caching: str, tmp_path: Path) -> None:
    """Findings whose mending changes more than the drafts (parsers) are left, and stderr mentions them."""
    spec = f'{{"method": "dflash", "model": "{QWEN}", "num_speculative_tokens": 15}}'
    (tmp_path / "run.sh").write_text(f"vllm serve Qwen/Qwen3-8B {caching}--speculative-config '{spec}'\n")
    result = run("serve-config", "--from", tmp_path / "run.sh", "--draft", QWEN)
    assert result.stdout.count("prefix-caching") == result.stdout.count("--no-enable-prefix-caching") == 1
    assert "changed: enable_prefix_caching: false" in result.stderr or caching.startswith("--no-")
    assert "[prefix-reuse]" not in result.stderr
    assert "[parsers]" in result.stderr
    assert ("findings above are left" in result.stderr) == caching.startswith("--no-")


YAML = (
    "", "a: 1\n", "# x\na:\n  b: 1 # y\n  c:\n  - 1\n\n# z\nd: 2", "{a: {b: 1}, d: 2}", "a: {}\n",
    "a:\n- 1\n- {e: f}\n# x\n", "a: |\n  text\n  more\nd: 'x # y'\n", "---\na: {b: [1,\n   2]}\n",
)  # fmt: skip


@pytest.mark.parametrize("path", ["a", "a.b", "a.c", "d", "e", "e.f"])
def test_yaml_with_a_value_reads_as_if_it_was_set(path: str) -> None:
    for text, value in product(YAML, (1, {"x": [1, 2]})):
        _check_yaml(text, path, value)


def _check_yaml(text: str, path: str, value: object) -> None:
    expected = yaml.safe_load(text) or {}
    outer, _, inner = path.partition(".")
    section = expected.get(outer)
    expected[outer] = value if not inner else (section if isinstance(section, dict) else {}) | {inner: value}
    new = with_value(text, path, value)
    assert yaml.safe_load(new) == expected
    assert all(comment in new for comment in ("# x", "# z") if comment in text)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("vllm serve a\nvllm serve b", {}, "expected one command that starts vllm, sglang or trtllm-serve, found 2"),
        ("echo", {}, "found 0"),
        ("vllm serve a", {"runtime": "sglang"}, "expected one command that starts sglang, found one of vllm"),
        ("bash -c 'vllm serve a'", {}, "found one that is quoted for another shell"),
        ("vllm serve a", {"draft": "no-such"}, "--draft: expected a directory or a Hugging Face repository id"),
        ("trtllm-serve m --config /proc/version", {}, "names /proc/version, outside its folder"),
        ("trtllm-serve m --config no.yaml", {}, r"names 'no\.yaml', which is not beside it"),
    ],
)
def test_what_is_refused(text: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        converted(text, **options)


def test_the_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("vllm serve Qwen/Qwen3-8B --zzz 1\n")
    refused = run("serve-config", "--from", script, "--draft", QWEN)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "error: zzz: not known to this schema" in refused.stderr
    assert f"{script} cannot run in vllm: 1 error" in refused.stderr
    script.write_text(f"vllm serve {FIXTURES / 'tiny-qwen3'} --max-model-len 64\n")
    done = run("serve-config", "--from", script, "--draft", FIXTURES / "tiny-qwen3-dflash")
    assert done.returncode == 0, done.stderr
    assert "changed: speculative_config: " in done.stderr
    script.write_text(done.stdout)
    assert run("serve-config", "--check", script, "--runtime", "vllm").returncode == 0
    again = run("serve-config", "--from", script, "--draft", FIXTURES / "tiny-qwen3-dflash")
    assert (again.stdout, "nothing to change" in again.stderr) == (done.stdout, True)
    other = run("serve-config", "--from", script, "--draft", FIXTURES / "tiny-gpt-oss-dflash")
    assert (other.returncode, other.stdout) == (1, "")
    assert "does not fit target" in other.stderr
    for wrong in (["--draft", QWEN, "-o", "x"], [], ["--draft", QWEN, "--runtime", "dynamo-vllm"]):
        assert run("serve-config", "--from", script, *wrong).returncode == 2

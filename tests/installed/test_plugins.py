# SPDX-License-Identifier: Apache-2.0
"""Plug-ins as users install them: the examples of the docs, and a broken one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engines import trained_engine
from tests.paths import FIXTURES, REPOSITORY
from tests.waiting import PATIENCE

pytestmark = pytest.mark.full

EXAMPLES = REPOSITORY / "docs" / "examples" / "plugins"
ENGINE, TARGET, PROMPT = "tiny-qwen3", FIXTURES / "tiny-qwen3", "def quicksort("


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages with the examples, installed by pip."""
    source, target = tmp_path_factory.mktemp("source") / "plugins", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLES, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True, timeout=PATIENCE)
    return target


def dflash(site: Path, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dflash_trt", *map(str, words)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(site)} | environment, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def generated(site: Path, *options: object, **environment: str) -> dict[str, Any]:
    words = ("generate", trained_engine(ENGINE), "--target", TARGET, "--max-tokens", 40, "--ignore-eos", "--json")
    done = dflash(site, *words, *options, PROMPT, **environment)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["requests"]
    return dict(answer)


def test_all_are_listed(site: Path) -> None:
    text = dflash(site, "doctor", "--json").stdout
    found = {entry["name"]: entry["found"] for entry in json.loads(text)["findings"]}
    assert found["plug-in top-3"] == "acceptance rule of dflash-trt-plugin-examples 1.0"
    assert {"plug-in my-team", "plug-in banned", "plug-in half"} <= found.keys()


def test_a_dialect(site: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(FIXTURES / "tiny-qwen3-dflash", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"my_team_release": "2"}))
    tensors = load_file(draft / "model.safetensors")
    tensors["fuse.weight"] = tensors.pop("fc.weight")
    save_file(tensors, draft / "model.safetensors")
    assert dflash(tmp_path, "inspect", draft).returncode == 1
    assert dflash(site, "inspect", draft).returncode == 0
    built = dflash(site, "build", draft, "--target", TARGET, "-o", tmp_path / "engine")
    assert built.returncode == 0, built.stderr


def test_a_logits_processor(site: Path) -> None:
    tokens = generated(site)["token_ids"]
    banned = max(tokens, key=tokens.count)
    assert banned not in generated(site, BANNED_TOKENS=str(banned))["token_ids"]


def test_a_draft_length_policy(site: Path) -> None:
    whole, half = generated(site, "--draft-length", 7), generated(site, "--draft-length", "half")
    assert half["token_ids"] == whole["token_ids"]
    assert [len(answer["accepted_by_position"]) for answer in (whole, half)] == [7, 4]


def test_an_acceptance_rule(site: Path) -> None:
    exact, relaxed = (
        generated(site, "--draft-length", 7),
        generated(site, "--draft-length", 7, "--acceptance-rule", "top-3"),
    )
    assert relaxed["tau"] > exact["tau"]
    assert relaxed["token_ids"] != exact["token_ids"]
    words = ("generate", trained_engine(ENGINE), "--target", TARGET, "--acceptance-rule", "top-4", PROMPT)
    refused = dflash(site, *words)
    assert "no acceptance rule is called top-4; there are exact, top-3" in refused.stderr
    assert "hint: did you mean top-3?" in refused.stderr


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("my_dialect", "import no_such_module", ("inspect", FIXTURES / "tiny-qwen3-dflash")),
        ("my_dialect", "MY_TEAM = 3", ("inspect", FIXTURES / "tiny-qwen3-dflash")),
        ("banned_tokens", "def processor(params, vocab_size): return params.no_such", ("generate",)),
        ("banned_tokens", "class P:\n def process(s, a, b): 1 / 0\ndef processor(p, v): return P()", ("generate",)),
        ("half_block", "def HalfBlock(n): raise KeyError(n)", ("generate", "--draft-length", "half")),
        ("top_three", "def accepts(logits, proposal): return undefined", ("generate", "--acceptance-rule", "top-3")),
    ],
)
def test_a_broken_one_is_named(module: str, code: str, words: tuple[object, ...], site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / f"{module}.py").write_text(code)
    given = (
        (trained_engine(ENGINE), "--target", TARGET, "--draft-length", "3", PROMPT) if words[0] == "generate" else ()
    )
    done = dflash(broken, words[0], *given, *words[1:])
    assert done.returncode == 1, done.stderr
    assert "error: the plug-in " in done.stderr
    assert "dflash-trt-plugin-examples" in done.stderr
    assert "Traceback" not in done.stderr

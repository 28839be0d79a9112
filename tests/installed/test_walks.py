# SPDX-License-Identifier: Apache-2.0
"""Seven kinds of new users, from a fresh clone and an empty home: the commands of README and their page, as printed.

Each walk has a clone and an environment of its own, and no variables but pip's and a proxy's. It installs as README
says and stops where a GPU begins, or a network beyond the package index; fixtures stand for models that would be
downloaded. Each walk lists the words that it replaces and the commands that it leaves out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.paths import REPOSITORY
from tests.test_readme import FENCE, path_of_the_readme
from tests.waiting import PATIENCE

INDEX = re.compile(r"PIP_|(https?|no|all)_proxy$|SSL_CERT_", re.IGNORECASE)
"""Variables that say how pip reaches a package index."""
QWEN3, QWEN3_DRAFT = "tests/fixtures/tiny-qwen3", "tests/fixtures/tiny-qwen3-dflash"
GPT_OSS, GPT_OSS_DRAFT = "tests/fixtures/tiny-gpt-oss", "tests/fixtures/tiny-gpt-oss-dflash"


def section(page: str, heading: str = "") -> str:
    """Text of a page from a heading, any level, to the next one of that level; the whole page without one."""
    text = (REPOSITORY / page).read_text()
    if not heading:
        return text
    marks = heading.partition(" ")[0]
    _, found, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert found, f"{page} has no {heading!r}"
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def commands(page: str, heading: str = "") -> str:
    """The shell commands of a page, or of the part below a heading, those in lists included."""
    return "".join(FENCE.findall(re.sub(r"^    (?=\S)", "", section(page, heading), flags=re.MULTILINE)))


def replaced(script: str, substitutes: dict[str, object]) -> str:
    for words, fitting in substitutes.items():
        assert words in script, f"{words!r} is no longer printed"
        script = script.replace(words, str(fitting))
    return script


class Newcomer:
    """A user with a fresh clone in an empty home."""

    def __init__(self, home: Path) -> None:
        self.clone = home / "dflash-trt"
        python = Path(sys.base_prefix, "bin")
        index = {name: value for name, value in os.environ.items() if INDEX.match(name)}
        self.environment = index | {"HOME": str(home), "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin"}
        subprocess.run(["git", "clone", "--quiet", REPOSITORY, self.clone], check=True)

    def start(self, script: str, **pipes: int) -> subprocess.Popen[str]:
        command = ["bash", "-euo", "pipefail", "-c", script]
        return subprocess.Popen(command, cwd=self.clone, env=self.environment, text=True, **pipes)

    def run(self, script: str) -> str:
        """Output of the commands, stderr included; the first one that fails ends them."""
        process = self.start(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=4 * PATIENCE)
        assert process.returncode == 0, said[-5000:]
        return said

    def install(self) -> None:
        """README's first two commands, in an environment without a GPU."""
        demo, activate, _ = path_of_the_readme("Install").splitlines()
        assert demo.partition(" #")[0].strip() == "make demo"
        said = self.run(demo)
        assert "tau" in said
        self.activate = f"{activate}\n"
        assert self.run(f"{self.activate}command -v dflash-trt") == f"{self.clone}/.venv/bin/dflash-trt\n"

    def follow(self, script: str) -> str:
        return self.run(self.activate + script)


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    user = Newcomer(tmp_path)
    user.install()
    return user


def gpu_at_home(user: Newcomer) -> None:
    """Plans for the card are built without it; the kernels' compiler, decoding and `steps.sh` need its machine."""
    script, begins, _ = commands("docs/engine.md", "## An RTX 5090 at home: Qwen3-8B with DFlash").partition(
        "dflash-trt generate engine --device cuda"
    )
    assert begins
    pair = {"z-lab/Qwen3-8B-DFlash-b16": QWEN3_DRAFT, "--target Qwen/Qwen3-8B": f"--target {QWEN3}"}
    user.follow(replaced(script, pair | {"DFLASH_CUDA=ON": "DFLASH_CUDA=OFF"}))
    assert (user.clone / "engine" / "draft.plan").stat().st_size > 1_000_000
    assert "serve Qwen/Qwen3-8B" in (user.clone / "serve.sh").read_text()
    user.run("bash -n steps.sh && bash -n serve.sh")


def first_line_of_python(user: Newcomer) -> None:
    """The page's first example, and the line of the list with the engine of `make demo`."""
    example = re.findall(r"^```python\n(.*?)^```", section("docs/runtime.md"), re.MULTILINE | re.DOTALL)[0]
    (user.clone / "first.py").write_text(example)
    assert len(user.follow("python first.py")) > 100
    assert 'LLM("demo")' in section("docs/start.md")
    line = 'from dflash_trt import LLM; print(LLM("demo").generate("def quicksort(")[0].tau)'
    assert float(user.follow(f"python -c '{line}'").splitlines()[-1]) > 1


def own_draft(user: Newcomer) -> None:
    """Every command of the page, modelopt's calibration included."""
    page = section("docs/own_draft.md")
    assert "pip install 'dflash-trt[calibrate]'" in page
    said = user.follow("pip install --quiet 'dflash-trt[calibrate]'\n" + commands("docs/own_draft.md"))
    (loss, *_) = re.findall(r"tau loss\W+([0-9.]+)%", said)
    assert 6 < float(loss) < 10
    assert {"engine-calibrated", "quantised", "recovered"} <= {path.name for path in user.clone.iterdir()}


def dgx(user: Newcomer) -> None:
    """Walkthrough up to the GPU machine, EAGLE-3 swapped, files for clusters; doctor may judge the small draft."""
    text, step, _ = section("docs/walkthrough.md").partition("## 5. Serve, on the GPU machine")
    assert step
    pair = {"z-lab/gpt-oss-120b-DFlash": GPT_OSS_DRAFT, "--target openai/gpt-oss-120b": f"--target {GPT_OSS}"}
    trial = {"dflash-trt try demo": "dflash-trt try demo || [[ $? == 1 ]]"}
    said = user.follow(replaced("".join(FENCE.findall(text)), pair | trial))
    assert "demo works" in said
    assert "serve.yaml: nothing wrong in what was checked" in said
    assert "trtllm-serve openai/gpt-oss-120b" in (user.clone / "steps.sh").read_text()
    user.follow(commands("docs/swap_eagle3.md", "## 1. Change the command"))
    assert '"method": "dflash"' in (user.clone / "dflash.sh").read_text()
    user.follow(commands("docs/scaling.md", "## Slurm") + commands("docs/scaling.md", "## Kubernetes"))
    user.run("bash -n serve.sbatch")
    for name in ("serve.yaml", "graph.yaml"):
        assert all(yaml.safe_load_all((user.clone / name).read_text()))


@contextmanager
def served(user: Newcomer) -> Iterator[str]:
    """Address of `dflash-trt serve demo`."""
    script = f"{user.activate}exec dflash-trt serve demo --port 0"
    process = user.start(script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        yield next(line for line in process.stderr if line.startswith("serving ")).split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Completions one after the other, as users would send them."""
    body = json.dumps({"model": "demo", "prompt": "def f(", "max_tokens": 200, "temperature": 0}).encode()
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            with suppress(URLError):
                urlopen(Request(f"{url}/v1/completions", body, {"content-type": "application/json"})).read()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slow_server(user: Newcomer) -> None:
    """`dflash-trt serve demo` in the place of the server, with time for a busy machine; no Prometheus is asked."""
    passive, prometheus = FENCE.findall(section("docs/slow_endpoint.md"))[0].splitlines()
    assert "--prometheus http://localhost:9090" in prometheus
    with served(user) as url:
        here = {"http://localhost:8000": url}
        with traffic(url):
            said = user.follow(replaced(passive, here | {"--expect-tau 4.2": "--expect-tau 2"}))
        assert "nothing wrong in" in said
        patient = {"http://localhost:8000": f"{url} --seconds 600"}
        said = user.follow(replaced(FENCE.findall(section("docs/slow_endpoint.md"))[1], patient))
        assert "against the baseline's" in said
        metrics = urlopen(f"{url}/metrics").read().decode()
    alerts = (user.clone / "docs" / "dashboards" / "dflash_trt.rules.yaml").read_text()
    names = set(re.findall(r"\b(?:vllm|dflash):\w+", alerts))
    assert names
    assert {name for name in names if name not in metrics} == set()


def contributor(user: Newcomer) -> None:
    """Every command; `make test` on two folders, the only thing that the environment changes."""
    user.environment["PYTEST_ADDOPTS"] = "tests/files tests/api"
    user.run(commands(".github/CONTRIBUTING.md", "## Set up"))
    assert (user.clone / ".git" / "hooks" / "pre-commit").exists()
    del user.environment["PYTEST_ADDOPTS"]
    assert " passed" in user.run(commands(".github/CONTRIBUTING.md", "## The one test to run"))


def trained_elsewhere(user: Newcomer) -> None:
    """A draft in speculators' layout, written by the page's `convert`, and back by the line of the list."""
    write = replaced(
        commands("docs/checkpoints.md", "## Convert"),
        {"DRAFT": QWEN3_DRAFT, "-o OUT": "-o checkpoint_best", "--target Qwen/Qwen3-8B": f"--target {QWEN3}"},
    )
    (line,) = re.findall(r"`(dflash-trt\s+convert [^`]*)`", section("docs/start.md"))
    user.follow(f"{write}{' '.join(line.split())}\ndflash-trt inspect draft --target {QWEN3}")
    before, after = (user.clone / QWEN3_DRAFT / "model.safetensors", user.clone / "draft" / "model.safetensors")
    assert after.stat().st_size == pytest.approx(before.stat().st_size, rel=0.01)


WALKS: dict[str, tuple[Callable[[Newcomer], None], set[str]]] = {
    "A GPU at home": (gpu_at_home, {"engine.md#an-rtx-5090-at-home-qwen3-8b-with-dflash"}),
    "A first line of Python": (first_line_of_python, {"runtime.md"}),
    "A draft of your own": (own_draft, {"own_draft.md"}),
    "A DGX to configure": (dgx, {"walkthrough.md", "swap_eagle3.md", "scaling.md"}),
    "A slow server": (slow_server, {"slow_endpoint.md"}),
    "A change to dflash-trt": (contributor, {"../.github/CONTRIBUTING.md", "structure.md"}),
    "A draft trained with SpecForge or speculators": (trained_elsewhere, {"checkpoints.md#convert"}),
}
"""Walks of the users that docs/start.md lists, and the pages that it sends each of them to."""


def test_every_user_of_the_list_has_a_walk() -> None:
    users = re.findall(r"^\* \*\*(.+?)\*\*: (.*(?:\n  .*)*)", section("docs/start.md"), re.MULTILINE)
    assert {name: set(re.findall(r"\]\((\S+?)\)", text)) for name, text in users} == {
        name: pages for name, (_, pages) in WALKS.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("name", WALKS)
def test_walk(name: str, newcomer: Newcomer) -> None:
    WALKS[name][0](newcomer)

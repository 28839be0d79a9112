# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor`: of this machine, of a server, and of ranks under mpich on GPUs that this one does not have."""

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.cli.doctor_ranks import Rank, gather_ranks, look, print_ranks, problems
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.errors import ConfigError, EndpointError, MissingDependencyError
from dflash_trt.observe.diagnosis.checks import Check, EndpointFinding
from dflash_trt.observe.diagnosis.diagnosis import SCHEMA, Diagnosis
from dflash_trt.observe.diagnosis.judge_acceptance import low_acceptance
from tests.checkpoint.samples import refusal
from tests.cli.commands import run, run_here, run_process
from tests.engines import build
from tests.observe.diagnosis.samples import group
from tests.observe.endpoints.canned import canned
from tests.paths import FIXTURES, REPOSITORY
from tests.waiting import PATIENCE

MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"


@pytest.fixture
def engine(draft_dir: Path, tmp_path: Path) -> Path:
    build(draft_dir, tmp_path / "engine")
    return tmp_path / "engine"


def doctor(*groups: tuple[int, Path]) -> subprocess.CompletedProcess[str]:
    """`doctor --ranks --json` on ranks in groups, each of which looks at its own engine."""
    pytest.importorskip("mpi4py", reason="pip install -e '.[dev]' has it")
    if not MPIEXEC.is_file():
        pytest.skip("pip install -e '.[dev]' has mpiexec")
    words = []
    for count, engine in groups:
        words += [":", "-n", str(count), sys.executable, "-m", "dflash_trt", "doctor", "--ranks", str(engine), "--json"]
    command = [str(MPIEXEC), *words[1:]]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.full
def test_ranks_that_are_alike(engine: Path) -> None:
    result = doctor((2, engine))
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["schema"], document["problems"]) == ("dflash-trt/doctor-ranks/1", [])
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert len({json.dumps(rank["facts"]) for rank in document["ranks"]}) == 1
    assert len(document["ranks"][0]["facts"]["engine sha256"]) == 64


def test_a_rank_with_another_engine_is_named(engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(engine, other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps(manifest | {"tool_version": "0.0.1"}))
    result = doctor((1, engine), (1, other))
    assert result.returncode == 1
    assert "error: rank 1 (" in result.stderr
    assert "engine sha256: expected " in result.stderr
    assert "as on 1 of 2 ranks, found " in result.stderr
    assert len(json.loads(result.stdout)["problems"]) == 1


def test_an_engine_that_ranks_share(tmp_path: Path) -> None:
    """Damage in the part of any rank is named, and too few ranks are."""
    draft, target = read_draft(FIXTURES / "tiny-gpt-oss-dflash"), read_target(FIXTURES / "tiny-gpt-oss")
    engine = tmp_path / "engine"
    build_engine(BuildOptions(draft=draft, draft_name="draft", target=target, output=engine, num_ranks=2))
    looks = look(0, 0, tmp_path / "engine"), look(1, 0, tmp_path / "engine")
    assert problems(looks) == []
    assert problems(looks[:1]) == [
        "engine: expected 2 ranks, which share its drafter, or several times as many, found 1"
    ]
    (tmp_path / "engine" / "rank1" / "draft.0.onnx").write_bytes(b"")
    (problem,) = problems([look(rank, 0, tmp_path / "engine") for rank in range(2)])
    assert problem.startswith(f"{tmp_path}/engine/rank1/draft.0.onnx: expected sha256 ")


def test_an_engine_that_no_rank_can_read(tmp_path: Path) -> None:
    (problem,) = problems([look(rank, 0, tmp_path) for rank in range(2)])
    assert problem.startswith(f"{tmp_path} is not an engine directory: found ")


def rank(number: int, host: str = "a", gpu: int | None = 0, **facts: str) -> Rank:
    device = None if gpu is None else Gpu(name="NVIDIA B300", compute_capability="10.3", uuid=f"uuid-{gpu}")
    return Rank(rank=number, host=host, gpu=device, facts={"plugin sha256": "p", "torch": "2.13.0"} | facts)


def test_every_fact_is_compared() -> None:
    ranks = [rank(index, gpu=index) for index in range(4)]
    assert problems(ranks) == []
    for fact in ranks[0].facts:
        odd = msgspec.structs.replace(ranks[2], facts=ranks[2].facts | {fact: "other"})
        (problem,) = problems([*ranks[:2], odd, ranks[3]])
        assert problem.startswith(f"rank 2 (a): {fact}: expected ")
        assert problem.endswith("as on 3 of 4 ranks, found other")


@pytest.mark.parametrize("first", [{}, {"engine sha256": "e"}])
def test_ranks_of_which_some_have_no_engine(first: dict[str, str]) -> None:
    ranks = [rank(0, **first), *(rank(index, gpu=index, **{"engine sha256": "e"}) for index in (1, 2))]
    found = [] if first else ["rank 0 (a): engine sha256: expected e as on 2 of 3 ranks, found missing"]
    assert problems(ranks) == found


def test_the_table_of_ranks_of_which_some_have_no_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_ranks([rank(0, gpu=None), rank(1, gpu=None, **{"engine sha256": "f" * 64})])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    assert [(row[1], row[4]) for row in rows if row[1] in ("0", "1")] == [("0", "missing"), ("1", "f" * 12)]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(0), rank(1, gpu=1), rank(2, host="b")], []),
        ([rank(0, gpu=None), rank(1, gpu=None)], []),
        ([rank(0), rank(1)], ["rank 1 (a): expected a GPU of its own, found NVIDIA B300 uuid-0, which rank 0 uses"]),
        ([rank(0), rank(1, gpu=None)], ["rank 1 (a): no usable GPU found"]),
    ],
)
def test_every_rank_has_its_own_gpu(ranks: list[Rank], expected: list[str]) -> None:
    assert problems(ranks) == expected


def test_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # type: ignore[arg-type]
    message = refusal(lambda: gather_ranks(None), MissingDependencyError)
    assert "--ranks: expected the package mpi4py with its MPI, found" in message
    assert "pip install mpi4py mpich" in message


Diagnosing = Callable[..., Diagnosis]


def diagnosis(*findings: EndpointFinding) -> Diagnosis:
    return Diagnosis(
        url="http://h", runtime="vllm", version="0.32.0", model="m", is_chat=True, acceptance="counters", seconds=61.4,
        groups=[group("short prompts"), group("thinking on", count=0)], speeds=[], findings=list(findings), notes=[],
        unmeasured=[], checks=[Check(name="acceptance", verdict="WRONG" if findings else "fine", figure="tau 2.93")],
    )  # fmt: skip


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Callable[[Diagnosis], None]:
    def install(found: Diagnosis) -> None:
        monkeypatch.setattr("dflash_trt.observe.diagnosis.diagnosis.diagnose", lambda client, **_: found)

    return install


def test_a_key_is_needed(tmp_path: Path) -> None:
    with canned({"/v1/models": (401, "no")}) as url:
        with pytest.raises(EndpointError, match="found 401") as caught:
            run_here("doctor", url)
        assert caught.value.hint == "give the server's key with --api-key-file"
        (tmp_path / "keys").write_text("# none\n")
        with pytest.raises(ConfigError, match="keys: no API key in it"):
            run_here("doctor", url, "--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine"], "expected a URL as http://localhost:8000; ENGINE is for --ranks"),
        (["--no-load"], "--no-load is for a URL"),
        (["--ranks", "--baseline", "x"], "--baseline is for a URL"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        run_here("doctor", *arguments)


def test_tokens_of_other_clients_are_said_and_a_finding_is_exit_1(
    result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts are frozen in tests/golden/doctor."""
    result(msgspec.structs.replace(diagnosis(), foreign_tokens=64))
    run_here("doctor", "http://h")
    output = capsys.readouterr().out
    assert "\n64 tokens of other clients are in these figures" in output
    assert output.endswith("\nnothing wrong in 1 of 1 checks\n")
    result(diagnosis(*low_acceptance("vllm", group("short prompts", 0.02), None, None)))
    with pytest.raises(EndpointError, match="http://h: acceptance near zero"):
        run_here("doctor", "http://h")
    assert '\n     change  "kv_cache_dtype": "auto" in --speculative-config' in capsys.readouterr().out


def test_json_is_the_baseline_of_later_ones(
    result: Callable[[Diagnosis], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    healthy, file = diagnosis(), tmp_path / "healthy.json"
    result(healthy)
    run_here("doctor", "http://h", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == SCHEMA
    assert msgspec.convert(document, Diagnosis) == healthy
    file.write_text(json.dumps(document))
    run_here("doctor", "http://h", "--baseline", str(file))
    sick = low_acceptance("vllm", group("short prompts", 0.02), None, None)
    file.write_bytes(msgspec.json.encode(diagnosis(*sick)))
    with pytest.raises(ConfigError, match="expected the diagnosis of a healthy server, found: acceptance near zero"):
        run_here("doctor", "http://h", "--baseline", str(file))
    file.write_text(json.dumps(document | {"schema": "dflash-trt/verify/1"}))
    with pytest.raises(ConfigError, match=f"expected {SCHEMA}, found dflash-trt/verify/1"):
        run_here("doctor", "http://h", "--baseline", str(file))


def test_json_is_one_document() -> None:
    result = run("doctor", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["schema"] == "dflash-trt/doctor/1"
    findings = {finding["name"]: finding for finding in document["findings"]}
    assert findings["Python"]["found"] == platform.python_version()
    assert findings["transformers"]["needed_for"] == ["generate", "chat", "serve", "verify", "capture", "dynamo"]
    for finding in findings.values():
        assert finding["found"] or finding["fix"], finding


def test_the_command_that_fixes_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.cli.doctor_machine.package_version", lambda package: None)
    monkeypatch.setenv("COLUMNS", "200")
    run_here("doctor")
    output = capsys.readouterr().out
    assert output.startswith("this machine")
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if line.startswith("│")}
    assert "nothing" in rows["transformers"]
    assert "generate, chat" in rows["transformers"]
    assert "\n  pip install 'dflash-trt[calibrate,observe,rtx,run,serve,triton]'\n" in output
    assert platform.python_version() in rows["Python"]
    assert "pip" not in rows["Python"]


def test_nothing_heavy_is_needed() -> None:
    """doctor must work where everything else is broken."""
    script = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnxruntime', 'transformers'], None))\n"
    result = run_process("doctor", "--json", script=f"{script}from dflash_trt.cli import main\nmain()")
    assert result.returncode == 0, result.stderr

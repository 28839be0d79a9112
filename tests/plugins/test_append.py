# SPDX-License-Identifier: Apache-2.0
"""Appending context rows: the kernel's device source in the emulator, and the reference, against torch's index_put."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dflash_trt import _C
from tests.plugins.kernel import emulation
from tests.plugins.kernel.emulation import EmulationError

GUARD_BYTES = 4096
UNTOUCHED = 0xFF


@dataclass(frozen=True, kw_only=True)
class Case:
    """One append; row t goes to (page_ids[t], offsets[t])."""

    name: str
    page_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    pages: int = 3
    L: int = 2
    R: int = 70
    G: int = 2
    D: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def cache_shape(self) -> tuple[int, ...]:
        return self.pages, self.L, self.R, self.G, self.D


CASES = [
    Case(name="two-requests", page_ids=(2, 2, 2, 0), offsets=(0, 1, 2, 69)),
    Case(name="fp8", page_ids=(1, 0, 1), offsets=(68, 5, 69), dtype=torch.float8_e4m3fn, L=3, G=7, D=96),
    Case(name="f16", page_ids=(0,), offsets=(7,), dtype=torch.float16, D=128),
    Case(name="float", page_ids=(1, 1), offsets=(30, 31), dtype=torch.float32, L=5),
    Case(name="many", page_ids=tuple(i % 3 for i in range(60)), offsets=tuple(i // 3 for i in range(60)), D=256),
    Case(name="out-of-range", page_ids=(0, 3, -1, 1, 1, 2**31 - 1), offsets=(70, 5, 5, -1, 4, -(2**31))),
]
# 6 GiB of K and 6 GiB of V: a 32-bit offset overflows.
FAR = Case(name="far", page_ids=(5, 5), offsets=(131070, 131071), pages=6, L=8, R=131072, G=8)


@dataclass(frozen=True)
class Tensors:
    kv: torch.Tensor  # [T, 2, L, G, D]
    page_ids: torch.Tensor  # [T] INT32
    offsets: torch.Tensor  # [T] INT32


def draw(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(len(case.page_ids))
    kv = torch.randn(len(case.page_ids), 2, case.L, case.G, case.D, generator=generator).to(case.dtype)
    indices = (torch.tensor(values, dtype=torch.int32) for values in (case.page_ids, case.offsets))
    return Tensors(kv, *indices)


def by_torch(case: Case, tensors: Tensors) -> list[torch.Tensor]:
    """Both caches' bytes [pages, L, R, G, bytes] where only rows that exist were put."""
    real = (tensors.page_ids >= 0) & (tensors.page_ids < case.pages)
    real &= (tensors.offsets >= 0) & (tensors.offsets < case.R)
    caches = []
    for rows in tensors.kv.unbind(1):
        cache = torch.full((*case.cache_shape[:-1], case.D * case.dtype.itemsize), UNTOUCHED, dtype=torch.uint8)
        cache[tensors.page_ids[real], :, tensors.offsets[real]] = rows.view(torch.uint8)[real]
        caches.append(cache)
    return caches


def build(program: Path, plugins: Path = emulation.PLUGINS) -> Path:
    return emulation.build(program, [emulation.HERE / "emulated_append.cpp", *emulation.emulator()], plugins=plugins)


@pytest.fixture
def program() -> Path:
    return emulation.once("append", build)


def emulate(program: Path, directory: Path, case: Case, tensors: Tensors, seed: int = 0) -> list[Path]:
    """The files of both caches, which lie between guards; holes where nothing was written before."""
    directory.mkdir()
    numbers = {
        "rows": len(case.page_ids), "layers": case.L, "num_pages": case.pages, "page_rows": case.R,
        "row_bytes": case.G * case.D * case.dtype.itemsize,
    }  # fmt: skip
    (directory / "params").write_text("".join(f"{name} {value}\n" for name, value in numbers.items()))
    for name in ("kv", "page_ids", "offsets"):
        (directory / name).write_bytes(emulation.raw_bytes(getattr(tensors, name)))
    size = case.pages * case.L * case.R * numbers["row_bytes"] + 2 * GUARD_BYTES
    files = [directory / "k_cache", directory / "v_cache"]
    for path in files:
        with path.open("wb") as file:
            if size < 2**24:
                file.write(bytes([UNTOUCHED]) * size)
            else:
                file.truncate(size)
    emulation.run(program, str(directory), str(seed))
    return files


@pytest.mark.full  # the emulator's build takes long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_writes_what_torch_writes_and_nothing_else(case: Case, program: Path, tmp_path: Path) -> None:
    tensors = draw(case)
    guard = bytes([UNTOUCHED]) * GUARD_BYTES
    for seed in (0, 2):
        found = emulate(program, tmp_path / str(seed), case, tensors, seed)
        for path, expected in zip(found, by_torch(case, tensors), strict=True):
            assert path.read_bytes() == guard + emulation.raw_bytes(expected) + guard


def check_far(program: Path, directory: Path) -> None:
    tensors = draw(FAR)
    for path, rows in zip(emulate(program, directory, FAR, tensors), tensors.kv.unbind(1), strict=True):
        assert path.stat().st_blocks * 512 <= 2 * FAR.L * 4096  # nothing else was written
        row = FAR.G * FAR.D * 2
        with path.open("rb") as file:
            for layer in range(FAR.L):
                file.seek(GUARD_BYTES + ((5 * FAR.L + layer) * FAR.R + 131070) * row)
                assert file.read(2 * row) == emulation.raw_bytes(rows[:, layer])


@pytest.mark.full
def test_a_cache_beyond_32_bits(program: Path, tmp_path: Path) -> None:
    check_far(program, tmp_path / "call")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("griddepcontrol_wait();", ""),
        ("cache + to * p.row_bytes", "cache + static_cast<int32_t>(to * p.row_bytes)"),
        ("offset >= p.page_rows", "false"),
        ("page >= p.num_pages", "false"),
        ("row >= p.rows", "false"),
        ("is_v ? p.v_cache", "!is_v ? p.v_cache"),
    ],
)
@pytest.mark.full
def test_what_is_wrong_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    shutil.copytree(emulation.PLUGINS, plugins)
    source = plugins / "kv_injection_attention" / "kernel" / "append.cuh"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    program = build(tmp_path / "mutant", plugins)

    def everything() -> None:
        for case in CASES:
            test_the_kernel_writes_what_torch_writes_and_nothing_else(case, program, tmp_path / case.name)
        check_far(program, tmp_path / "far")

    for case in CASES:
        (tmp_path / case.name).mkdir()
    with pytest.raises((AssertionError, EmulationError)):
        everything()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_writes_what_torch_writes(case: Case) -> None:
    tensors = draw(case)
    caches = [
        torch.full_like(expected, UNTOUCHED).view(case.dtype).view(case.cache_shape)
        for expected in by_torch(case, tensors)
    ]
    _C.kv_injection_append_reference(tensors.kv, tensors.page_ids, tensors.offsets, *caches)
    for cache, expected in zip(caches, by_torch(case, tensors), strict=True):
        assert torch.equal(cache.view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(4, 2, 2, 2, 32).bfloat16()}, r"kv: expected shape \[4, 2, 2, 2, 64\], found .*32\]"),
        ({"kv": torch.zeros(4, 1, 2, 2, 64).bfloat16()}, r"kv: expected shape \[any, 2, any, any, any\], found \[4, 1"),
        ({"kv": torch.zeros(4, 2, 2, 2, 64)}, "kv: expected dtype bfloat16, found float32"),
        ({"page_ids": torch.zeros(4, dtype=torch.int64)}, "page_ids: expected dtype int32, found int64"),
        ({"offsets": torch.zeros(5, dtype=torch.int32)}, r"offsets: expected shape \[4\], found \[5\]"),
        ({"kv": torch.zeros(4, 2, 2, 64, 2).bfloat16().mT}, "kv: expected a dense row-major tensor, found strides"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    case = CASES[0]
    given = {**vars(draw(case)), **change}
    caches = [torch.zeros(case.cache_shape, dtype=case.dtype) for _ in "kv"]
    with pytest.raises(ValueError, match=message):
        _C.kv_injection_append_reference(**given, k_cache=caches[0], v_cache=caches[1])


def test_rows_of_odd_size_and_on_the_cpu_are_refused() -> None:
    rows, cache = torch.zeros(1, 2, 1, 1, 7), torch.zeros(1, 1, 1, 1, 7)
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="a row: expected a multiple of 16 bytes, found 28"):
        _C.kv_injection_append_reference(rows, index, index, cache, cache.clone())
    tensors, case = draw(CASES[0]), CASES[0]
    caches = [torch.zeros(case.cache_shape, dtype=case.dtype) for _ in "kv"]
    with pytest.raises(ValueError, match="kv: expected a CUDA tensor, found a CPU tensor"):
        _C.kv_injection_append(tensors.kv, tensors.page_ids, tensors.offsets, *caches, stream=0)

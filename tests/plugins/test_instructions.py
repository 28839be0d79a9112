# SPDX-License-Identifier: Apache-2.0
"""Operands are where the instructions expect them, checked in nvcc's code for their wrappers.

Wrappers of instructions are the only device code that the emulator replaces, so no numeric test on a CPU sees them.
Each is called in a kernel whose arguments are i0, i1, ... and whose results are stored to o0, o1, ...; in the PTX,
registers are called by what they hold. The expected order is the PTX ISA's (9.2, the sections of each instruction).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

from tests.paths import REPOSITORY


@dataclass(frozen=True)
class Wrapper:
    """`body` calls it with the kernel's arguments, of `types`, and stores results to `o` (words) or `f` (floats)."""

    name: str
    types: str  # one letter an argument: f float, w word, p pointer, d descriptor
    body: str
    expected: tuple[str, ...]


def braces(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"{letter}{i}" for i in range(first, first + count)) + "}"


def mma(name: str, kind: str) -> Wrapper:
    body = f"""
    const uint32_t a[4] = {{i0, i1, i2, i3}}, b[2] = {{i4, i5}};
    const float c[4] = {{i6, i7, i8, i9}};
    float d[4];
    mma_m16n8k16({name}{{}}, d, a, b, c);
    for (int i = 0; i < 4; ++i) f[i] = d[i];"""
    operands = f"{braces('o', 0, 4)}, {braces('i', 0, 4)}, {braces('i', 4, 2)}, {braces('i', 6, 4)}"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {operands}"
    return Wrapper(f"mma_{kind}", "wwwwwwffff", body, (text,))


def wgmma(rows: int, tag: str, shape: str, transpose: str) -> Wrapper:
    """Sums are in and out at once: o0 to o(rows / 2 - 1)."""
    sums = rows // 2
    body = f"""
    float d[{sums}];
    for (int i = 0; i < {sums}; ++i) d[i] = f[i];
    const uint32_t a[4] = {{i0, i1, i2, i3}};
    wgmma({tag}{{}}, d, a, i4, i5);
    for (int i = 0; i < {sums}; ++i) f[i] = d[i];"""
    operands = f"{braces('o', 0, sums)}, {braces('i', 0, 4)}, i4, p, 1, 1{transpose}"
    text = f"wgmma.mma_async.sync.aligned.m64n{rows}{shape} {operands}"
    return Wrapper(f"wgmma_{rows}_{tag}", "wwwwdw", body, ("setp.ne.b32 p, i5, 0", text))


CVT = "o[0] = cvt_rn_x2({}{{}}, i0, i1);"
MATRICES = "uint32_t m[4]; {}(m, i0); for (int i = 0; i < 4; ++i) o[i] = m[i];"
WRAPPERS = [
    # The first source of cvt's packed forms is the upper half [9.7.9.21].
    Wrapper("cvt_f16", "ff", CVT.format("F16"), ("cvt.rn.f16x2.f32 o0, i1, i0",)),
    Wrapper("cvt_bf16", "ff", CVT.format("BF16"), ("cvt.rn.bf16x2.f32 o0, i1, i0",)),
    Wrapper(
        "cvt_e4m3", "ffff", "o[0] = cvt_e4m3x4(i0, i1, i2, i3);",
        ("cvt.rn.satfinite.e4m3x2.f32 l, i1, i0", "cvt.rn.satfinite.e4m3x2.f32 h, i3, i2", "mov.b32 o0, {l, h}"),
    ),
    Wrapper("cvt_e4m3x2", "ff", "o[0] = cvt_e4m3x2(i0, i1);", ("cvt.rn.satfinite.e4m3x2.f32 %rs1, i1, i0",)),
    Wrapper(
        "cvt_f16_e4m3", "w", "uint32_t low, high; cvt_f16x2_e4m3x2(low, high, i0); o[0] = low; o[1] = high;",
        ("mov.b32 {l, h}, i0", "cvt.rn.f16x2.e4m3x2 o0, l", "cvt.rn.f16x2.e4m3x2 o1, h"),
    ),
    mma("F16", "f16"),
    mma("BF16", "bf16"),
    Wrapper("ldmatrix", "w", MATRICES.format("ldmatrix_x4"),
            (f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {braces('o', 0, 4)}, [i0]",)),
    Wrapper("ldmatrix_trans", "w", MATRICES.format("ldmatrix_x4_trans"),
            (f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {braces('o', 0, 4)}, [i0]",)),
    Wrapper("stmatrix_trans", "wwwww", "const uint32_t m[4] = {i1, i2, i3, i4}; stmatrix_x4_trans(i0, m);",
            (f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [i0], {braces('i', 1, 4)}",)),
    Wrapper("ld_shared", "w", "o[0] = ld_shared(i0);", ("ld.shared.b32 o0, [i0]",)),
    Wrapper("st_shared", "ww", "st_shared(i0, i1);", ("st.shared.b32 [i0], i1",)),
    Wrapper("st_shared_relaxed", "ww", "st_shared_relaxed(i0, i1);", ("st.relaxed.cta.shared.b32 [i0], i1",)),
    Wrapper("cp_async", "wp", "cp_async(i0, i1, true);", ("cp.async.cg.shared.global.L2::128B [i0], [i1], 16, 16",)),
    Wrapper("ld_global", "p", "const Words4 v = ld_global_v4(i0); for (int i = 0; i < 4; ++i) o[i] = v.word[i];",
            (f"ld.global.v4.u32 {braces('o', 0, 4)}, [i0]",)),
    Wrapper("st_global", "pwwww", "st_global_v4(const_cast<void*>(i0), {{i1, i2, i3, i4}});",
            (f"st.global.v4.u32 [i0], {braces('i', 1, 4)}",)),
    Wrapper("bar_sync", "ww", "bar_sync(i0, i1);", ("bar.sync i0, i1",)),
    Wrapper(
        "barrier_red", "www", "o[0] = barrier_red_or(i0, i1, i2);",
        ("setp.ne.b32 p, i2, 0", "barrier.cta.red.or.pred.aligned q, i0, i1, p", "selp.b32 o0, 1, 0, q"),
    ),
    Wrapper("wait_group", "", "cp_async_commit_group(); cp_async_wait_group<2>();",
            ("cp.async.commit_group", "cp.async.wait_group 2")),
    Wrapper("fence", "", "fence_proxy_async();", ("fence.proxy.async.shared::cta",)),
    Wrapper("wgmma_fences", "", "wgmma_fence(); wgmma_commit_group(); wgmma_wait_group<1>();",
            ("wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned 1")),
    Wrapper("grid", "", "griddepcontrol_launch_dependents(); griddepcontrol_wait();",
            ("griddepcontrol.launch_dependents", "griddepcontrol.wait")),
    *(wgmma(rows, tag, shape, transpose) for rows in (32, 64, 80) for tag, shape, transpose in (
        ("F16", "k16.f32.f16.f16", ", 0"), ("BF16", "k16.f32.bf16.bf16", ", 0"), ("E4M3", "k32.f32.e4m3.e4m3", ""))),
]  # fmt: skip
TYPES = {"f": "float", "w": "uint32_t", "p": "const void*", "d": "uint64_t"}


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The body of each wrapper's kernel."""
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        pytest.skip("no nvcc: install the CUDA toolkit")
    kernels = []
    for wrapper in WRAPPERS:
        arguments = "".join(f", {TYPES[letter]} i{i}" for i, letter in enumerate(wrapper.types))
        kernels.append(
            f'extern "C" __global__ void {wrapper.name}(uint32_t* o, float* f{arguments}) {{{wrapper.body}\n}}'
        )
    directory = tmp_path_factory.mktemp("ptx")
    header = '#include "kv_injection_attention/kernel/wgmma.cuh"\nusing namespace dflash::kv_injection;\n'
    (directory / "wrappers.cu").write_text(header + "\n".join(kernels))
    command = [nvcc, "-std=c++20", "-arch=sm_90a", "-ptx", f"-I{REPOSITORY / 'plugins'}", "wrappers.cu"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = (directory / "wrappers.ptx").read_text()
    return dict(zip(re.findall(r"\.entry (\w+)\(", text), re.split(r"\.entry \w+\(", text)[1:], strict=True))


def named(body: str) -> str:
    """The kernel's PTX with registers called by the argument they were loaded from, or the result they become."""
    # A bool is 1 or 0 of a comparison: the same register to the reader.
    condition = r"setp\.ne\.s32 \t?(%p\d+), (%r\d+), 0;\s*selp\.\w+ \t?(%r\d+), 1, 0, \1;"
    for _, source, copy in re.findall(condition, body):
        body = re.sub(rf"{copy}\b", source, body)
    copies = r"(?:cvta\.to\.global\.u64|mov\.u32) \t?(%\w+), (%?\w+);"
    for copy, source in re.findall(copies, body):
        body = re.sub(rf"{copy}\b", source, body)
    assert "ld.param.v" not in body, "arguments loaded as a vector are not read here"
    names = {}
    for register, parameter in re.findall(r"ld\.param\.\w+ \t?(%\w+), \[\w+_param_(\d+)\]", body):
        if int(parameter) > 1:
            names[register] = f"i{int(parameter) - 2}"
    for offset, register in re.findall(r"st\.global\.\w+ \t?\[%\w+(?:\+(\d+))?\], (%\w+)", body):
        names[register] = f"o{int(offset or 0) // 4}"
    return re.sub(r"%\w+", lambda register: names.get(register[0], register[0]), body)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.name)
def test_operands_stand_where_the_instruction_wants_them(wrapper: Wrapper, ptx: dict[str, str]) -> None:
    body = named(ptx[wrapper.name])
    instructions = [" ".join(text.split()) for text in re.split(r"[;\n]", body)]
    found = [text for text in instructions if text in wrapper.expected]
    assert found == list(wrapper.expected), body

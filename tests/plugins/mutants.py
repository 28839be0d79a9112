# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in the kernel's sources, and the calls that have to notice them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.plugins.cases import FP8, Case, Pages
from tests.plugins.kernel.emulation import AHEAD, SHORT, EmulationError
from tests.plugins.test_kernel import MANY_UNEVEN

# Two teams of three warps, of which the last has a tile without rows; ranges cut two of the three requests. The longest
# ends with the cache.
CASE = Case(name="mutated", N=8, G=1, S=10, cache_dtype=FP8, k_scale=0.02, v_scale=0.03, norm=4.0, sinks=True,
            context_lengths=(1700, 3, 300), slot_ids=(2, 0, 1))  # fmt: skip
CTAS = 5
WAIT = "griddepcontrol_wait();  // the preceding grid may write every input"
LOADER, PAGES = "context_loader.cuh", "context_pages.cuh"
RUN = "Attention<D, T, kFp8>::run(p, config);"
WIDTH = "(p.num_heads + 2 * p.num_kv_heads)"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    right: str
    wrong: str
    notices: str | None = ""  # the emulator's words; "": float64 notices; None: either

    def planted(self, source: str) -> str:
        """The source with this fault. Raises ValueError unless it has the right text exactly once."""
        if source.count(self.right) != 1:
            raise ValueError(f"{self.name}: expected {self.right!r} once in {self.file}")
        return source.replace(self.right, self.wrong)

    def noticed_as(self) -> tuple[type[Exception], ...]:
        return (
            (EmulationError, AssertionError)
            if self.notices is None
            else (EmulationError if self.notices else AssertionError,)
        )


MUTANTS = [
    Mutant("no wait for copies", LOADER, "cp_async_wait_group<kStages - 2>();", "",
           "while a copy into it is under way"),
    Mutant("a wait for one step too few", LOADER, "cp_async_wait_group<kStages - 2>",
           "cp_async_wait_group<kStages - 1>", "while a copy into it is under way"),
    Mutant("no barrier after the wait", LOADER, "bar_sync(1 + worker_.team, 32 * warps());", "",
           "shared memory address|races with thread"),
    Mutant("one barrier for all teams", LOADER, "bar_sync(1 + worker_.team,", "bar_sync(1,",
           "races with thread|while a copy"),
    Mutant("results over stages in use", "attention.cuh", "syncthreads();  // all teams have finished", "//",
           "races with thread|while a copy"),
    Mutant("results taken too early", "attention.cuh", "syncthreads();\n    merge_and_write<", "merge_and_write<",
           "races with thread"),
    Mutant("no wait for the attention grid", "combine.cuh", "griddepcontrol_wait();", "", "before the grid before"),
    Mutant("no wait for the kernel before", "attention.cuh", WAIT, "", "before the grid before"),
    Mutant("a wait behind a read", "attention.cuh", f"{WAIT}\n  {RUN}", f"{RUN}\n  {WAIT}", "before the grid before"),
    Mutant("rows beyond the segment", LOADER, "cp_async(at, k, left > 0);", "cp_async(at, k, true);",
           "AddressSanitizer"),
    Mutant("copies that are not swizzled", LOADER, "Step::Rows::at(first, vector * 16)",
           "first * kStride + vector * 16"),
    Mutant("columns ahead that are not swizzled", "launch_config.h", "address ^ columns", "address + columns",
           "while a copy into it is under way"),
    Mutant("no mask at the end", "attention.cuh", "left < kMmaKeys ||", ""),
    Mutant("a tile with rows skipped", "attention.cuh", "warp_row() + 16 >= config_.rows", "warp_row() + 16 >= 48"),
    Mutant("a block out of turn", LOADER, "-rows_left_ / kStep", "-rows_left_ / kStep + 1"),
    Mutant("a block left unmerged", "attention.cuh", "ceil_div(p_.block, kMmaKeys) : 0", "p_.block - p_.block : 0"),
    Mutant("results over the span", "launch_config.h", "2 * row_bytes(head_dim", "0 * row_bytes(head_dim", None),
    Mutant("a maximum that never moves", "state.cuh", "if (any_sync(exceeds)) return false;", "any_sync(exceeds);"),
    Mutant("a sum left behind", "state.cuh", "sum[t][half] *= rescale;", ""),
    Mutant("the block's keys scaled", "attention.cuh", "1 / p_.k_scale)", "1.0f)"),
    Mutant("a range too long", "schedule.cuh", "min(length, all.begin + end * kUnitKeys)", "length"),
    Mutant("starts that cost nothing", "schedule.cuh", "(place.request + 1) * start_cost_",
           "place.request * start_cost_"),
    Mutant("cut requests that nobody combines", "schedule.cuh", "return parts_ == 1;", "return parts_ != 1;"),
    Mutant("a slot without its values", "rows.cuh", WIDTH, "(p.num_heads + p.num_kv_heads)"),
    Mutant("queries for keys", "rows.cuh", "p.num_heads + kv_head", "kv_head"),
    Mutant("keys for values", "rows.cuh", "p.num_heads + p.num_kv_heads + kv_head", "p.num_heads + kv_head"),
    Mutant("keys normed as queries", "rows.cuh", "is_key ? p.k_norm :", "is_key ? p.q_norm :"),
    Mutant("keys scaled as queries", "rows.cuh", "is_key ? 1 : factor", "factor"),
]  # fmt: skip


# Requests that are cut into the same number of parts.
ALIKE = replace(CASE, context_lengths=(310, 290, 300))
PART_MUTANTS = [
    Mutant("parts that overlap", "schedule.cuh", "* units, parts_) - begin}", "* units, parts_) - begin + 1}", None),
    Mutant("equal parts that nobody combines", "schedule.cuh", "return parts_ == 1;", "return parts_ > 0;"),
    Mutant("a part left behind", "schedule.cuh", "* parts_ - 1, units)", "* parts_ - 1 - units, units)", None),
]  # fmt: skip

# More requests than a warp has lanes, some of which are cut.
MANY = replace(MANY_UNEVEN, cache_dtype=FP8, k_scale=0.02, v_scale=0.03)
# Scanned by all 32 lanes; with fewer requests than lanes the last sum is the last request's.
SCAN_MUTANT = Mutant(
    "sums of too few lanes", "schedule.cuh", "offset < p.batch; offset", "offset * 2 < p.batch; offset"
)
LANE_MUTANT = Mutant("the start of a lane for a request's", "schedule.cuh", "unit += context(i).units", "{}", None)

# Paged contexts.
PAGED = replace(CASE, L=2, layer=1, pages=Pages(32, "V1"), window=1000)
PAGE_MUTANTS = [
    Mutant("an entry of another request", PAGES, "int64_t{span.slot} * p", "int64_t{span.slot / 9} * p", None),
    Mutant("a page of another size", PAGES, "key - (page << shift)", "key % 16"),
    Mutant("pages half as large", PAGES, "key >> shift", "key >> (shift - 1)", None),
    Mutant("pages as far apart as K and V", PAGES, "entry * layout[kPageStride]",
           "entry * layout[kKVStride]"),
    Mutant("another layer's pages", PAGES, "p.context_pointers[p.layer * kPointerSize",
           "p.context_pointers[0 * kPointerSize"),
    Mutant("heads of another rank", PAGES, "kv_head * layout[kHeadStride]",
           "(kv_head + 1) * layout[kHeadStride]"),
    Mutant("entries beyond the length", PAGES, "key < end ?", "key < end + 1000 ?", None),
    Mutant("a chunk between two pages", "schedule.cuh", "visible / kChunkRows * kChunkRows :", "visible :"),
]  # fmt: skip

# More rows than the threads process at once.
LONG_BLOCK = replace(CASE, N=4, S=20)
FIRST_ROWS = ("the first rows for all", "if (begin > 0) row =", "if (begin > 999) row =")
VALUES_MUTANT = Mutant("the first values for all", "rows.cuh", "i < ntid_x() ? first.value", "true ? first.value")
# Several requests in a range, some without context, and a window.
WINDOW = "window_of(p.sliding_window) + p.block"
RANGE_MUTANTS = [
    Mutant("segments without a barrier", "schedule.cuh", "syncthreads();  // shared memory is free", "//",
           "races with thread|while a"),
    Mutant("a span stored too late", "schedule.cuh", "rest);\n    syncthreads();", "rest);",
           "races with thread|waits for"),
    Mutant("requests behind the first that lose a unit", "schedule.cuh", "+ 1, 0, static_cast", "+ 1, 1, static_cast",
           None),
]  # fmt: skip
EMPTY_MUTANT = Mutant(
    "a range without work that works", "schedule.cuh", "if (span.rest().units < 0) return;", "", "found that it runs on"
)
WINDOW_MUTANT = Mutant("a window's edge taken for all visible", "schedule.cuh", f"- {WINDOW}", f"- 2 * {WINDOW}")

# A bias and an FP8 output.
FUSED = replace(CASE, bias=True, output_scale=0.02)
FUSED_MUTANTS = [
    Mutant("half a row without its bias", "rows.cuh", "add<T>(first, loaded.bias_first);", ""),
    Mutant("the other half's bias", "rows.cuh", "load_bias<D>(source.bias, head, part + kHalf)",
           "load_bias<D>(source.bias, head, part)"),
    Mutant("the bias of another head", "rows.cuh", "bias) + head * (D * 2)", "bias) + head / 2 * (D * 2)"),
    Mutant("an output as if its scale were 1", "result.cuh", "head) * config_.out_factor}", "head)}"),
    Mutant("bytes of the output in another order", "result.cuh", "to_e4m3x2(x, y)", "to_e4m3x2(y, x)"),
    Mutant("an FP8 output of 16 bits", "result.cuh", "is_whole_ && p_.out_dtype == DType::kF8E4M3", "false",
           "AddressSanitizer"),
    Mutant("a combined output as if its scale were 1", "combine.cuh", "head) * config.out_factor;", "head);"),
    Mutant("a combined FP8 output of 16 bits", "combine.cuh", "p.out_dtype == DType::kF8E4M3", "false", None),
]  # fmt: skip
VALUE_MUTANTS = [
    Mutant("values without their bias", "rows.cuh", "value = add<T>(value, ", "(void)add<T>(value, "),
    Mutant("values with the bias of keys", "rows.cuh", "load_bias<D>(p.qkv_bias, value_head(),",
           "load_bias<D>(p.qkv_bias, value_head() - p.num_kv_heads,"),
]  # fmt: skip
WGMMA_VALUE_MUTANTS = [
    Mutant("values without their bias", "wgmma_rows.cuh", "loaded.value_bias = load_value_bias();", ""),
    Mutant("values with the bias of keys", "wgmma_rows.cuh", "load_bias<D>(p_.qkv_bias, value_head(),",
           "load_bias<D>(p_.qkv_bias, value_head() - p_.num_kv_heads,"),
]  # fmt: skip

# The sm_90a attention.
STATE, WGMMA_LOADER, WGMMA = "wgmma_state.cuh", "wgmma_context_loader.cuh", "wgmma_attention.cuh"
WGMMA_ROWS = "wgmma_rows.cuh"
SCORES_MADE = "    fence_registers(score);\n  }\n\n  // Turns these"
KEYS_AT = "Rows::at(warp * 16 + lane % 16, lane / 16 * 16)"
KEYS_AT_OF_RIGHT_OPERAND = "Rows::at(warp * 16 + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16)"
PACKED = "cvt_e4m3x4(a, b, c, d));"
LOOP = "    for (int c = 0; c < N / 4; ++c) {\n      float largest = kInitialMaximum;"
MAXIMA = "const Shared all = group.numbers() + group.column() * 4;\n"
WGMMA_MUTANTS = [
    Mutant("no proxy fence behind the queries", WGMMA, "fence_proxy_async();\n    syncthreads();", "syncthreads();",
           "without a proxy fence"),
    Mutant("no proxy fence behind the weights", WGMMA, "fence_proxy_async();\n      // All weights", "// All weights",
           "without a proxy fence"),
    Mutant("no wgmma.fence", STATE, "wgmma_fence();\n    const uint64_t queries = Rounded",
           "const uint64_t queries = Rounded", "without a wgmma.fence"),
    Mutant("no wait for scores", STATE, f"wgmma_wait_group<pending>();\n{SCORES_MADE}", SCORES_MADE,
           "a product under way|AddressSanitizer"),
    Mutant("no wait for outputs", STATE, "wgmma_wait_group<0>();\n#pragma", "#pragma",
           "product|AddressSanitizer|under way"),
    Mutant("a wrong stride", "wgmma.cuh", "{kBytes >> 4}", "{kBytes >> 5}"),
    Mutant("a wrong swizzle", "wgmma.cuh", "== 128 ? 1 : 2,", "== 128 ? 2 : 2,"),
    Mutant("no swizzle", "wgmma.cuh", "== 128 ? 1 : 2,", "== 128 ? 0 : 2,"),
    Mutant("a wrong swizzle of bytes", "wgmma.cuh", "== 128 ? 1 : 2,", "== 128 ? 1 : 1,", "shared memory address"),
    Mutant("a narrower swizzle of bytes", "wgmma.cuh", "== 128 ? 1 : 2,", "== 128 ? 1 : 3,"),
    Mutant("no swizzle of bytes", "wgmma.cuh", "== 128 ? 1 : 2,", "== 128 ? 1 : 0,"),
    Mutant("a wrong step of the columns", "wgmma.cuh", "kDescribedColumns = 2", "kDescribedColumns = 1"),
    Mutant("queries as they are", WGMMA_ROWS, "State::Queries::swizzle(row", "(row"),
    Mutant("rounded queries as they are", WGMMA_ROWS, "Rows::swizzle(row", "(row"),
    Mutant("the bytes of a query in another order", WGMMA_ROWS, "cvt_e4m3x4(a, b,", "cvt_e4m3x4(b, a,"),
    Mutant("queries of F16 where bytes should be", WGMMA_ROWS, PACKED,
           "low + 0 * static_cast<uint32_t>(a + b + c + d));"),
    Mutant("queries that are not scaled", WGMMA_ROWS, "(127 * 2 + 7 - exponent) << 23", "127u << 23"),
    Mutant("the largest element found too early", WGMMA_ROWS, "syncthreads();\n    for (int warp", "for (int warp",
           "races with thread|which nobody wrote"),
    Mutant("the bytes of a key in another order", STATE, KEYS_AT, KEYS_AT_OF_RIGHT_OPERAND),
    Mutant("keys half as far apart", STATE, "Rows::ahead(at, i * 32)", "Rows::ahead(at, i * 16)"),
    Mutant("scores that are not scaled", STATE, "fma_rn(score[i], factor,", "fma_rn(score[i], 1,"),
    Mutant("maxima of scores that are not scaled", STATE, "kRaise ? score[i] * factor", "kRaise ? score[i]"),
    Mutant("a polynomial without its exponent", "exp2.cuh", "(as_bits(rounded) << 23)", "0"),
    Mutant("a polynomial that is not clamped", "exp2.cuh", "fma_rn_sat(x", "fma_rn(x"),
    Mutant("weights as they are", STATE, "(warp * 2 + lane / 8 % 2) ^ lane % 8", "(warp * 2 + lane / 8 % 2)"),
    Mutant("a barrier for all warpgroups", STATE, "return 1 + team();", "return 1;", "races|waits|product"),
    Mutant("a step's end without a barrier", WGMMA_LOADER, "bar_sync(barrier_, 32 * kWarpgroupWarps);", "",
           "races with thread|while a"),
    Mutant("a step that is not there yet", WGMMA_LOADER, "cp_async_wait_group<kStages - 2>();", "",
           "while a copy into it is under way"),
    Mutant("rows beyond the end", WGMMA_LOADER, "cp_async(to, from, left > row)", "cp_async(to, from, true)",
           "AddressSanitizer"),
    Mutant("copies that are not swizzled", WGMMA_LOADER, "Step::Rows::at(row_, vector * 16)",
           "row_ * kStride + vector * 16"),
    Mutant("groups that are not there", WGMMA_LOADER, "    }\n    cp_async_commit_group();",
           "    cp_async_commit_group();\n    }", "while a copy"),
    Mutant("a first step without maxima", WGMMA, "rows);\n        state.raise_maxima(score, Group{});", "rows);"),
    Mutant("scores that keep the maxima", STATE, "score[at(c, 0)] += negated_maximum[c];", ""),
    Mutant("columns ahead that are not swizzled", "launch_config.h", "address ^ columns", "address + columns"),
    Mutant("stages that never end", WGMMA_LOADER, "stage_ == last_stage_ ?", "false ?",
           "of .* bytes|while a copy|races with thread"),
    Mutant("maxima read too early", STATE, f"group.sync();\n    {MAXIMA}#pragma unroll\n{LOOP}", MAXIMA + LOOP,
           "races with thread"),
    Mutant("stages used again too early", WGMMA, "syncthreads();  // all teams have finished", "//",
           "races with thread|while a copy"),
    Mutant("results taken too early", WGMMA, "syncthreads();\n    stamp(Phase::kResults);", "",
           "races with thread"),
    Mutant("no scale of the block's scores", WGMMA, "= config_.key_factor;", "= 1;"),
    Mutant("columns of bytes as they are", STATE, "0x3120", "0x3210"),
    Mutant("a slot without its values", "rows.cuh", WIDTH, "(p.num_heads + p.num_kv_heads)"),
    Mutant("queries for keys", WGMMA_ROWS, "is_key ? p_.num_heads + ctaid_x() :", "is_key ? ctaid_x() :"),
    Mutant("keys for values", WGMMA_ROWS, "p_.num_heads + p_.num_kv_heads + ctaid_x()", "p_.num_heads + ctaid_x()"),
    Mutant("keys normed as queries", WGMMA_ROWS, "i >= N ? p_.k_norm :", "i >= N ? p_.q_norm :"),
    Mutant("queries that are no scores", WGMMA_ROWS, "1 : config_.query_factor", "1 : 1"),
    Mutant("values behind the block", WGMMA_ROWS, "i >= p_.block * kVectors", "i >= kMaxBlock * kVectors",
           "AddressSanitizer"),
    Mutant("no wait for the kernel before", WGMMA, "griddepcontrol_wait();", "", "before the grid before"),
    Mutant("a block that is not merged", WGMMA, "kTeams) + (now.ends() ? 1 : 0)", "kTeams) + (now.ends() ? 0 : 0)"),
    Mutant("results of teams without steps", WGMMA, "min(steps(now), kTeams) +", "kTeams +", None),
    Mutant("a block over its team's results", WGMMA, "first ? Group::team() : kTeams", "Group::team()"),
    Mutant("a block for every team", WGMMA, "kTeams - 1) == Group::team()", "kTeams - 1) >= 0", "races with thread"),
    Mutant("a block left over stages in use", WGMMA, "if (first) syncthreads();", "", "waits for|races|while a copy"),
    Mutant("no slots", WGMMA, "attention.prepare();", "", None),
]  # fmt: skip

# Scores so far apart that a later step raises the maxima.
SHARP = replace(CASE, norm=12.0)
# Previous contents are scaled as if they were a product: with a k_scale of 0.02 too small to notice.
ADDED_MUTANT = Mutant(
    "scores added to what was there",
    STATE,
    "described_bytes(queries, i), i > 0);",
    "described_bytes(queries, i), true);",
)
VOTE_MUTANT = Mutant(
    "no vote", WGMMA, "if (!barrier_red_or(Group::barrier(), kThreads, exceeds) || raise) break;",
    "barrier_red_or(Group::barrier(), kThreads, exceeds);\n      if (raise || true) break;",
)  # fmt: skip

# Products computed ahead.
AHEAD_MUTANTS = [
    Mutant("keys that are not there yet", WGMMA, "context.wait_for_next();\n      syncwarp();", "syncwarp();",
           "while a copy into it is under way"),
    Mutant("keys of other lanes", WGMMA, "syncwarp();  // a warp", "// a warp", "races with thread|while a copy"),
    Mutant("one place for weights", WGMMA, "place = wgmma_weight_bytes(N) - place;", "place = 0;",
           "while a product reads|races with thread"),
    Mutant("no wait for the next scores", WGMMA, "finish_key_bytes<1>", "finish_key_bytes<2>",
           "under way|AddressSanitizer"),
    Mutant("no wait for outputs ahead", WGMMA, "state.finish_values();\n    }\n  }", "}\n  }",
           "under way|AddressSanitizer"),
    Mutant("no proxy fence before the vote", WGMMA, "fence_proxy_async();\n      // The step", "// The step",
           "without a proxy fence"),
    Mutant("no proxy fence behind raised weights", WGMMA, "fence_proxy_async();\n        Group::sync();",
           "Group::sync();", "without a proxy fence"),
    Mutant("copies before the vote", WGMMA, "const bool raise = barrier_red_or(Group::barrier(), kThreads, exceeds);\n"
           "      context.take_next([] { return Group::span(); });",
           "context.take_next([] { return Group::span(); });\n"
           "      const bool raise = barrier_red_or(Group::barrier(), kThreads, exceeds);",
           "races with thread|while a copy"),
    Mutant("weights of the other place", WGMMA, "uniform_team_weights(place)", "uniform_team_weights()", None),
]  # fmt: skip
AHEAD_VOTE_MUTANT = Mutant(
    "no vote", WGMMA, "kThreads, exceeds);\n      context", "kThreads, exceeds && first);\n      context"
)

# The short-context attention, with CTAs of three teams of five warps.
SHORT_CASE = replace(CASE, context_lengths=(700, 3, 300))
SHORT_MUTANTS = [
    Mutant("no wait for the kernel before", "attention.cuh", "griddepcontrol_wait();  // see attention()", "",
           "before the grid before"),
    Mutant("another request's context", "attention.cuh", "{ctaid_y(), 0,", "{0, 0,", None),
    Mutant("a span stored too late", "attention.cuh", "kMaxContext});\n    syncthreads();", "kMaxContext});",
           "races with thread|which nobody wrote"),
    Mutant("contexts without their first rows", "attention.cuh", "ctaid_y(), 0, kMax", "ctaid_y(), 1, kMax", None),
    Mutant("contexts without their last rows", "attention.cuh", "ctaid_y(), 0, kMaxContext", "ctaid_y(), 0, 2", None),
    Mutant("scores that are made once", "attention.cuh", "if (raise || block.try", "if (block.try", None),
    Mutant("scores that keep the maximum", "attention.cuh", "queries, keys, state, !raise",
           "queries, keys, state, true"),
    Mutant("two tiles of a warp", "attention.cuh", "kShort ? 1 : warp_tiles(D)", "warp_tiles(D)", None),
    Mutant("results over stages in use", "attention.cuh", "syncthreads();  // all teams have finished", "//",
           "races with thread|while a copy"),
    Mutant("results taken too early", "attention.cuh", "syncthreads();\n    merge_and_write<", "merge_and_write<",
           "races with thread"),
    Mutant("no room between warps", "merge.cuh", "(thread + thread / 32) * 4", "(thread + thread / 32 * 5) * 4",
           "races with thread|of .* bytes"),
]  # fmt: skip


# Guards that do not hold, for arbitrary values (test_guards.py).
LAYOUT = "../context_layout.h"
GUARD_MUTANTS = [
    Mutant("any address", LAYOUT, "&& pointer[kChecksum] == context_checksum(address, layout)", ""),
    Mutant("entries of pages that do not exist", PAGES, "entry = 0;", ""),
    Mutant("entries that are not told", PAGES, "stored.invalidate();", "(void)stored;"),
    Mutant("slots that do not exist", "schedule.cuh", "|| slot >= p.slots)", ")"),
    Mutant("contexts longer than their pages", "schedule.cuh", "|| length > most", ""),
    Mutant("requests that are not told", "result.cuh", "if (stored_.is_invalid())", "if (false)"),
    Mutant("pages of rows that nobody sees", "schedule.cuh", "visible < length ?", "true ?"),
]

NARROW = Mutant("an address of 32 bits", PAGES, "address_ >> 32)", "address_ >> 63)")

# How each mutant is called: the case, the GPU's CTAs, and the kernel as emulation.build_kernel has it.
CALLS = [
    *((mutant, CASE, CTAS, 0) for mutant in MUTANTS),
    *((mutant, CASE, CTAS, 80) for mutant in WGMMA_MUTANTS),
    *((mutant, ALIKE, 12, 0) for mutant in PART_MUTANTS),
    (SCAN_MUTANT, CASE, CTAS, 0),
    (LANE_MUTANT, MANY, 264, 0),
    *((mutant, PAGED, CTAS, kernel) for mutant in (*PAGE_MUTANTS, WINDOW_MUTANT) for kernel in (0, 80)),
    *((mutant, CASE, CTAS, kernel) for mutant in RANGE_MUTANTS for kernel in (0, 80)),
    *((EMPTY_MUTANT, ALIKE, 12, kernel) for kernel in (0, 80)),
    (Mutant(FIRST_ROWS[0], "rows.cuh", *FIRST_ROWS[1:]), LONG_BLOCK, CTAS, 0),
    (Mutant(FIRST_ROWS[0], "wgmma_rows.cuh", *FIRST_ROWS[1:]), LONG_BLOCK, CTAS, 80),
    (VALUES_MUTANT, replace(LONG_BLOCK, S=32), CTAS, 0),
    (VOTE_MUTANT, SHARP, CTAS, 80),
    (ADDED_MUTANT, replace(SHARP, k_scale=1.0), CTAS, 80),
    *((mutant, CASE, 1, AHEAD + 80) for mutant in AHEAD_MUTANTS),  # more steps than stages
    (AHEAD_VOTE_MUTANT, SHARP, CTAS, AHEAD + 80),
    *((mutant, FUSED, CTAS, 0) for mutant in (*FUSED_MUTANTS, *VALUE_MUTANTS)),
    *((mutant, FUSED, CTAS, 80) for mutant in (*FUSED_MUTANTS, *WGMMA_VALUE_MUTANTS)),
    *((mutant, SHORT_CASE, 132, SHORT) for mutant in SHORT_MUTANTS),
]

# SPDX-License-Identifier: Apache-2.0
"""The compiled module (cpp/). It takes arrays where they lie, copies nothing and releases the GIL."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.engine.proposals import Proposals

_Weights: TypeAlias = NDArray[np.uint16] | NDArray[np.float16] | NDArray[np.float32]
"""[R, K], C-contiguous, at any alignment, read-only memory maps included; uint16 holds BF16's bits."""
_Tensor: TypeAlias = torch.Tensor | NDArray[np.generic]
"""Dense and row-major; DLPack carries it without a copy."""

class NonFiniteError(ValueError):
    """A weight is NaN or infinite; the message gives its flat index, row and column."""

TOKENS_PER_PAGE: int
"""Rows of a page in the caches that PassRows reads."""
VALUE_ALIGNMENT: int
"""Rows of V are padded to a multiple of this many elements in a cache that PassRows reads."""

class PassRows:
    """The rows of one pass over sequences in pages of TOKENS_PER_PAGE, 32, tokens, end to end.

    Sequence i has begins[i] tokens, to which the pass adds num_tokens[i] >= 1, and lies in pages[i], in order, which
    have room for all. Raises ValueError where lengths do not fit.
    """

    def __init__(self, begins: Sequence[int], num_tokens: Sequence[int], pages: Sequence[Sequence[int]]) -> None: ...
    def attend(
        self,
        query: tuple[int, int, int],
        key: tuple[int, int, int],
        value: tuple[int, int, int],
        k_cache: int,
        v_cache: int,
        out: int,
        shape: tuple[int, int, int, int, int],
        is_bf16: bool,
        scale: float,
        softcap: float,
        window: int,
        sinks: int,
        threads: int,
        start: int,
        isa: str = "best",
    ) -> None:
        """Writes a layer's new keys and values into its caches, and attends. Addresses are trusted.

        Tensors are on the CPU, all of float32, or with is_bf16 all of bfloat16 but sinks:

            query, key, value   [N, R, D], [G, R, D] and [G, R, E]: address, and strides of a head and of a row in
                                elements; each row is dense
            k_cache, v_cache    [G, P, D, 32] and [G, P, 32, E'], dense; E' is E, up to a multiple of VALUE_ALIGNMENT
            out                 [R, N, E], dense, to be filled
            shape               N, G, D, E, P
            softcap, window     0: none
            sinks               [N] float32, or 0
            threads, start      of a team, and the address of GOMP_parallel that starts it, or 0: one thread

        Token t of a sequence sees positions max(0, t - window + 1) .. t. Sums are float32. A row's bits depend on its
        own sequence and on isa (of cpu_features()), not on the other rows and not on threads.
        """

PANEL: int
"""Columns of a product whose weights `linear_panels` has side by side."""

def linear_panels(
    x: int,
    counts: Sequence[int],
    weight: int,
    num_outputs: int,
    num_inputs: int,
    bias: int,
    out: int,
    threads: int,
    start: int,
    isa: str = "best",
) -> None:
    """Fills out [R, N] with x [R, K] times the transposes of E weights, and biases [E, N]: counts[e] rows by each.

    Addresses of dense FLOAT tensors, which are trusted; that of bias may be 0. A weight is [N / PANEL rounded up, K,
    PANEL]; R is the sum of counts. `threads` and `start` are those of PassRows.attend. A number is the sum of its
    products in the order of K, and then the bias: its bits depend on neither other rows nor threads. Raises ValueError
    for an `isa` that the CPU lacks.
    """

def linear_bfloat16(
    x: int,
    counts: Sequence[int],
    weight: int,
    num_outputs: int,
    num_inputs: int,
    bias: int,
    out: int,
    threads: int,
    start: int,
    isa: str = "best",
) -> None:
    """linear_panels in BF16, with weights [N, K]: sums are FLOAT, and sum and bias are rounded once.

    A row's bits depend on itself alone, and on the instruction set: `isa` is best, avx512bf16 or one of cpu_features().
    """

def rms_norm(x: int, rows: int, dim: int, weight: int, eps: float, out: int, threads: int, start: int) -> None:
    """Fills out with x / sqrt(mean(x^2) + eps) * weight, row by row.

    Addresses of dense float32 tensors x and out [rows, dim] and weight [dim], which are trusted; threads and start are
    those of PassRows.attend. A row's bits depend on itself alone, and on the instruction set.
    """

class SamplerParams:
    """How one request is sampled; the defaults sample from softmax(logits). Read-only.

    In the order of their application:

        repetition_penalty  logit / penalty, or logit * penalty below 0, once for a token of prompt or output; 1: off
        frequency_penalty   subtracted for every time a token stands in the output; 0: off
        presence_penalty    subtracted once from a token of the output; 0: off
        temperature         0: the largest logit, the lowest id among equals, whatever the filters
        top_k               tokens stay while fewer than k weigh more; 0: off
        top_p               tokens stay while those that weigh more have less than top_p of what is left; 1: off
        min_p               tokens stay with at least min_p times the largest probability; 0: off

    Raises ValueError for a value out of range.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int = 0,
    ) -> None: ...

def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10: four random 32-bit words for a counter of four and a key of two.

    Output position i of a request draws with counter (i mod 2^32, i >> 32, draw, 0), where draw is that of
    `uniform_bits`, and key (seed mod 2^32, seed >> 32); u = (x0 << 32 | x1) >> 11, in units of 2^-53.
    """

def uniform_bits(seed: int, position: int, count: int, draw: int = 0) -> list[int]:
    """The numbers, in units of 2^-53, of `count` output positions from `position` on.

    One decides a token (draw 0), one its proposal (1), and one whether a proposal that was drawn is accepted (2).
    """

def verify_block(
    logits: NDArray[np.float32],
    proposals: list[int],
    params: SamplerParams,
    position: int,
    prompt_ids: NDArray[np.int64] | None = None,
    output_ids: NDArray[np.int64] | None = None,
    candidate_ids: NDArray[np.int64] | None = None,
    probabilities: NDArray[np.float64] | None = None,
) -> list[int]:
    """The tokens that a verify pass emits: the accepted prefix of proposals [K] and one token more.

    Row r of logits [K + 1, V] is the target's for output position `position` + r. The emitted tokens are those of
    plain sampling with the same seed, whatever the proposals; without proposals this is plain sampling
    (docs/sampling.md). prompt_ids and output_ids, what stands before the first row, are read only with a penalty.

    With candidate_ids and probabilities [K, k], the distributions that the proposals were drawn from, they are judged
    by rejection sampling: the emitted tokens have plain sampling's distribution, and are not the same.

    Raises ValueError for shapes that do not fit, ids out of range, and a row (as far as rows are needed) with NaN,
    +infinity, or nothing but -infinity; TypeError where an array would have to be copied.
    """

_Pass: TypeAlias = tuple[float, tuple[int, ...], tuple[int, ...], int, bool]
"""Time, tokens, drafts, how many of the tokens are accepted drafts, and whether a grammar forced these."""

class Answer:
    """The answer to one request as it grows: its tokens, and what each pass of the target added.

    It ends with one of the stop ids or the `max_tokens`-th token. prompt_ids are read only with a penalty.
    """

    def __init__(self, params: SamplerParams, prompt_ids: list[int], max_tokens: int, stop_ids: list[int]) -> None: ...
    def __len__(self) -> int: ...
    def token_ids(self, begin: int = 0) -> list[int]:
        """The tokens from number `begin` on."""

    def table_of_counts(self, vocab: int, others: list[int]) -> NDArray[np.int64]:
        """With a penalty: [2 T], T tokens of prompt, answer and `others`, each once, and how often the answer has each.

        0: in the prompt only; -1: in `others` only. Ids beyond the vocabulary, as images have, are left out.
        ValueError without a penalty.
        """

    def passes(self, begin: int = 0) -> list[_Pass]:
        """Passes from number `begin` on; the first emitted the first token."""

    def cut(self, num_tokens: int) -> None:
        """Shortens the answer to `num_tokens`; ValueError unless they end in the last pass."""

def accept_rows(
    logits: NDArray[np.float32],
    num_rows: list[int],
    num_skipped: list[int],
    answers: list[Answer],
    proposals: list[Proposals],
) -> list[list[int]]:
    """The tokens that a pass emits after each answer: verify_block for all of them, with their parameters.

    Logits [R, V] have num_rows[i] rows for answer i, which are passed over up to num_skipped[i]; without any left there
    is no token. The first row that has NaN, +infinity, or nothing but -infinity ends a block before it. Answers stay as
    they are until `append_all`. Raises as verify_block does, but not for such rows.
    """

def accept_chosen(
    choices: NDArray[np.int64],
    are_finite: NDArray[np.bool_],
    num_rows: list[int],
    num_skipped: list[int],
    proposals: list[Proposals],
) -> list[list[int]]:
    """The same by the target's own token [R] of each row, and whether the row is finite: proposals that equal them."""

def append_all(
    answers: list[Answer], proposals: list[Proposals], accepted: list[list[int]], time: float
) -> list[tuple[int, str]]:
    """Appends the accepted tokens of a pass at `time` to each answer, up to one that ends it.

    Returns the places of answers that end, each with a FinishReason: "error" without a token, "stop" or "length".
    """

def next_blocks(answers: list[Answer], lengths: list[int]) -> tuple[list[int], list[int]]:
    """Last token of each answer, and how many of `lengths` drafts can follow it before its last token."""

def last_passes(answers: list[Answer]) -> tuple[int, dict[tuple[bool, int, int, int], int]]:
    """Tokens that the last pass of each answer emitted, in all, and how many passes but an answer's first there are of:

    whether the drafts were forced, how many drafts, how many tokens, and drafts among these.
    """

def draft_counts(proposals: list[Proposals], accepted: list[list[int]]) -> tuple[list[int], list[int]]:
    """Drafts of each block, and accepted ones among them, none of the drafts that a grammar forced.

    Blocks without a token are left out, as are the parts of `accepted` that follow the blocks.
    """

def row_passes(
    slots: list[int], num_rows: list[int], num_kept: list[int], max_rows: int
) -> list[tuple[list[int], list[int], NDArray[np.int64]]]:
    """Passes of at most max_rows rows over the first num_kept[i] of num_rows[i] rows of slots[i], which lie end to end.

    Each has its slots, how many rows each of them gets, and the places of the rows.
    """

def token_probabilities(
    logits: NDArray[np.float32],
    params: SamplerParams,
    out: NDArray[np.float64],
    prompt_ids: NDArray[np.int64] | None = None,
    output_ids: NDArray[np.int64] | None = None,
) -> None:
    """Fills out [V] with the distribution that verify_block samples from, for one row of logits [V].

    Raises as verify_block does.
    """

def token_logprobs(logits: NDArray[np.float32], token_ids: list[int]) -> list[float]:
    """log softmax(logits[r])[token_ids[r]] for each token; logits [n, V] may have more rows.

    Takes the target's logits as they are: no penalty, temperature or filter. Raises as verify_block does.
    """

def cpu_features() -> list[str]:
    """Instruction sets with kernels of their own on this CPU, best first, out of "avx512", "avx2" and "scalar".

    isa="best" chooses the first.
    """

def amax(weights: _Weights, threads: int = 0) -> float:
    """max |w|, exactly; 0 for an empty tensor. threads=0 takes all hardware threads.

    The scales that modelopt 0.47 exports are, in float32,

        FP8:    scale   = amax / 448
        NVFP4:  scale_2 = amax / 2688        (6 * 448)

    Raises NonFiniteError.
    """

def pack_fp8(weights: _Weights, scale: float, out: NDArray[np.uint8], threads: int = 0) -> None:
    """Fills out [R, K] with e4m3 codes of w / scale.

        out = e4m3(dtype(float32(w) / scale))        dtype: the weights' own

    Rounds to nearest even, twice as modelopt 0.47 does, and saturates at +-448. Weights in float32 are rounded once.

    Raises ValueError for another shape of out or a scale that is not positive and finite (float32), and
    NonFiniteError, after which out holds anything; TypeError where an array would have to be copied.
    """

def pack_nvfp4(
    weights: _Weights, scale_2: float, out_data: NDArray[np.uint8], out_scales: NDArray[np.uint8], threads: int = 0
) -> None:
    """Fills out_data [R, K / 2] with e2m1 pairs and out_scales [R, K / 16] with e4m3 block scales.

        s      = max |w of the block of 16| / (6 * scale_2), or 1 where that is 0
        scale  = e4m3(clamp(s, 2^-9, 448))
        code   = e2m1(w / (scale * scale_2))         saturating at +-6; an exact zero has no sign
        data   = code[even] | code[odd] << 4

    All in float32, rounding to nearest even, as modelopt 0.47 does. Weights that are to be fused take
    one scale_2, from the largest amax among them.

    Raises as pack_fp8 does, and ValueError where 16 does not divide K.
    """

def pack_int4(
    weights: _Weights, out_data: NDArray[np.uint8], out_scales: NDArray[np.float32], threads: int = 0
) -> None:
    """Fills out_data [R / 2, K] with pairs of two's complement codes and out_scales [R, K / 32] with block scales.

        scale  = bfloat16(max |w of the block of 32| / n), or 1 where that is 0
        code   = rint(w / scale)                     saturating at -8 and 7
        data   = code[even row] | code[odd row] << 4

    n is the one out of 7, 7.25, 7.5, 7.75 and 8 that loses least, by the sum of squares. All in float32, rounding to
    nearest even, in the layout of modelopt 0.47's INT4. modelopt does not round the scale; TensorRT reads it in the
    activations' type.

    Raises as pack_fp8 does, and ValueError where 2 does not divide R, or 32 K.
    """

class KVInjectionAttributes:
    """The attributes of the node DFlashKVInjectionAttention, under their names (docs/kv_injection.md)."""

    def __init__(
        self,
        *,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        softmax_scale: float,
        sliding_window: int,
        causal: int,
        k_scale: float,
        v_scale: float,
        fp8_cache: int,
        has_qkv_bias: int,
        fp8_output: int,
        output_scale: float,
    ) -> None: ...

def kv_injection_attention_check(attributes: KVInjectionAttributes, batch: int, block: int) -> None:
    """Raises ValueError for the first attribute or size beyond the plugin's limits; batch and block are B and S."""

def kv_injection_attention_reference(
    attributes: KVInjectionAttributes, inputs: Sequence[_Tensor], out: _Tensor
) -> None:
    """Fills out [B*S, N*D] or [B, S, N*D] on the CPU; defines the plugin, to test its kernel against.

    inputs are the node's in their order; out has qkv's dtype, or with fp8_output float8_e4m3fn. Computes in float64,
    rounds once at the end and reads only visible rows of the cache.

    Raises ValueError, naming the tensor, for a dtype, shape, layout or device that does not fit, a size beyond the
    plugin's limits, and a slot id or context length outside the cache.
    """

def kv_injection_attention(
    attributes: KVInjectionAttributes,
    inputs: Sequence[_Tensor],
    out: _Tensor,
    workspace: _Tensor,
    stream: int,
    *,
    host_slot_ids: Sequence[int] | None = None,
    host_context_lengths: Sequence[int] | None = None,
    kernel: str = "best",
) -> None:
    """Starts the attention kernel on `stream` (a cudaStream_t) of the current CUDA device and returns.

    workspace is any dense tensor of at least kv_injection_attention_workspace_bytes. The kernel trusts slot_ids
    and context_lengths; host_slot_ids and host_context_lengths, their values on the host, are checked.
    kernel: one of kv_injection_attention_kernels. "mma" runs everywhere, "wgmma" on compute capability 9.0 for the
    sizes it is compiled for; "best" chooses.

    Raises as the reference does, and RuntimeError with CUDA's text, or in a build without CUDA.
    """

def kv_injection_attention_workspace_bytes(
    attributes: KVInjectionAttributes, inputs: Sequence[_Tensor], out: _Tensor
) -> int:
    """Scratch that kv_injection_attention needs for these shapes, on any GPU."""

def kv_injection_append_reference(
    kv: _Tensor, page_ids: _Tensor, offsets: _Tensor, k_cache: _Tensor, v_cache: _Tensor
) -> None:
    """Puts rows kv [T, 2, L, G, D] into k_cache, v_cache [pages, L, R, G, D]: row t at offsets[t] of page page_ids[t].

    Runs on the CPU and defines the append kernel. Tensors share a dtype (float16, bfloat16, float8_e4m3fn or float32;
    NumPy has no FP8); page_ids and offsets are int32. Skips a row whose page or offset does not exist. Of rows that go
    to one place, any may stay.

    Raises ValueError, naming the tensor, where dtype, shape, layout or device does not fit, where G * D elements are no
    multiple of 16 bytes, or for too many rows.
    """

def kv_injection_append(
    kv: _Tensor, page_ids: _Tensor, offsets: _Tensor, k_cache: _Tensor, v_cache: _Tensor, stream: int
) -> None:
    """kv_injection_append_reference on the current CUDA device: one launch on `stream` (a cudaStream_t), asynchronous.

    Raises as the reference does, and RuntimeError with CUDA's text, or in a build without CUDA.
    """

def kv_injection_attention_kernels() -> list[str]:
    """Names of the attention kernels; those that no GPU has run only in a build with DFLASH_EXPERIMENTAL_KERNELS."""

def cuda_architectures() -> list[str]:
    """Architectures that this module's kernels were compiled for, such as "90a"; empty in a build without nvcc."""

# SPDX-License-Identifier: Apache-2.0
"""GPUs that the attention kernels are compiled for, and what data sheets say of them. Clocks are boost clocks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Data-sheet numbers; `mma` and `wgmma` are multiply-adds a clock and SM with 16-bit operands and FP32 sums."""

    name: str
    architecture: str
    sms: int
    ghz: float
    terabytes: float  # a second, of its memory
    shared_bytes: int  # shared memory per SM
    mma: int
    mufu: int = 16
    wgmma: int = 0


# wgmma: from the data sheet's dense BF16 rate. mma: A100's documented 1,024; on Hopper mma.sync reaches about 62 % of
# wgmma's 2,048 (arXiv 2501.12084); for 10.x no number is published, the same is assumed. RTX PRO 6000: from its data
# sheet's dense FP16 rate.
GPUS = (
    Gpu(name="H200", architecture="90a", sms=132, ghz=1.98, terabytes=4.8, shared_bytes=228 << 10, mma=1270,
        wgmma=2048),
    Gpu(name="B200", architecture="100f", sms=148, ghz=1.965, terabytes=8.0, shared_bytes=228 << 10, mma=1024),
    Gpu(name="B300", architecture="100f", sms=148, ghz=1.92, terabytes=8.0, shared_bytes=228 << 10, mma=1024, mufu=32),
    Gpu(name="RTX PRO 6000", architecture="120f", sms=188, ghz=2.6, terabytes=1.79, shared_bytes=100 << 10, mma=512),
)  # fmt: skip

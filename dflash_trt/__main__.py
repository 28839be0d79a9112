# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt` is the `dflash-trt` command."""

from dflash_trt.cli import main

if __name__ == "__main__":
    main()

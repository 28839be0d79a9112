# SPDX-License-Identifier: Apache-2.0
"""DFlash speculative decoding: from a draft checkpoint to engines, configs and lossless text."""

__version__ = "0.1.0"

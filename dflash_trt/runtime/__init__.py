# SPDX-License-Identifier: Apache-2.0
"""The decode loop: requests in slots, lossless acceptance and sampling, text as it grows."""

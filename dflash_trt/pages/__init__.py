# SPDX-License-Identifier: Apache-2.0
"""Pages of the caches of target and drafter: who holds which, and tensors made of them."""

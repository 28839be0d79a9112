# SPDX-License-Identifier: Apache-2.0
"""The KV caches of target and drafter: pages, the pool they come from, the prefix index, slots."""

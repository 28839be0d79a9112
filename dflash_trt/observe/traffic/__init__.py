# SPDX-License-Identifier: Apache-2.0
"""A server's own traffic, judged from its counters without asking it anything."""

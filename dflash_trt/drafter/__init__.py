# SPDX-License-Identifier: Apache-2.0
"""The running draft model: the two graphs executed, and the context cache that they read."""

# SPDX-License-Identifier: Apache-2.0
"""The running draft model: an executor of the graphs for each backend, and one Drafter with its context cache."""

# SPDX-License-Identifier: Apache-2.0
"""The running draft model: an executor of the two graphs for each backend, and one Drafter with its context cache."""

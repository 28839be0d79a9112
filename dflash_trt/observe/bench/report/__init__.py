# SPDX-License-Identifier: Apache-2.0
"""Reports on bench runs: values first, then their tables, verdict and page."""

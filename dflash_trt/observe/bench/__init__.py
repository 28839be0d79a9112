# SPDX-License-Identifier: Apache-2.0
"""Measures servers under load. Loads no torch.

`experiment` fixes what is measured, `sweep` measures it point by point with AIPerf (`load/`) and the server's own
counters, `run_directory` keeps the points, and `report/` compares them.
"""

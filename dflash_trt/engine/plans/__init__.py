# SPDX-License-Identifier: Apache-2.0
"""Plans: the graphs compiled by TensorRT, how they are built, checked, loaded and run. Not yet run on a GPU."""

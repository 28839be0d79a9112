# SPDX-License-Identifier: Apache-2.0
"""One file for each dialect of draft checkpoints: config.json becomes a DraftSpec, tensors get z-lab's names."""

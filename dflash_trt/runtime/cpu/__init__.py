# SPDX-License-Identifier: Apache-2.0
"""What replaces transformers' layers and torch's operators on a CPU; without this room a runtime decodes the same."""

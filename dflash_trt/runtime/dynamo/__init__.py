# SPDX-License-Identifier: Apache-2.0
"""Worker for NVIDIA Dynamo on the embedded runtime, as an LLMEngine of ai-dynamo 1.6.1."""

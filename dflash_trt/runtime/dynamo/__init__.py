# SPDX-License-Identifier: Apache-2.0
"""A worker of NVIDIA Dynamo's around the embedded runtime: its LLMEngine class, as in ai-dynamo 1.6.1."""

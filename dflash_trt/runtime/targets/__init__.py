# SPDX-License-Identifier: Apache-2.0
"""The target model on Hugging Face transformers, with its taps and a cache of slots."""

# SPDX-License-Identifier: Apache-2.0
"""Rules that a schema cannot express: how settings must fit the models, the GPUs and each other."""

# SPDX-License-Identifier: Apache-2.0
"""What a release's schema cannot say: how settings must fit the models, the GPUs and each other."""

# SPDX-License-Identifier: Apache-2.0
"""Settings, requests and answers that all runtimes and front ends share. Loads no torch."""

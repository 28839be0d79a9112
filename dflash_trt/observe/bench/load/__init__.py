# SPDX-License-Identifier: Apache-2.0
"""AIPerf as a program: its command line, its run, and what it exports."""

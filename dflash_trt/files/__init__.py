# SPDX-License-Identifier: Apache-2.0
"""Where bytes from outside are read and results are written: strict YAML, atomic files and directories."""

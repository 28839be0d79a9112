# SPDX-License-Identifier: Apache-2.0
"""Server configurations that others wrote, in the forms in which they are deployed: argument files and manifests."""

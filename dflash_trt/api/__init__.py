# SPDX-License-Identifier: Apache-2.0
"""What every runtime and every front end shares: settings, requests and answers. Loads no torch."""

# SPDX-License-Identifier: Apache-2.0
"""How fast a deployment will be, before it is rented: a step's cost, the curve, settings. No torch."""

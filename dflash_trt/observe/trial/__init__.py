# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt try`: a deployment or engine, served with and without DFlash, and compared."""

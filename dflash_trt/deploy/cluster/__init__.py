# SPDX-License-Identifier: Apache-2.0
"""A deployment as clusters start it: a Slurm script, Kubernetes manifests, a graph of NVIDIA Dynamo's. Not yet run."""

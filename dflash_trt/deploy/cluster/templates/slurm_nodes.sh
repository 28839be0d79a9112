#!/bin/bash
<head>
# sbatch THIS_FILE. Needs <needs>.
# Answers on <address> of the job's first node; serve-config --host says where else.
#SBATCH --job-name=<name>
#SBATCH --nodes=<nodes>
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=<gpus_per_node>
<sbatch>
set -euo pipefail

# Weights are read from <models>, nothing is downloaded.
export HF_HOME=<models> HF_HUB_OFFLINE=1
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export leader="${nodes%%$'\n'*}"

# shellcheck disable=SC2016 # each node fills in its own rank
srun \
<place>
  <command>

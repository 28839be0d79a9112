#!/bin/bash
<head>
# sbatch THIS_FILE, from a directory that every node sees. Needs <needs>, and `srun --mpi=pmix true`: --mpi=list also names a PMIx that does not load.
# Answers on <address> of the job's first node; serve-config --host says where else.
#SBATCH --job-name=<name>
#SBATCH --nodes=<nodes>
#SBATCH --ntasks-per-node=<gpus_per_node>
#SBATCH --gpus-per-node=<gpus_per_node>
<sbatch>
set -euo pipefail

config="$SLURM_SUBMIT_DIR/<name>-$SLURM_JOB_ID.yaml"
if [[ $config == *[,:[:space:]]* ]]; then
  echo "error: expected a path without , : and spaces, at which it is split, found $SLURM_SUBMIT_DIR" >&2
  exit 1
fi
trap 'rm -f "$config"' EXIT
cat > "$config" <<'END_OF_CONFIG'
<config>
END_OF_CONFIG

# Weights are read from <models>, nothing is downloaded.
export HF_HOME=<models> HF_HUB_OFFLINE=1

srun --mpi=pmix \
<place>
  <command>

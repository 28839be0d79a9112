## Put the weights below <models> of every node
export HF_HOME=<models>
<weights>

## Build the TensorRT plans, with the image and on the GPU model that will run them
<plans>

## See whether srun starts MPI ranks: --mpi=list also names a PMIx that it cannot load
<mpi>

## Submit
job=$(sbatch --parsable <file>)
until squeue --job "$job" --noheader --format %T | grep -q RUNNING; do sleep 5; done

## Reach the first node, where the server answers
node=$(scontrol show hostnames "$(squeue --job "$job" --noheader --format %N)" | head -n 1)
ssh -f -N -L <port>:127.0.0.1:<port> "$node"

<ask>

## Stop it
scancel "$job"

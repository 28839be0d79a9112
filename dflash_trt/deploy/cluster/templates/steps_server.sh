## Get the weights
<weights>

## Build the image <image>
<build>

## Build the TensorRT plans, with the TensorRT and on the GPU model that will run them
<plans>

## Start the server in a container (<image>)
docker run --detach --rm --name dflash --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 --publish 127.0.0.1:<port>:<port> \
  --volume "$PWD:$PWD" --workdir "$PWD"<volumes> \
  --volume "${HF_HOME:-$HOME/.cache/huggingface}:/hub" --env HF_HOME=/hub --env HF_TOKEN \
  --entrypoint <program> <image> <arguments>
# Or, with <package> installed here: <start> &

<ask>

## Stop it
docker stop dflash
# Or, without the container: kill %1

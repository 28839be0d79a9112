## Get the weights
<weights>

## Start the server in a container (<image>)
<build>
docker run --detach --rm --name dflash --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 --publish 127.0.0.1:<port>:<port> --workdir /work --env HF_TOKEN \
  --volume "$PWD:/work" --volume "$HOME/.cache/huggingface:/root/.cache/huggingface"<volume> \
  --entrypoint <program> <image> <arguments>
<build_remark>
# Or, where <package> is installed: <start> &

<ask>

## Stop it
docker stop dflash
# Or, without the container: kill %1

## Get the weights, on every node
<weights>

## Start the server in a container (<image>), on every node
export NODE_RANK="${NODE_RANK:?0 on the first node, 1 on the next}"
export LEADER="${LEADER:?address of the first node}"
docker run --detach --rm --name dflash --gpus all --ipc host --ulimit memlock=-1 --ulimit stack=67108864 --network host --device /dev/infiniband \
  --env NODE_RANK --env LEADER --env NCCL_SOCKET_IFNAME --env GLOO_SOCKET_IFNAME \
  --volume "$PWD:$PWD" --workdir "$PWD"<volumes> \
  --volume "${HF_HOME:-$HOME/.cache/huggingface}:/hub" --env HF_HOME=/hub --env HF_TOKEN \
  --entrypoint sh <image> <file>
# <file> has to lie on every node. The link between them: export NCCL_SOCKET_IFNAME=INTERFACE GLOO_SOCKET_IFNAME=INTERFACE
# Or, with <package> installed here: sh <file> &

<ask>

## Stop it, on every node
docker stop dflash
# Or, without the container: kill %1

docker run --rm --gpus all --ipc host --volume "$PWD:$PWD" --workdir "$PWD"<volumes> \
  --entrypoint <program> <image> <arguments>

## Fill the PersistentVolumeClaim models
# Gated weights need a token first: kubectl create secret generic hf-token --from-file=token="$HOME/.cache/huggingface/token"
<weights>
# Several nodes read it at once: its access mode is ReadWriteMany, or ReadOnlyMany once filled.
<mounted>

## Build the TensorRT plans, with the image and on the GPU model that will run them
<plans>

## Apply
kubectl apply -f <file>

## Forward the port, as soon as pods run
(until kubectl port-forward <service> <port>; do sleep 5; done) > /dev/null 2>&1 &

<ask>

## Stop it
kill %1
kubectl delete -f <file>

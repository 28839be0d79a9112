## Fill the PersistentVolumeClaim models
kubectl apply -f - <<'JOB'
apiVersion: batch/v1
kind: Job
metadata: {name: <name>-weights}
spec:
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: download
        image: python:3.12-slim
        command: [sh, -c, <fetch>]
        env: [{name: HF_HOME, value: <models>}]
        volumeMounts: [{name: models, mountPath: <models>}]
      volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
JOB
kubectl wait --for condition=complete --timeout 2h job/<name>-weights
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

kubectl apply -f - <<'JOB'
apiVersion: batch/v1
kind: Job
metadata: {name: <name>-plans}
spec:
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: build
        image: <image>
        command: <command>
        workingDir: <models>
        resources: {limits: {nvidia.com/gpu: 1}}
        volumeMounts: [{name: models, mountPath: <models>}]
      volumes: [{name: models, persistentVolumeClaim: {claimName: models}}]
JOB
kubectl wait --for condition=complete --timeout 2h job/<name>-plans

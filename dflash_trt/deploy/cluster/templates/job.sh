kubectl apply -f - <<'END_OF_JOB'
<job>
END_OF_JOB
kubectl wait --for condition=complete --timeout 2h job/<name>

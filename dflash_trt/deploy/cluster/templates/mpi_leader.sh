set -eu
options=(-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR)
hosts=$LWS_LEADER_ADDRESS:<gpus_per_node>
for worker in $(seq 1 <workers>); do
  host=${LWS_LEADER_ADDRESS%%.*}-$worker.${LWS_LEADER_ADDRESS#*.}
  hosts=$hosts,$host:<gpus_per_node>
  until ssh "${options[@]}" "$host" true; do sleep 2; done
done
exec "$(command -v mpirun)" --allow-run-as-root -n <ranks> --host "$hosts" \
  --mca plm_rsh_args "${options[*]}" --mca orte_keep_fqdn_hostnames 1 \
  -x PATH -x LD_LIBRARY_PATH -x HF_HOME -x HF_HUB_OFFLINE \
  trtllm-llmapi-launch <command>

## Wait until it is healthy: a large model takes minutes
url=<url>
until curl -fsS "$url/health" > /dev/null 2>&1; do sleep 5; done

## Ask
<key>
model=$(curl -fsS<authorization> "$url/v1/models" |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')
curl -fsS<authorization> "$url/v1/chat/completions" -H 'Content-Type: application/json' \
  -d '{"model": "'"$model"'", "messages": [{"role": "user", "content": "Write a prime sieve in Python."}]<variables>}'

## See whether it drafts as it should
dflash-trt doctor "$url"<key_file>

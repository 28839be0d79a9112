#!/usr/bin/env bash
# onnxruntime 1.32.0 on Linux: `import onnxruntime` writes a device id and a database of events under the home.
#
# The files are there after the import alone, before a session exists and before disable_telemetry_events() can be
# called. ORT_DISABLE_TELEMETRY=1 prevents it if it is set before the import. It matters to servers with a read-only or
# shared home, and where it was promised that nothing is recorded. (Whether anything is sent was not examined.)
#
# Expected: an import that writes nothing, or a call that turns it off.
set -euo pipefail

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0

seen=$(
  for setting in ORT_DISABLE_TELEMETRY=0 ORT_DISABLE_TELEMETRY=1; do
    mkdir "$directory/$setting"
    env HOME="$directory/$setting" XDG_CACHE_HOME= "$setting" "$directory/venv/bin/python" -c \
      'import onnxruntime; onnxruntime.disable_telemetry_events()'
    echo "$setting: $(find "$directory/$setting" -type f -printf '%f\n' | sort | paste -sd ' ')"
  done
)
echo "$seen"
diff <(echo "$seen") - <<'SEEN'
ORT_DISABLE_TELEMETRY=0: deviceid onnxruntime.db
ORT_DISABLE_TELEMETRY=1: 
SEEN

#!/usr/bin/env bash
# What was measured, and what is to be expected, as pages: by a new user with the wheel and its extra `observe`, up to
# where servers are asked:
#
#     bash compare.sh RUN
set -euo pipefail
run=$1
dflash-trt bench report "$run" -o report
dflash-trt estimate gpt-oss-120b.b300x8.latency --html estimate.html
dflash-trt tune gpt-oss-120b.b300x8.latency --slo 500 --tau 4.7
if dflash-trt doctor http://127.0.0.1:9; then exit 1; fi  # no server: said, and no success
test -s report/report.html
test -s estimate.html

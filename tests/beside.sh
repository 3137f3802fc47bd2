#!/bin/bash
# Two commands side by side: tests/beside.sh FIRST SECOND. The output of SECOND is shown as it comes, that of FIRST when
# both have ended. Exit code: 0 if both gave 0, else the first other one. Ctrl-C comes to both, from the terminal.
set -uo pipefail
said=$(mktemp)
trap 'rm -f "$said"' EXIT
trap 'kill "$first" 2> /dev/null; wait; cat "$said"; exit 143' TERM
bash -c "$1" > "$said" 2>&1 < /dev/null &
first=$!
bash -c "$2"
second_code=$?
wait "$first"
first_code=$?
cat "$said"
test "$first_code" = 0 || echo "failed ($first_code): $1"
test "$second_code" = 0 || echo "failed ($second_code): $2"
exit $((first_code ? first_code : second_code))

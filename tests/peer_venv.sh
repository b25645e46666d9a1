#!/usr/bin/env bash
# Puts the packages of a requirements file into a virtual environment apart from our own; does nothing when they are there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 requirements=$2
python=.venv/bin/python
stamp="$venv/.requirements"
wanted="$("$python" --version) $(sha256sum "$requirements")"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/pip" --disable-pip-version-check install --quiet --no-deps --requirement "$requirements"
printf '%s' "$wanted" > "$stamp"

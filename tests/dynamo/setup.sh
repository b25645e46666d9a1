#!/usr/bin/env bash
# Puts NVIDIA Dynamo into .venv-dynamo, apart from our own packages; does nothing when it is there already.
set -euo pipefail
cd "$(dirname "$0")/../.."
requirements=tests/dynamo/requirements.txt
venv=.venv-dynamo
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

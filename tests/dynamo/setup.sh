#!/usr/bin/env bash
# Puts NVIDIA Dynamo into .venv-dynamo.
set -euo pipefail
exec bash "$(dirname "$0")/../peer_venv.sh" .venv-dynamo tests/dynamo/requirements.txt

#!/usr/bin/env bash
# Puts a real tritonserver into .venv-triton.
set -euo pipefail
exec bash "$(dirname "$0")/../peer_venv.sh" .venv-triton tests/tritonserver/requirements.txt

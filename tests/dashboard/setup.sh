#!/usr/bin/env bash
# Makes `chromium` available, in which the dashboard's tests look at its page.
set -euo pipefail

if command -v chromium >/dev/null; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "tests/dashboard needs chromium on PATH. Install: sudo apt-get install --no-install-recommends chromium" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq >/dev/null || true # old package lists may still do
apt-get install -y -qq --no-install-recommends chromium >/dev/null

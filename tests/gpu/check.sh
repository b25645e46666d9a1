#!/usr/bin/env bash
# Everything that needs a GPU, in under 8 minutes. Part A needs a driver only; part B needs TensorRT 11 and torch too.
# Usage: tests/gpu/check.sh [OUT]   (tables on stdout, JSON in OUT, default gpu-check/)
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${1:-gpu-check}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
status=0

echo "== part A: the ConfidenceTopKPack kernel"
timeout 120 "$python" tests/gpu/kernel_check.py --json "$out/kernel.json" || status=$?

echo "== part B: TensorRT plans"
if "$python" -c 'import tensorrt; tensorrt.Builder' 2>/dev/null; then
    timeout 330 "$python" tests/gpu/engine_check.py --out "$out/bundles" --json "$out/engine.json" || status=$?
else
    echo "skipped: the package tensorrt is not installed (pip install 'dcut-trt[tensorrt]', from NVIDIA's index)"
fi
exit "$status"

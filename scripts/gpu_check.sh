#!/bin/sh
# Checks and measures this machine's accelerator in under ten minutes; gpu_check.py says what.
cd "$(dirname "$0")/.." && PYTHONPATH=. exec "${PYTHON:-python3}" scripts/gpu_check.py "$@"

#!/bin/sh
# The model of `adaptivit demo`: the quickstart's AHT-ViT, in half precision, calibrated; and its accuracy by budget.
#   benchmarks/demo_model.sh OUT
# OUT/aht becomes adaptivit/serve/model (without its calibration.csv and .png), OUT/demo.csv docs/results/raw/demo/demo.csv.
set -eu
out=$1
[ -d "$out/aht" ] || uv run adaptivit quickstart --seed 0 --out "$out"
uv run python - "$out/aht/model.safetensors" <<'EOF'
import sys

from safetensors.torch import load_file, save_file

save_file({k: v.half() for k, v in load_file(sys.argv[1]).items()}, sys.argv[1])
EOF
uv run adaptivit calibrate "$out/aht" --data digits
uv run adaptivit evaluate --data digits --checkpoint "$out/static" --csv "$out/demo.csv"
for budget in none -0% -10% -20% -30% -40% -50% -60% -70%; do
  uv run adaptivit evaluate --data digits --checkpoint "$out/aht" --budget $budget --csv "$out/demo.csv"
done

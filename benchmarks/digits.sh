#!/bin/sh
# Every method on the quickstart's digits, under one recipe, with no file and no download.
#   benchmarks/digits.sh OUT [more flags of compare]
# A static model is trained first; every method goes on from it for as many epochs, taught by it, and so does static.
set -eu
out=$1
shift
papers=feature=fc1,center_per_image=0,gate=shared,gamma=1,halt_point=after,surrogate=score,surrogate_width=0.25
exec uv run adaptivit compare --data digits --backbone digits_vit --out "$out" --start static --distill 1 \
  --epochs 3 --batch-size 32 --optim.lr 1e-3 --optim.warmup-epochs 0.5 --augment.kind none "$@" --methods \
  aht:budget,loss.cost_target=0.5 aht_merge:$papers,start_at=depth,halting_blocks=0+1+2+3+4,loss.cost_target=0.5 \
  avit amod:capacity=0.25 mod:capacity=0.25 dynamicvit:keep=0.6 evit:keep=0.6 tome:r=6 fold:budget=0.5 act confidence:threshold=0.95 similarity pondernet \
  static:depth=3 static:share=0.5,by=width

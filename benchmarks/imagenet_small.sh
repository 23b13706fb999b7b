#!/bin/sh
# Every method adapted on a few thousand ImageNet images and judged on others.
#   benchmarks/imagenet_small.sh DATA WEIGHTS OUT [more flags of compare]
# DATA has train/ (imagenet/adapt) and test/ (imagenet/eval). Self-distillation from the static model, one recipe for all.
set -eu
data=$1 weights=$2 out=$3
shift 3
papers=center_per_image=0,gate=shared,gamma=1,halt_point=after,surrogate=score,surrogate_width=0.25,start_at=depth
papers=$papers,halting_blocks=0+1+2+3+4+5+6+7+8+9+10,loss.cost_target=0.67
exec "${PYTHON:-python3}" -m adaptivit compare --data "$data" --weights "$weights" --out "$out" \
  --backbone deit_tiny_patch16_224 --epochs 4 --batch-size 64 --optim.lr 3e-5 --optim.warmup-epochs 0.5 --augment.kind crop \
  --distill 1 --val-split 0.05 "$@" --methods \
  aht:budget,loss.cost_target=0.67 aht_merge:$papers,feature=fc1 aht_merge:$papers,feature=class_row,removal=drop \
  avit amod:capacity=0.5 mod:capacity=0.5 dynamicvit:keep=0.7 evit:keep=0.7 tome:r=10 fold:budget=0.67 \
  act confidence:threshold=0.8 similarity:threshold=0.1 pondernet static:depth=8

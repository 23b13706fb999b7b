#!/bin/sh
# Adaptation without any training (A-MoD Table 3's experiment, and beyond): DeiT-T's ImageNet weights as they are.
#   benchmarks/without_training.sh DATA WEIGHTS OUT [more flags of compare]
# DATA is a folder of labelled images. imagenet/adapt is for choosing, imagenet/eval for the report.
set -eu
data=$1 weights=$2 out=$3
shift 3
exec "${PYTHON:-python3}" -m adaptivit compare --epochs 0 --data "$data" --weights "$weights" --out "$out" \
  --backbone deit_tiny_patch16_224 --batch-size 250 "$@" --methods static \
  fold:budget=0.75 fold:budget=0.678 fold:budget=0.60 fold:budget=0.52 \
  fold:budget=0.678,evidence=column fold:budget=0.60,evidence=column fold:budget=0.52,evidence=column \
  fold:budget=0.678,value=0 fold:budget=0.60,value=0 fold:budget=0.52,value=0 \
  tome:r=8 tome:r=10 tome:r=12+13+12+13+12+13+12+13+12+13+12+13 tome:r=15+15+15+16+15+15+15+16+15+15+15+16 \
  tome:r=17,inflection=1 tome:r=16,inflection=0.5 \
  evit:keep=0.8 evit:keep=0.7 evit:keep=0.6 evit:keep=0.7,fuse=false \
  amod:capacity=0.7 amod:capacity=0.5 amod:capacity=0.125 amod:capacity=0.5,first_block=5 \
  mod:capacity=0.5 mod:capacity=0.125 mod:capacity=0.5,gate=none \
  confidence:threshold=0.9 static:depth=8

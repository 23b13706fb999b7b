#!/bin/sh
# Speed on a GPU: the rows of docs/results/raw/h200/ (norms/ is `small` at batch 32 with --repeats 40). From the checkout, with or without installation:
#   sh benchmarks/h200.sh warm OUT       fill the compilers' caches, configurations side by side; nothing is kept
#   sh benchmarks/h200.sh small OUT      DeiT-S: a replayed halting profile, and AHT-ViT that decides itself
#   sh benchmarks/h200.sh modes OUT      static models alone, max-autotune among them (slow to compile)
#   sh benchmarks/h200.sh peers OUT      DeiT-S: A-MoD, ToMe, DynamicViT, fold
#   sh benchmarks/h200.sh folding OUT    DeiT-S: AHT-ViT and fold whose tokens fold, in every block and in three
#   sh benchmarks/h200.sh others OUT     DeiT-T, ViT-B, 384 px
#   sh benchmarks/h200.sh training OUT   training steps of AHT-ViT against static ones
# A third word, e.g. "32 256": other batch sizes of small and modes.
set -u
part=$1 out=$2 sizes=${3:-1 32 256 1024}
run="python3 -m adaptivit benchmark --seed 0"
deit="--backbones deit_small_patch16_224"
aht="--profile halting --policies aht:gamma=10,beta=-4.8"  # on these random weights it halts about as the profile does
peers="--policies amod:capacity=0.5 tome:r=13 dynamicvit fold:budget=0.67"
fold="aht_merge:gate=shared"  # halts to 66 and 67 % on these weights
folding="--policies $fold,beta=-3.4 $fold,beta=0.12,halting_blocks=3+6+9 fold:budget=0.67 fold:budget=0.67,blocks=3+6+9"
quick="--static-modes default+graph"
best="--static-modes default+graph max-autotune-no-cudagraphs+graph"
training="python3 benchmarks/training_speed.py --batch 128 --kinds compiled"

case $part in
warm)
  for batch in 1 32 256 1024; do
    $run $deit $aht $quick --batch-sizes $batch --repeats 1 --out "$out/warm$batch" &
  done
  for batch in 32 256; do
    $run $deit $peers $quick --batch-sizes $batch --repeats 1 --out "$out/warm-peers$batch" &
    $run $deit $folding $quick --batch-sizes $batch --repeats 1 --out "$out/warm-folding$batch" &
  done
  $run --backbones deit_tiny_patch16_224 --profile halting $quick --batch-sizes 256 --repeats 1 --out "$out/warm-t" &
  $run --backbones vit_base_patch16_224 --profile halting $quick --batch-sizes 256 --repeats 1 --out "$out/warm-b" &
  $run $deit --img-size 384 --profile halting $quick --batch-sizes 64 --repeats 1 --out "$out/warm-384" &
  $training --turns 1 --steps 1 --warm-up 1 --out "$out/training.csv" &
  wait ;;
small)
  $run $deit $aht $quick --batch-sizes $sizes --out "$out/deit_small" --plot ;;
modes)
  $run $deit $best --batch-sizes $sizes --out "$out/modes" ;;
peers)
  $run $deit $peers $quick --batch-sizes 32 256 --out "$out/peers" --plot ;;
folding)
  $run $deit $folding $quick --batch-sizes 32 256 --out "$out/folding" --plot ;;
others)
  $run --backbones deit_tiny_patch16_224 --profile halting $quick --batch-sizes 256 --out "$out/others"
  $run --backbones vit_base_patch16_224 --profile halting $quick --batch-sizes 256 --out "$out/others"
  $run $deit --img-size 384 --profile halting $quick --batch-sizes 64 --out "$out/others" ;;
training)
  $training --turns 6 --steps 5 --out "$out/training.csv" ;;
*)
  echo "expected warm, small, modes, peers, folding, others or training, got $part" >&2; exit 2 ;;
esac

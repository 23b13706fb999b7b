#!/bin/sh
# The tables of results/ on one GPU, several small models at a time (NVIDIA's MPS shares the GPU between processes):
#   sh benchmarks/tables.sh first DATA WEIGHTS      static on CIFAR-100, which the others go on from
#   sh benchmarks/tables.sh short DATA WEIGHTS      then: ingredients and ablations
#   sh benchmarks/tables.sh imagenet DATA WEIGHTS   DATA has train/ (imagenet/adapt) and test/ (imagenet/eval)
# Stopped, the same command goes on. Finished rows of another machine: benchmarks/restore_rows.py.
set -u
part=$1
given="--data $2 --weights $3"
run="python3 -m adaptivit reproduce"
whole() { $run "$@" $given --jobs 4 --set compile=whole; }
export OMP_NUM_THREADS=1 CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log

case $part in
first)
  whole cifar100-main --seeds 0 --only static ;;
short)
  mkdir -p /tmp/mps /tmp/mps-log
  pgrep -f nvidia-cuda-mps-control > /dev/null || setsid nvidia-cuda-mps-control -d
  $run cifar100-ingredients $given --only "fold*" "ToMe*" "EViT*" --jobs 4 --set compile=blocks &
  whole ablation-sigma --only "sigma 1.0" &
  sleep 60  # one fills the compiler's cache, most of which the others share
  export TORCHINDUCTOR_COMPILE_THREADS=4
  (whole ablation-target-depth; whole ablation-feature; whole ablation-mass; whole ablation-kl) &
  (whole cifar100-ingredients --only "AHT*" "static*"; whole ablation-threshold; whole ablation-sigma
   whole ablation-stages; whole ablation-planner) &
  wait ;;
imagenet)
  $run imagenet-adapt $given --jobs 8 --workers 1 ;;
*)
  echo "expected first, short or imagenet, got $part" >&2; exit 2 ;;
esac

#!/bin/sh
# The tables of docs/results/raw/ on one GPU, several small models at a time (NVIDIA's MPS shares the GPU between processes):
#   sh benchmarks/tables.sh first DATA WEIGHTS      static on CIFAR-100, which the others go on from
#   sh benchmarks/tables.sh short DATA WEIGHTS      then: ingredients and ablations
#   sh benchmarks/tables.sh imagenet DATA WEIGHTS   DATA has train/ (imagenet/adapt) and test/ (imagenet/eval)
# Stopped, the same command goes on. Finished rows of another machine: benchmarks/restore_rows.py. No spaces in paths.
# Exit code: that of the last call of `adaptivit reproduce` that was not 0.
set -u
part=$1
given="--data $2 --weights $3"
run="python3 -m adaptivit reproduce"
whole() { $run "$@" $given --jobs 4 --set compile=whole; }
several() {
  end=0
  for table; do
    if [ "$table" = cifar100-ingredients ]; then whole "$table" --only "AHT*" "static*"; else whole "$table"; fi || end=$?
  done
  return $end
}
export OMP_NUM_THREADS=1 CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log

case $part in
first)
  whole cifar100-main --seeds 0 --only static ;;
short)
  mkdir -p /tmp/mps /tmp/mps-log
  pgrep -f nvidia-cuda-mps-control > /dev/null || setsid nvidia-cuda-mps-control -d
  $run cifar100-ingredients $given --only "fold*" "ToMe*" "EViT*" --jobs 4 --set compile=blocks & one=$!
  whole ablation-sigma --only "sigma 1.0" & two=$!
  sleep 60  # one fills the compiler's cache, most of which the others share
  export TORCHINDUCTOR_COMPILE_THREADS=4
  several ablation-target-depth ablation-feature ablation-mass ablation-kl & three=$!
  several cifar100-ingredients ablation-threshold ablation-sigma ablation-stages ablation-planner & four=$!
  code=0
  for pid in $one $two $three $four; do wait "$pid" || code=$?; done
  exit $code ;;
imagenet)
  $run imagenet-adapt $given --jobs 8 --workers 1 ;;
*)
  echo "expected first, short or imagenet, got $part" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# All measurements that need a GPU, as four calls of less than ten minutes each:
#   bash benchmarks/gpu/gpu_all.sh values|nccl|million|times
# Each part has its own time limit, writes its report as it runs, and does not stop the next part if it fails.
# OUT: folder of reports and logs. COMMIT: commit that the reports name, if there is no repository.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-/tmp/gpu_out}
DEVICE=${DEVICE:-cuda}
FLAGS=()
[ "$DEVICE" = cpu ] && FLAGS=(--device cpu)
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COMMIT=${COMMIT:-$(git describe --always --dirty=+ 2>/dev/null)}
export PYTORCH_ALLOC_CONF=expandable_segments:True TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}

part() { # name, limit in seconds, command...
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local rc=$?
  echo "== $name: exit status $rc, $((SECONDS - begin)) s"
  tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log" | cut -c1-200
  [ "$rc" = 0 ] || echo "$name" >>"$OUT/failed.$$"
}

case ${1:-} in
values) # at the same time: nothing is timed
  part scans_values 560 "$PYTHON" benchmarks/gpu/gpu_scans.py values &
  part models_2 560 "$PYTHON" benchmarks/gpu/gpu_models.py --ranks 2 --only 'decoder|llama' --output "$OUT/models_gpu.md" &
  part models_4 560 "$PYTHON" benchmarks/gpu/gpu_models.py --ranks 4 --only 'hybrid|gemma3|mistral|gpt_oss|moe' --output "$OUT/models_4_gpu.md" &
  part attention_values 300 "$PYTHON" benchmarks/gpu/gpu_attention.py values biases --output "$OUT" &
  wait
  ;;
nccl) # ranks of one GPU; with DEVICE=cpu the same code over Gloo
  ONLY=(); [ "$DEVICE" = cpu ] && ONLY=(--only collectives uneven_splits shifts_beside_kernels checks_between_ranks)
  part nccl_2 200 "$PYTHON" benchmarks/gpu/gpu_nccl.py --ranks 2 "${FLAGS[@]}" "${ONLY[@]}" --output "$OUT/nccl.md"
  if [ "$DEVICE" != cpu ]; then
    part nccl_4 150 "$PYTHON" benchmarks/gpu/gpu_nccl.py --ranks 4 --output "$OUT/nccl.md"
    part models_nccl 230 "$PYTHON" benchmarks/gpu/gpu_models.py --nccl --ranks 2 --only '^decoder, (ulysses|ring)|^llama$|^gemma3, ring|packed, auto' --output "$OUT/models_nccl.md"
  fi
  ;;
million) # one rank of 8, Llama-8B's layers, 1,048,576 tokens
  if [ "$DEVICE" = cpu ]; then
    part one_rank 300 "$PYTHON" benchmarks/gpu/gpu_one_rank.py --device cpu --small --compiler aot_eager --layers 1 --output "$OUT/one_rank.md"
  else
    part one_rank 260 "$PYTHON" benchmarks/gpu/gpu_one_rank.py --layers 1 2 --output "$OUT/one_rank.md"
    part one_rank_offload 150 "$PYTHON" benchmarks/gpu/gpu_one_rank.py --layers 1 --offload never 1.0 --steps 1 --output "$OUT/one_rank.md"
    part one_rank_others 170 "$PYTHON" benchmarks/gpu/gpu_one_rank.py --layers 1 --attention ring gather --steps 1 --output "$OUT/one_rank.md"
  fi
  ;;
times) # one after the other
  part collectives 90 "$PYTHON" benchmarks/gpu/gpu_collectives.py --output "$OUT/collectives_gpu.md"
  part attention 290 "$PYTHON" benchmarks/gpu/gpu_attention.py kernels merging stepping --repeats 5 --output "$OUT"
  part scans 190 "$PYTHON" benchmarks/gpu/gpu_scans.py times --repeats 3 --output "$OUT/scans_gpu.md"
  ;;
*)
  echo "usage: bash benchmarks/gpu/gpu_all.sh values|nccl|million|times" >&2
  exit 2
  ;;
esac
if [ -s "$OUT/failed.$$" ]; then
  echo "failed: $(tr '\n' ' ' <"$OUT/failed.$$")"
  rm "$OUT/failed.$$"
  exit 1
fi

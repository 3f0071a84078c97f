#!/usr/bin/env bash
# Everything that only a GPU can show, in one go and in under 8 minutes on an H200; what it says goes to docs/results/gpu_check.txt.
#   bash tests/gpu_check.sh            from anywhere, in an environment with a CUDA build of torch, nvcc and ninja
# Each part has a time limit of its own; one that fails does not stop the next, but the script then ends with 1.
set -uo pipefail
cd "$(dirname "$0")/.."
mkdir -p docs/results
exec > >(tee docs/results/gpu_check.txt) 2>&1
failed=0

part() { # seconds, title, command ..
    local seconds=$1 title=$2 rc=0 begin=$SECONDS
    shift 2
    echo "== $title"
    timeout "$seconds" "$@" || rc=$?
    echo "-- $([ $rc = 0 ] && echo passed || echo "FAILED, exit $rc") after $((SECONDS - begin)) s"
    [ $rc = 0 ] || failed=1
}

echo "$(date -u +%Y-%m-%d)  $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader)  $(git rev-parse --short HEAD)"
part 120 "build" python -c "import verify; assert verify.fused_kernel()"
# every size of the table, ids against the reference, refusals, a CUDA graph. The CPU runs of the same tests are CI's
part 80 "tests on the GPU" python -m pytest tests/test_kernels.py -k "gpu or graph"
# the sanitizers slow a kernel down a hundredfold: small sizes only. racecheck is for shared memory, memcheck for the ends
for tool in memcheck racecheck; do
    if command -v compute-sanitizer > /dev/null; then
        part 45 "compute-sanitizer $tool" compute-sanitizer --tool $tool --error-exitcode 1 \
            python -m pytest tests/test_kernels.py -k "gpu and (ends or refuse or same_whoever or rows_after)"
    else
        echo "== compute-sanitizer $tool: not installed, NOT DONE"; failed=1
    fi
done
part 100 "times, docs/results/kernel.json" python kernel_bench.py
part 80 "end to end: tokens per second of the engine" python bench.py --quick --device cuda
[ $failed = 0 ] && echo "all passed" || echo "something failed or was not done: see above"
exit $failed

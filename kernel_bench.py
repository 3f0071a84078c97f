"""Time kernels.cu, every version, beside what it replaces:  python bench.py kernel   (or python kernel_bench.py)

On a GPU   checks ids, then times each version, the PyTorch path of verify.py, torch.compile of that, and flashinfer's
           chain_speculative_sampling with the softmax it needs, if installed. Writes docs/results/kernel.json.
Anywhere   bytes that must move and the floor they set: time cannot be less than bytes / memory bandwidth.

Method   Median of the times of single calls, each after a write that pushes the inputs out of the L2 cache (a target's logits
         do not fit in it in practice either: a model pass lies between two verifications). Events on the GPU; the PyTorch path
         waits for the host in between, and that is part of its time. Bandwidth is measured by a copy in the same run.
Bytes    Every row up to and including the first rejection, once; and one row of p_draft where a residual is drawn. The
         second reading of a rejected row comes from cache, and is not counted.
Letters  R requests, G draft positions, V vocabulary, N = sum(1 + verify_len) rows.
"""
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

import verify
from verify import logits_to_probs, sample, verify_tokens

RESULTS = Path(__file__).parent / "docs" / "results" / "kernel.json"
NOMINAL = 4.8e12  # bytes per second of an H200's memory, by its data sheet: for the floor where nothing can be measured
G = 7
# R, V, dtype. The last is the case that targets are set for
SIZES = [(1, 49152, torch.bfloat16), (1, 151936, torch.bfloat16), (8, 151936, torch.bfloat16), (64, 49152, torch.bfloat16),
         (64, 151936, torch.float32), (64, 151936, torch.bfloat16)]
# "accepted": drafter and target agree, all rows are read. "mixed": a drafter that is right about half the time.
MIXES = ("accepted", "mixed")


def make_inputs(R, V, dtype, mix, device, seed=0):
    """-> arguments of the kernel. verify lengths are all G: N = R * (G + 1) rows, the packed batch at its fullest."""
    g = torch.Generator(device).manual_seed(seed)
    logits = 3 * torch.randn(R * (G + 1), V, generator=g, device=device)
    logits = logits.to(dtype)
    p_draft = torch.empty(R, G, V, device=device)
    for k in range(G):  # row by row: all at once would take several times the memory
        rows = logits.view(R, G + 1, V)[:, k].float()
        p_draft[:, k] = logits_to_probs(rows + (0.7 * torch.randn(R, V, generator=g, device=device) if mix == "mixed" else 0), 1.0)
    tokens = torch.stack([sample(p_draft[:, k], torch.rand(R, generator=g, device=device)) for k in range(G)], 1)
    u = torch.rand(R, G + 1, generator=g, device=device, dtype=torch.float64) * (1 - 1e-4)  # away from 1, where rounding decides
    return dict(logits=logits, temperature=torch.ones(R, device=device), p_draft=p_draft, tokens=tokens,
                verify_len=torch.full((R,), G, device=device), u=u, draft_ids=None)


def bytes_that_must_move(n_accepted, V, itemsize):
    rows, rejected = int((n_accepted + 1).sum()), int((n_accepted < G).sum())
    return rows * V * itemsize + rejected * V * 4


def by_pytorch(logits, temperature, p_draft, tokens, verify_len, u, draft_ids):
    p_target = logits_to_probs(logits, temperature.repeat_interleave(1 + verify_len))
    return verify_tokens(p_target, p_draft, tokens, verify_len, u, draft_ids)


def by_flashinfer(inputs):
    """The same job by flashinfer -> a function of no arguments, or None. It draws its own uniforms: only its time is compared."""
    try:
        from flashinfer.sampling import chain_speculative_sampling, softmax
    except ImportError:
        return None
    logits, R = inputs["logits"], len(inputs["tokens"])
    tokens = inputs["tokens"].int()

    def job():
        p_target = softmax(logits.float(), temperature=inputs["temperature"].repeat_interleave(G + 1))
        return chain_speculative_sampling(inputs["p_draft"], tokens, p_target.view(R, G + 1, -1))

    return job


def time_of(job, flush, repeats, seconds=1.0):
    """Median seconds of one call, the least and the most; at least 5 calls, at most `repeats`, about `seconds` in all."""
    for _ in range(3):
        job()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (len(times) < repeats and time.perf_counter() - begin < seconds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()  # also keeps the GPU busy while the host prepares the call: launching is not what is timed
        start.record()
        job()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return median(times), min(times), max(times)


def copy_bandwidth(flush, repeats):
    """Bytes per second of a copy, read and written bytes both counted."""
    source, target = torch.empty(2**29, dtype=torch.uint8, device="cuda"), torch.empty(2**29, dtype=torch.uint8, device="cuda")
    return 2 * source.numel() / time_of(lambda: target.copy_(source), flush, repeats)[0]


def check(kernel, inputs):
    """n_accepted, after every version has given the ids of the float64 rule (but for one in fifty, for u within rounding of an edge)."""
    exact = {**inputs, "logits": inputs["logits"].double()}
    wanted = by_pytorch(**exact)
    for version in (1, 2, 3):
        n, x, error = kernel(**inputs, version=version)
        differ = int(((n != wanted.n_accepted) | (x != wanted.next_token)).sum())
        if error.any() or differ > max(1, len(n) // 50):
            raise RuntimeError(f"version {version}: {differ} of {len(n)} requests differ from the reference, errors {error.tolist()}")
    return wanted.n_accepted


def main_kernel(args=None):
    """`args` may have quick (fewer repeats) and out (where to write the results)."""
    quick, out = getattr(args, "quick", False), Path(getattr(args, "out", None) or RESULTS)
    if not torch.cuda.is_available():
        show_floor()
        return
    kernel = verify.fused_kernel()
    if kernel is None:
        raise RuntimeError("kernels.cu could not be built: see above")
    repeats, flush = (20 if quick else 60), torch.empty(2**28, dtype=torch.uint8, device="cuda")
    bandwidth = copy_bandwidth(flush, repeats)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, G = {G}; a copy moves {bandwidth / 1e9:.0f} GB/s; medians of up to {repeats} calls")
    rows = []
    for R, V, dtype in SIZES:
        for mix in MIXES:
            inputs = make_inputs(R, V, dtype, mix, "cuda")
            moved = bytes_that_must_move(check(kernel, inputs), V, dtype.itemsize)
            jobs = {f"version {v}": lambda v=v: kernel(**inputs, version=v) for v in (1, 2, 3)}
            jobs["pytorch"] = lambda: by_pytorch(**inputs)
            if (R, V, dtype) == SIZES[-1]:  # compiling takes longer than all the measuring: only where the targets are set
                jobs["torch.compile"] = lambda compiled=torch.compile(by_pytorch, dynamic=False): compiled(**inputs)
            jobs["flashinfer"] = by_flashinfer(inputs)
            print(f"\nR {R}, V {V}, {str(dtype)[6:]}, {mix}: {moved / 1e6:.1f} MB, floor {moved / bandwidth * 1e6:.1f} us")
            for job_name, job in jobs.items():
                row = dict(R=R, V=V, G=G, dtype=str(dtype)[6:], mix=mix, job=job_name, bytes=moved)
                try:
                    if job is None:
                        raise ImportError("flashinfer is not installed")
                    # version 1 and whatever else is slow: a few calls say enough
                    t, least, most = time_of(job, flush, repeats, seconds=0.3 if quick else 0.6)
                except Exception as error:  # a comparison that cannot run is a line of the table, not the end of it
                    row["failed"] = str(error).splitlines()[0][:200]
                    print(f"  {job_name:14} {row['failed']}")
                else:
                    row |= dict(us=round(t * 1e6, 2), range_us=[round(least * 1e6, 2), round(most * 1e6, 2)],
                                GBps=round(moved / t / 1e9, 1), of_copy=round(moved / t / bandwidth, 4))
                    print(f"  {job_name:14} {t * 1e6:10.1f} us [{least * 1e6:.1f}, {most * 1e6:.1f}] "
                          f"{row['GBps']:8.0f} GB/s {row['of_copy']:6.0%} of copy")
                rows.append(row)
            del inputs
    machine = dict(processor=name, torch=torch.__version__, cuda=torch.version.cuda, copy_GBps=round(bandwidth / 1e9, 1),
                   date=time.strftime("%Y-%m-%d"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(machine=machine, rows=rows), indent=1) + "\n")
    print(json.dumps(dict(rows=rows, machine=machine)))  # last, and on one line: for whoever reads it by machine


def show_floor():
    print("kernel: times need a GPU, and there is none. What can be said without: bytes that must move, and the time they take")
    print(f"at {NOMINAL / 1e12} TB/s (an H200's data sheet; a copy reaches about nine tenths of such figures). G = {G}.\n")
    print(f"{'R':>3} {'V':>7} {'dtype':>9} {'all accepted':>22} {'all rejected at once':>24}")
    for R, V, dtype in SIZES:
        cells = []
        for n in (G, 0):
            moved = bytes_that_must_move(torch.full((R,), n), V, dtype.itemsize)
            cells.append(f"{moved / 1e6:9.2f} MB {moved / NOMINAL * 1e6:7.2f} us")
        print(f"{R:3} {V:7} {str(dtype)[6:]:>9} {cells[0]:>22} {cells[1]:>24}")
    print("\nThe PyTorch path moves about ten times that: docs/kernel.md counts it.")


if __name__ == "__main__":
    try:
        main_kernel()
    except RuntimeError as error:
        sys.exit(f"kernel_bench.py: {error}")

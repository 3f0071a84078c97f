"""
Tests of kernels.cu without a GPU. Run: python -m pytest tests/test_kernels.py

cuda_on_cpu.h lets a C++ compiler read kernels.cu, so that what runs here is the very source, every version of it, with real
threads. In four parts:

1. Exact.  Probabilities that are powers of two: every sum is exact in any order, so ids must equal verify_tokens', to the last
           one, also where u lies on an edge of the CDF. Over the table of sizes.
2. Close.  Any logits. The kernel rounds differently from PyTorch, so an id may differ where u is within a bound of an edge. The
           bound is arithmetic (see `bounds`), and every answer of every version is held against float64 with it.
3. Refused. Broken rows are reported, wherever the fault sits, and never become a token.
4. Teeth.  The same runs under ThreadSanitizer, AddressSanitizer and UBSan; and kernels with a fault planted, each to be caught.
Then the compiler for GPUs, where there is one, and the place in verify.py that chooses between kernel and PyTorch.
"""
import ctypes
import math
import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dspark
import kernel_bench
import verify
from drafter import tiny_drafter
from target import tiny_target
from verify import logits_to_probs, sample, verify_logits, verify_tokens

HERE = Path(__file__).parent
SOURCE = HERE.parent / "kernels.cu"
VERSIONS = (1, 2, 3)
FINE, BAD_LOGITS, BAD_DRAFT, BAD_ARGUMENT = range(4)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF, NAN = math.inf, math.nan

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is needed to run kernels.cu on the CPU")


def generator(seed):
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    logits: torch.Tensor         # (N, V) float32 or bfloat16
    temperature: torch.Tensor    # (R,) float32
    p_draft: torch.Tensor        # (R, G, K) float32
    tokens: torch.Tensor         # (R, G)
    verify_len: torch.Tensor     # (R,)
    u: torch.Tensor              # (R, G+1) float64
    draft_ids: torch.Tensor | None = None
    p_target: torch.Tensor | None = None  # (N, V) float64, where it is known exactly

    def first_row(self):
        return torch.arange(len(self.verify_len)) + self.verify_len.cumsum(0) - self.verify_len

    def arrays(self):
        """In the order of the kernel's struct Batch."""
        return [self.logits, self.temperature, self.p_draft, self.draft_ids, self.tokens, self.verify_len, self.u]

    def sizes(self):
        """R, G, V, K, N."""
        return [*self.tokens.shape, self.logits.shape[1], self.p_draft.shape[2], len(self.logits)]

    def law(self):
        """p_target in float64."""
        if self.p_target is not None:
            return self.p_target
        return logits_to_probs(self.logits.double(), self.temperature.double().repeat_interleave(1 + self.verify_len))

    def reference(self):
        return verify_tokens(self.law(), self.p_draft, self.tokens, self.verify_len, self.u, self.draft_ids)


class Batch(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "RGVKN"] + [
        (name, ctypes.c_void_p)
        for name in "logits temperature p_draft draft_ids tokens verify_len u n_accepted next_token error".split()
    ]


def compile(out, source=SOURCE, block=64, flags=()):
    """kernels.cu -> a library, or a program with -DPROGRAM. 64 threads a block: two warps, so that warps have to meet too."""
    command = ["g++", "-std=c++20", "-O0", "-g1", f"-DBLOCK={block}", f'-DKERNELS="{source}"', *flags, str(HERE / "kernel_on_cpu.cpp")]
    done = subprocess.run([*command, "-pthread", "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def cpu_library(tmp_path_factory):
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]
    return ctypes.CDLL(str(compile(tmp_path_factory.mktemp("kernels") / "kernels.so", flags=flags)))


# "gpu": the kernel as verify.py builds it, where there is a GPU. All of parts 1 to 3 then run on both.
@pytest.fixture(scope="module", params=["cpu", *(["gpu"] if torch.cuda.is_available() else [])])
def library(request):
    if request.param == "cpu":
        return request.getfixturevalue("cpu_library")
    kernel = verify.fused_kernel()
    assert kernel is not None, "a GPU, but kernels.cu could not be built"
    return kernel


def run(library, case, version, C=0, multiprocessors=2, at_once=3):
    """-> n_accepted, next_token, error (R,). C chunks a row in version 3; 0: what the launcher chooses for that many processors."""
    if callable(library):
        arrays = [t if t is None else t.cuda() for t in case.arrays()]  # draft_ids stand fourth there, and last here
        return tuple(t.cpu() for t in library(*arrays[:3], *arrays[4:], arrays[3], version, C))
    R = len(case.verify_len)
    n, x, e = torch.full((R,), -7), torch.full((R,), -7), torch.full((R,), -7, dtype=torch.int32)
    pointers = [None if t is None else t.data_ptr() for t in (*map(contiguous, case.arrays()), n, x, e)]
    batch = Batch(*case.sizes(), *pointers)
    library.verify_on_cpu(version, int(case.logits.dtype == BF16), ctypes.byref(batch), C, multiprocessors, at_once)
    return n, x, e


def contiguous(t):
    assert t is None or t.is_contiguous()
    return t


# ---------------------------------------------------------------------------------------------------------------------
# 1. exact


# The float that kernels.cu calls log2_e. At this temperature a logit is a power of two's exponent: exp(-k / T) = 2**-k, and the
# kernel computes just that, as log2_e / T is 1. So logits can be chosen whose probabilities have no rounding in them.
UNIT = 1.44269504


def dyadic(V, g, flat=False):
    """(V,) float64 that sums to 1, made of powers of two from 1 to 2**-17, on random ids; sometimes on the first and last."""
    if flat:
        n = 2 ** int(torch.randint(0, 1 + min(17, int(math.log2(V))), (), generator=g))
        parts = torch.full((n,), 1 / n, dtype=F64)
    else:
        parts = [1.0]
        for _ in range(int(torch.randint(0, min(V, 40), (), generator=g))):  # halve a part, again and again
            i = int(torch.randint(len(parts), (), generator=g))
            if parts[i] > 2**-17:
                parts[i] /= 2
                parts.append(parts[i])
        parts = torch.tensor(parts, dtype=F64)
    p = torch.zeros(V, dtype=F64)
    ids = torch.randperm(V, generator=g)[: len(parts)]
    p[ids] = parts
    if torch.rand((), generator=g) < 0.5:  # the ends are where a forgotten head or tail would be
        other = V - 1 if torch.rand((), generator=g) < 0.7 else 0
        p[[int(ids[0]), other]] = p[[other, int(ids[0])]]
    return p


def exact_case(R, G, V, dtype, K=None, seed=0):
    """Every request is of another kind: drafter equal to the target, disjoint from it, one-hot, unrelated; greedy or not."""
    g = generator(seed)
    verify_len = torch.randint(0, G + 1, (R,), generator=g)
    verify_len[0] = G
    ids = torch.arange(V) if K is None else torch.randperm(V, generator=g)[:K].sort().values
    temperature = torch.where(torch.arange(R) % 5 == 3, 0.0, UNIT)
    p_target = torch.stack([dyadic(V, g, flat=i % 3 == 0) for i in range(R + int(verify_len.sum()))])
    p_draft, row = torch.zeros(R, G, len(ids), dtype=F64), 0
    for r in range(R):
        for k in range(G):
            kind = "equal similar disjoint one-hot other".split()[r % 5]
            own = p_target[row + min(k, int(verify_len[r]))][ids]
            p = dyadic(len(ids), g)
            if kind == "equal" and own.sum() > 0:
                p = own  # over fewer ids it may sum to less than 1, which the rule does not mind
            if kind == "similar" and own.sum() > 0:  # half the target, half not: accepted or rejected by u
                p = (own + p) / 2
            if kind == "disjoint" and (own == 0).any():
                p = torch.where(own > 0, 0.0, p) + 2.0**-17 * (torch.arange(len(ids)) == int((own == 0).nonzero()[0]))
            if kind == "one-hot":
                p = torch.zeros_like(p)
                p[int(own.argmax() if torch.rand((), generator=g) < 0.7 else torch.randint(len(ids), (), generator=g))] = 1
            p_draft[r, k] = p
        row += 1 + int(verify_len[r])
    tokens = ids[sample(p_draft, torch.rand(R, G, generator=g))]
    # u on a grid of 2**-8, where the edges are; and now and then the least and the largest there is
    u = torch.randint(0, 256, (R, G + 1), generator=g).double() / 256
    u[torch.rand(u.shape, generator=g) < 0.05] = 0.0
    u[torch.rand(u.shape, generator=g) < 0.05] = 1 - 2**-53
    logits = (p_target / p_target.amax(1, keepdim=True)).log2()  # integers, -inf where p_target is 0; the maximum is 0
    greedy = (temperature == 0).repeat_interleave(1 + verify_len)
    p_target[greedy] = logits_to_probs(logits[greedy], 0.0)
    return Case(logits.to(dtype), temperature, p_draft.float(), tokens, verify_len, u, None if K is None else ids, p_target)


# R, G, V, dtype, K (None: V), chunks a row (0: as the launcher would). V large only where it matters: 16-byte loads, chunks.
TABLE = [
    (64, 1, 5, F32, None, 0),
    (24, 15, 5, BF16, 3, 2),
    (40, 2, 111, BF16, None, 3),
    (10, 15, 111, F32, 40, 0),
    (12, 7, 4096, BF16, None, 0),
    (5, 5, 4099, F32, 1000, 7),     # rows begin at every residue of 16 bytes
    (5, 4, 4093, BF16, None, 5),
    (5, 7, 49152, BF16, 8192, 0),
    (1, 15, 49152, F32, None, 4),
    (5, 2, 151936, BF16, None, 8),
    (1, 4, 151936, F32, 32000, 0),
    (2, 3, 151933, BF16, 32000, 5),
]


@needs_gcc
@pytest.mark.parametrize("R,G,V,dtype,K,C", TABLE)
def test_exact_ids(library, R, G, V, dtype, K, C):
    case = exact_case(R, G, V, dtype, K, seed=V + R)
    wanted = case.reference()
    for version in VERSIONS:
        n, x, error = run(library, case, version, C)
        assert error.tolist() == [FINE] * R, version
        assert n.tolist() == wanted.n_accepted.tolist(), version
        assert x.tolist() == wanted.next_token.tolist(), version


def test_exact_cases_take_every_branch():
    seen = set()
    for R, G, V, dtype, K, C in TABLE[:7]:
        case = exact_case(R, G, V, dtype, K, seed=V + R)
        result = case.reference()
        for r, (n, l) in enumerate(zip(result.n_accepted.tolist(), case.verify_len.tolist())):
            greedy = "greedy" if case.temperature[r] == 0 else "sampled"
            seen.add((greedy, "rejected" if n < l else "full" if n == G else "none scheduled" if l == 0 else "cut"))
    assert len(seen) == 8, seen


# ---------------------------------------------------------------------------------------------------------------------
# 2. close


def bounds(logits, temperature, p):
    """
    How far rounding can move the kernel's p_target(v) from the true one: (V,) float64. With e = 2**-24, half a step of a float:

    exp((l - top) / T) is 2^x, x = (l - top) * (log2_e / T): four roundings, each moving it by a e with a = (top - l) / T,
    and exp2f is good to two steps, 4 e. Version 3 does so twice (against its chunk's maximum, then the row's), and sums 8 terms
    in float before a double takes over, 7 e: less than 8 a + 16 in all, relative to the term. The normaliser is off by the mean of that,
    and the division and its product add 2 e. The residual's subtraction adds 1. So less than (8 a + 32 + mean) e, relative.
    """
    a = torch.where(p > 0, (logits.max() - logits) / temperature, 0.0)
    mean = (p * (8 * a + 32)).sum()
    return 2**-24 * p * (8 * a + 32 + mean)


def explain(case, n_accepted, next_token):
    """Every request's answer must be right for a p_target within `bounds` of the float64 one. Returns how many answers needed that."""
    law, u, first, wanted = case.law(), case.u, case.first_row(), case.reference()
    R, G = case.tokens.shape
    V = law.shape[1]
    ids = slice(None) if case.draft_ids is None else case.draft_ids
    for r in range(R):
        n, x, length, T = int(n_accepted[r]), int(next_token[r]), int(case.verify_len[r]), float(case.temperature[r])
        if T == 0:
            assert (n, x) == (int(wanted.n_accepted[r]), int(wanted.next_token[r])), f"request {r}: greedy is exact"
            continue
        assert 0 <= n <= length and 0 <= x < V, f"request {r}: {n} accepted of {length}, token {x}"
        for k in range(min(n + 1, length)):
            row = law[first[r] + k]
            draft = torch.zeros(V, dtype=F64)
            draft[ids] = case.p_draft[r, k].double()
            slack = bounds(case.logits[first[r] + k].double(), T, row)
            t = int(case.tokens[r, k])
            over = float(row[t] - u[r, k] * draft[t])  # > 0: accepted
            assert over > -slack[t] if k < n else over <= slack[t], f"request {r}: token {k} decided wrongly by {over}"
        row = law[first[r] + n]
        slack = bounds(case.logits[first[r] + n].double(), T, row)
        weights = row if n == length else (row - draft).clamp(min=0)
        if weights.sum() == 0:
            weights = row
        assert row[x] > 0 and weights[x] + slack[x] > 0, f"request {r}: token {x} cannot be"
        cdf, point = weights.cumsum(0), float(u[r, G] * weights.sum())
        low, high = float(cdf[x] - weights[x]), float(cdf[x])
        reach = 2 * float(slack.sum())  # total and running sum may each be off by all of it
        assert low - reach <= point <= high + reach, f"request {r}: u is {max(low - point, point - high)} from the edge, bound {reach}"
    return int(((n_accepted != wanted.n_accepted) | (next_token != wanted.next_token)).sum())


def any_case(R, G, V, dtype, K=None, seed=0, spread=3.0):
    """Logits as a model has them and worse, temperatures 0 to 5, a drafter that resembles the target, -inf entries."""
    g = generator(seed)
    verify_len = torch.randint(0, G + 1, (R,), generator=g)
    verify_len[-1] = G
    N = R + int(verify_len.sum())
    logits = spread * torch.randn(N, V, generator=g)
    logits[torch.rand(N, V, generator=g) < 0.1] = -INF
    logits[:, int(torch.randint(V, (), generator=g))] = 1.0
    logits[::4] *= 30  # extreme: differences of hundreds
    logits[1::4] += 1e4
    logits = logits.to(dtype)
    temperature = torch.tensor([1.0, 0.6, 0.0, 5.0, 1e-3])[torch.arange(R) % 5]
    ids = torch.arange(V) if K is None else torch.randperm(V, generator=g)[:K].sort().values
    first = torch.arange(R) + verify_len.cumsum(0) - verify_len
    rows = first[:, None] + torch.minimum(torch.arange(G), verify_len[:, None])  # (R, G)
    near = logits.float()[rows][:, :, ids].clamp(min=-1e5) + torch.randn(R, G, len(ids), generator=g)
    p_draft = logits_to_probs(near, temperature[:, None])
    tokens = ids[sample(p_draft, torch.rand(R, G, generator=g))]
    u = torch.rand(R, G + 1, generator=g, dtype=F64)
    return Case(logits, temperature, p_draft, tokens, verify_len, u, None if K is None else ids)


@needs_gcc
@pytest.mark.parametrize("R,G,V,dtype,K,C", [
    (40, 1, 5, F32, None, 0), (20, 15, 5, BF16, 3, 2), (24, 7, 111, F32, 60, 3), (24, 3, 111, BF16, None, 0), (10, 7, 4096, F32, None, 0),
    (6, 7, 4099, BF16, 1000, 6), (5, 4, 49152, F32, 8192, 0), (2, 2, 151936, BF16, None, 0), (1, 3, 151936, F32, None, 9),
])
def test_close_ids(library, R, G, V, dtype, K, C):
    case = any_case(R, G, V, dtype, K, seed=R + V)
    for version in VERSIONS:
        n, x, error = run(library, case, version, C)
        assert error.tolist() == [FINE] * R
        differ = explain(case, n, x)
        assert differ <= 1 + R // 20, f"version {version}: {differ} of {R} needed the bound; rounding is not that common"


@needs_gcc
def test_ids_are_those_of_the_pytorch_path(library):
    """Through logits_to_probs in float32, as the engine goes: the same ids, at random u, on hundreds of requests."""
    differ = total = 0
    for seed in range(4):
        case = any_case(64, 3, 48, F32 if seed % 2 else BF16, 30 if seed < 2 else None, seed)
        p_target = logits_to_probs(case.logits, case.temperature.repeat_interleave(1 + case.verify_len))
        wanted = verify_tokens(p_target, case.p_draft, case.tokens, case.verify_len, case.u, case.draft_ids)
        n, x, error = run(library, case, 1)
        differ += int(((n != wanted.n_accepted) | (x != wanted.next_token)).sum())
        total += len(n)
    assert total == 256 and differ <= 1


@needs_gcc
def test_equal_distributions_accept_everything(library):
    """p_draft as PyTorch computes it from the very same logits: passes at any u that is not within rounding of 1."""
    g = generator(3)
    R, G, V = 6, 4, 500
    logits = 4 * torch.randn(R, G + 1, V, generator=g)
    p_draft = logits_to_probs(logits[:, :G], 0.9)
    tokens = sample(p_draft, torch.rand(R, G, generator=g))
    u = torch.full((R, G + 1), 1 - 1e-5, dtype=F64)
    case = Case(logits.flatten(0, 1), torch.full((R,), 0.9), p_draft, tokens, torch.full((R,), G), u)
    for version in VERSIONS:
        n, x, error = run(library, case, version, C=2)
        assert n.tolist() == [G] * R and not error.any()
        explain(case, n, x)


def one(logits, p_draft, tokens, u, temperature=1.0, length=None, draft_ids=None):
    """A single request."""
    length = len(tokens) if length is None else length
    K = len(logits[0]) if draft_ids is None else len(draft_ids)
    p_draft = torch.tensor(p_draft, dtype=F32).reshape(1, -1, K)
    tokens = torch.tensor([tokens], dtype=torch.long)
    return Case(torch.tensor(logits, dtype=F32), torch.tensor([temperature]), p_draft, tokens, torch.tensor([length]),
                torch.tensor([u], dtype=F64), draft_ids)


@needs_gcc
@pytest.mark.parametrize("version", VERSIONS)
def test_ends_of_the_rule(library, version):
    def check(case, n, x):
        got = run(library, case, version, C=2)
        assert [t.tolist() for t in got] == [[n], [x], [FINE]]

    half = [0.0, 0.0, -INF, -INF]  # p_target (1/2, 1/2, 0, 0)
    last = 1 - 2**-53
    check(one([half] * 2, [0, 0, 0.5, 0.5], [2], [0.0, 0.6]), 0, 1)         # u = 0 does not accept what the target cannot say
    check(one([half] * 2, [0, 0, 0.5, 0.5], [0], [last, 0.0]), 1, 0)        # p_draft 0 there: accepted at every u
    check(one([half] * 2, [0.5, 0.5, 0, 0], [1], [last, last]), 1, 1)       # equal: every u < 1 passes
    check(one([half], [0, 0, 0.5, 0.5], [2], [0.5, 0.7], length=0), 0, 1)   # nothing scheduled: plain, not the residual
    check(one([half] * 2, [1, 0.5, 0, 0], [0], [0.6, 0.7]), 0, 1)           # p_draft covers p_target: no residual, p_target instead
    check(one([half] * 2, [1, 0.5, 0, 0], [0], [0.6, 0.2]), 0, 0)
    check(one([[5.0, 7.0, 7.0, 1.0]] * 2, [0, 0, 1, 0], [2], [0.5, 0.9], temperature=0.0), 0, 1)  # ties go to the lowest id
    check(one([[5.0, 7.0, 7.0, 1.0]] * 2, [0, 1, 0, 0], [1], [last, 0.9], temperature=0.0), 1, 1)
    check(one([[1000.0, 999.0, -INF, 0.0]] * 2, [0, 1, 0, 0], [1], [0.1, 0.9], temperature=1e-38), 0, 0)  # 1 / T is infinite
    reduced = torch.tensor([1, 3])
    check(one([half] * 2, [0.5, 0.5], [3], [0.1, 0.9], draft_ids=reduced), 0, 0)  # residual (1/2, 0, 0, 0)
    check(one([half] * 2, [0.5, 0.5], [0], [last, 0.9], draft_ids=reduced), 1, 1)  # outside draft_ids: p_draft is 0
    # a chunk whose probabilities are all below a float's range holds no token, though u = 0 points at its beginning
    check(one([[-300.0, -300.0, 0.0, 0.0]], [], [], [0.0]), 0, 2)


@needs_gcc
def test_no_draft_positions_is_plain_decoding(library):
    g = generator(4)
    logits, u = 2 * torch.randn(5, 300, generator=g), torch.rand(5, 1, generator=g, dtype=F64)
    case = Case(logits, torch.full((5,), 0.7), torch.zeros(5, 0, 300), torch.zeros(5, 0, dtype=torch.long), torch.zeros(5, dtype=torch.long), u)
    for version in VERSIONS:
        n, x, error = run(library, case, version, C=3)
        assert n.tolist() == [0] * 5 and not error.any() and explain(case, n, x) == 0


@needs_gcc
def test_version_3_gives_the_same_whoever_comes_first(library):
    """Blocks one after another, or many at once; results are combined in the order of chunks, so the bits are the same."""
    case = any_case(6, 5, 3000, F32, seed=5)
    answers = [run(library, case, 3, 4, multiprocessors, at_once)[:2] for multiprocessors, at_once in ((1, 1), (1, 4), (3, 2))]
    assert all(torch.equal(a, b) for answer in answers for a, b in zip(answer, answers[0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("version", VERSIONS)
def test_cuda_graph_holds_the_kernel(version):
    """Captured on one batch, replayed on another: no host synchronisation, and nothing left over from the run before."""
    kernel = verify.fused_kernel()
    cases = [any_case(6, 5, 3000, BF16, K=900, seed=s) for s in (5, 6)]
    for case in cases:
        case.verify_len[:] = 5
        case.logits = (3 * torch.randn(36, 3000, generator=generator(7))).to(BF16)
    buffers = [t.cuda() for t in cases[0].arrays()]
    args = [*buffers[:3], *buffers[4:], buffers[3], version]
    kernel(*args)  # warm-up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = kernel(*args)
    for case in (*cases, cases[0]):
        for buffer, t in zip(buffers, case.arrays()):
            buffer.copy_(t)
        graph.replay()
        n, x, error = (t.cpu() for t in outputs)
        assert not error.any()
        explain(case, n, x)


# ---------------------------------------------------------------------------------------------------------------------
# 3. refused


@needs_gcc
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_broken_rows_are_reported(library, version, dtype):
    """Four requests with the same row; in three a logit is NaN or +inf, first, last and in between. The fourth must not notice."""
    V = 203
    for temperature in (1.0, 0.0):
        for bad in (NAN, INF):
            logits = torch.linspace(-3, 3, V).expand(4, V).contiguous()
            for r, at in enumerate((0, V - 1, 101)):
                logits[r, at] = bad
            zero = torch.zeros(4, dtype=torch.long)
            case = Case(logits.to(dtype), torch.full((4,), temperature), torch.full((4, 1, V), 1 / V), zero[:, None], zero, torch.full((4, 2), 0.5, dtype=F64))
            n, x, error = run(library, case, version, C=3)
            assert error.tolist() == [BAD_LOGITS] * 3 + [FINE]
            assert x[:3].tolist() == [-1] * 3 and x[3] >= 0
    case.logits[:] = -INF
    n, x, error = run(library, case, version, C=3)
    assert error.tolist() == [BAD_LOGITS] * 4 and x.tolist() == [-1] * 4


@needs_gcc
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_after_the_rejection_do_not_matter(library, version):
    """NaN there changes nothing. (That they are not even read is AddressSanitizer's to say, below.)"""
    case = exact_case(20, 6, 111, F32, seed=9)
    wanted = case.reference()
    for r, first in enumerate(case.first_row().tolist()):
        case.logits[first + 1 + int(wanted.n_accepted[r]) : first + 1 + int(case.verify_len[r])] = NAN
    n, x, error = run(library, case, version, C=2)
    assert case.logits.isnan().any() and not error.any()
    assert torch.equal(n, wanted.n_accepted) and torch.equal(x, wanted.next_token)


@needs_gcc
@pytest.mark.parametrize("version", VERSIONS)
def test_broken_drafts_and_arguments_are_reported(library, version):
    half = [0.0, 0.0, -INF, -INF]

    def error_of(case, **changes):
        for name, value in changes.items():
            setattr(case, name, value)
        n, x, error = run(library, case, version, C=2)
        assert (x == -1).all() or not error.any()
        return error.tolist()

    def good():
        return one([half] * 2, [0, 0, 0.5, 0.5], [2], [0.5, 0.5])

    assert error_of(good()) == [FINE]
    assert error_of(one([half] * 2, [0, 0, NAN, 0.5], [2], [0.5, 0.5])) == [BAD_DRAFT]  # where it is judged
    assert error_of(one([half] * 2, [0, NAN, 0.5, 0.5], [2], [0.5, 0.5])) == [BAD_DRAFT]  # elsewhere in the residual's row
    assert error_of(good(), temperature=torch.tensor([-1.0])) == [BAD_ARGUMENT]
    assert error_of(good(), temperature=torch.tensor([NAN])) == [BAD_ARGUMENT]
    for tokens in ([[4]], [[-1]]):
        assert error_of(good(), tokens=torch.tensor(tokens)) == [BAD_ARGUMENT]
    for u in ([[1.0, 0.5]], [[0.5, -0.1]], [[0.5, NAN]]):
        assert error_of(good(), u=torch.tensor(u, dtype=F64)) == [BAD_ARGUMENT]
    for length in (-1, 0, 2, 2**40):  # 0: two rows, one of which nobody asked for
        assert error_of(good(), verify_len=torch.tensor([length])) == [BAD_ARGUMENT]


# ---------------------------------------------------------------------------------------------------------------------
# 4. teeth


TOOLS = {  # what a build reports with, and what it then says
    "plain": ([], ""),
    "thread": (["-fsanitize=thread"], "data race"),
    "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "AddressSanitizer|runtime error"),
}


def execute(program, case, version, C, folder, seconds=120):
    """The program on a case -> (what went wrong or "", what it printed). It knows which rows may be read, and its answer is checked."""
    wanted = case.reference()
    header = [version, int(case.logits.dtype == BF16), C, 1, 3, *case.sizes(), int(case.draft_ids is not None)]
    with open(folder / "case", "wb") as file:
        file.write(struct.pack("11i", *header))
        for t in (t for t in case.arrays() if t is not None):
            file.write(contiguous(t).view(torch.uint8).numpy().tobytes() if t.numel() else b"")
        file.write((1 + wanted.n_accepted).int().numpy().tobytes())
    # tsan wants its shadow memory where some kernels put other things; setarch -R stops that
    command = [*(["setarch", "-R"] if shutil.which("setarch") else []), str(program), str(folder / "case"), str(folder / "out")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds,
                              env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"})
    except subprocess.TimeoutExpired:
        return "hangs", ""
    if done.returncode:
        return f"exit {done.returncode}", done.stderr
    R, out = len(case.verify_len), (folder / "out").read_bytes()
    n, x, error = struct.unpack(f"{R}q", out[: 8 * R]), struct.unpack(f"{R}q", out[8 * R : 16 * R]), struct.unpack(f"{R}i", out[16 * R :])
    if any(error):
        return f"error {error}", ""
    return ("" if [*n] == wanted.n_accepted.tolist() and [*x] == wanted.next_token.tolist() else "wrong ids"), done.stderr


def join(*cases):
    """Requests of the same V, G and draft_ids in one batch."""
    parts = [torch.cat([getattr(case, name) for case in cases]) for name in "logits temperature p_draft tokens verify_len u".split()]
    return Case(*parts, draft_ids=cases[0].draft_ids)


def hard_cases():
    """Small, but with all that can go wrong in them: (case, chunks a row)."""
    half = [0.0, 0.0, -INF, -INF]
    flat, u = torch.zeros(12, 131), (torch.arange(12) * 11 + 0.5) / 131  # u in the middle of an id's interval: each id counts
    none = torch.zeros(12, dtype=torch.long)
    return [
        (join(one([half] * 2, [0, 0, 0.5, 0.5], [2], [0.0, 0.6]),  # at u = 0
              one([[5.0, 7.0, 7.0, 7.0]] * 2, [0, 0, 0, 1], [3], [0.5, 0.9], temperature=0.0)), 2),  # a tie
        (one([half] * 2, [0.875, 0.125], [1], [0.75, 0.9], draft_ids=torch.tensor([1, 3])), 1),  # a rejection in the first column
        (Case(flat, torch.ones(12), torch.zeros(12, 0, 131), none[:, None][:, :0], none, u[:, None].double()), 3),
        (exact_case(5, 4, 203, F32, seed=1), 3),
        (exact_case(6, 3, 1101, BF16, K=200, seed=3), 2),
        # one row whose maximum is met late and in another chunk and thread: sums have to shrink to match
        (one([[float(v // 16 - 70) for v in range(1024)] + [-1.0, 0.0, -INF]], [], [], [0.1], temperature=UNIT), 4),
    ]


@needs_gcc
@pytest.mark.parametrize("tool", ["thread", "address"])
def test_sanitizers_find_nothing(tool, tmp_path):
    program = compile(tmp_path / "program", flags=["-DPROGRAM", *TOOLS[tool][0]])
    for case, C in hard_cases():
        for version in VERSIONS:
            problem, said = execute(program, case, version, C, tmp_path)
            assert problem == "", f"version {version}: {problem}\n{said[:4000]}"


# name: (tool that must see it, text in kernels.cu, how often it stands there, what a mistake would make of it)
FAULTS = {
    "no barrier before the warps' maxima are read": ("thread", "    __syncthreads();  // all warps have written\n", 1, ""),
    "no barrier after the warps' sums were read": ("thread", "    __syncthreads();\n    return sum;", 1, "    return sum;"),
    "no barrier after an item is taken": ("thread", "        if (i == 0) take(b, w, s);\n        __syncthreads();\n", 1, "        if (i == 0) take(b, w, s);\n"),
    "no fence before an arrival is counted": ("thread", "            __threadfence();  // first the result, then the word that it is there\n", 1, ""),
    "no fence after an arrival is counted": ("thread", "            if (s.arrived_last) __threadfence();  // first the word of all others, then their results\n", 1, ""),
    "no fence before an entry is published": ("thread", "    __threadfence();  // all that was written for it is seen by whoever sees the entry\n", 1, ""),
    "no fence after an entry is found": ("thread", "    __threadfence();  // pairs with append's\n", 1, ""),
    "maximum over half a warp": ("plain", "for (int d = 16; d > 0; d /= 2) x = fmaxf", 1, "for (int d = 8; d > 0; d /= 2) x = fmaxf"),
    "sum over half a warp": ("plain", "for (int d = 16; d > 0; d /= 2) x +=", 1, "for (int d = 8; d > 0; d /= 2) x +="),
    "prefix sum without the warps before": ("plain", "    after += before;\n    // The same", 1, "    // The same"),
    "head skipped": ("plain", "    if (i < head) online.add(x + i, 1, scale);\n", 1, ""),
    "tail skipped": ("plain", "    if (tail + i < n) online.add(x + tail + i, 1, scale);\n", 1, ""),
    "last chunk cut short": ("plain", "w.width = (b.V + C - 1) / C;", 1, "w.width = b.V / C;"),
    "sum not shrunk when the maximum rises": ("plain", "            sum *= exp2f((top - high) * scale);  // the first time: 0 * 2^-inf = 0\n", 1, ""),
    "chunks added without a common maximum": ("plain", "w.sum[r * w.C + i] * shrink(top, row.top, scale)", 1, "w.sum[r * w.C + i]"),
    "accepted at equality": ("plain", "(double)p_draft < (double)row.target(x)", 1, "(double)p_draft <= (double)row.target(x)"),
    "residual not subtracted": ("plain", "const float w = target(v) - draft(v, column);", 1, "const float w = target(v);"),
    "residual not clamped": ("plain", "return w < 0 ? 0.0f : w;", 1, "return fabsf(w);"),
    "draft column one too far": ("plain", "if (ids[middle] < v) low", 1, "if (ids[middle] <= v) low"),
    "one thread alone looks for the argmax": ("plain", "    atomicMin(&s.least, x);\n", 1, ""),
    "next row read before it is wanted": ("address", "        float top = -INFINITY;\n", 1, "        float top = -INFINITY;\n        volatile float ahead = to_float(row.logits[b.V + i % b.V]); (void)ahead;\n"),
    "one element too far": ("address", "if (tail + i < n) online.add", 1, "if (tail + i <= n) online.add"),
    "16-byte loads from any address": ("address", "(16 - (uintptr_t)x % 16) % 16 / sizeof(T)", 1, "0 * (uintptr_t)x"),
    "scratch too small": ("address", "return (char*)(w.taken + 3) - base;", 1, "return (char*)(w.taken + 2) - base;"),
    "shared memory for one warp too few": ("address", "    double warp_sum[BLOCK / 32]; ", 1, "    double warp_sum[BLOCK / 32 - 1]; "),
}


@needs_gcc
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault, tmp_path):
    tool, right, times, wrong = FAULTS[fault]
    source = SOURCE.read_text()
    assert source.count(right) == times, f"{fault}: kernels.cu no longer has the text that this fault replaces"
    (tmp_path / "kernels.cu").write_text(source.replace(right, wrong))
    flags, report = TOOLS[tool]
    program = compile(tmp_path / "program", tmp_path / "kernels.cu", flags=["-DPROGRAM", *flags])
    for case, C in 2 * hard_cases():  # a race needs two blocks to meet: it gets a second chance
        for version in reversed(VERSIONS):
            problem, said = execute(program, case, version, C, tmp_path, seconds=30)
            if problem and (tool == "plain" or re.search(report, said)):
                return
    pytest.fail(f"{fault}: not caught by {tool}")


# ---------------------------------------------------------------------------------------------------------------------
# the compiler for GPUs


def nvcc_arches():
    if shutil.which("nvcc") is None:
        return ""
    return subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True).stdout


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_nvcc_compiles_it(arch, tmp_path, capsys):
    """Warnings are errors. A spilled register is memory traffic nobody asked for; too many registers, and fewer blocks fit."""
    if f"compute_{arch}\n" not in nvcc_arches():
        pytest.skip(f"no nvcc, or one that does not know sm_{arch}")
    command = ["nvcc", "-O3", "-std=c++17", f"-arch=sm_{arch}", "-cubin", "--Werror", "all-warnings", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-o", str(tmp_path / "cubin"), str(SOURCE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = {}
    for entry in done.stderr.split("Compiling entry function")[1:]:
        name = re.search(r"'_Z\d+([a-z]+\d)(?:I(f|4bf16)E)?", entry)
        numbers = [int(found[1]) if (found := re.search(pattern, entry)) else 0 for pattern in (
            r"(\d+) bytes spill stores", r"(\d+) bytes spill loads", r"Used (\d+) registers", r"(\d+) bytes smem")]
        entries[name[1] + {None: "", "f": "<float>", "4bf16": "<bf16>"}[name[2]]] = numbers
    assert len(entries) == 7, done.stderr  # three versions for two dtypes, and version 3's preparation
    with capsys.disabled():
        print(f"\nsm_{arch}:", "; ".join(f"{name} {registers} registers, {stores + loads} B spilled, {shared} B shared"
                                      for name, (stores, loads, registers, shared) in entries.items()))
    for name, (stores, loads, registers, shared) in entries.items():
        assert stores == loads == 0, f"{name} spills"
        assert 0 < registers <= 64, f"{name}: 256 threads of more than 64 registers, and 4 blocks do not fit on a multiprocessor"
        assert shared <= 1024


# ---------------------------------------------------------------------------------------------------------------------
# the place that chooses


@pytest.fixture
def emulated(cpu_library, monkeypatch):
    """verify.py takes CPU tensors for CUDA's and the emulated kernel for the built one. Gives the list of calls."""
    calls = []

    def kernel(logits, temperature, p_draft, tokens, verify_len, u, draft_ids):
        calls.append(len(logits))
        return run(cpu_library, Case(logits, temperature, p_draft, tokens, verify_len, u, draft_ids), 3, C=2)

    monkeypatch.setattr(verify, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(verify, "fused_kernel", lambda: kernel)
    return calls


def call(case, temperature=None, top_k=0, top_p=1.0, **changes):
    args = dict(logits=case.logits, p_draft=case.p_draft, tokens=case.tokens, verify_len=case.verify_len, u=case.u, draft_ids=case.draft_ids)
    return verify_logits(temperature=case.temperature if temperature is None else temperature, top_k=top_k, top_p=top_p, **(args | changes))


@needs_gcc
@pytest.mark.parametrize("K", [None, 40])
def test_kernel_and_pytorch_path_agree(K, request):
    case = exact_case(10, 3, 111, F32, K, seed=7)
    by_pytorch = call(case)
    emulated = request.getfixturevalue("emulated")
    by_kernel = call(case)
    assert len(emulated) == 1
    assert torch.equal(by_kernel.n_accepted, by_pytorch.n_accepted) and torch.equal(by_kernel.next_token, by_pytorch.next_token)
    assert torch.equal(call(case, u=case.u.float().clamp(max=1 - 2**-24)).n_accepted, by_pytorch.n_accepted)  # float32 uniforms are fine


@needs_gcc
def test_who_takes_the_pytorch_path(emulated, monkeypatch):
    case = exact_case(4, 2, 30, F32, seed=7)
    call(case, temperature=0.7), call(case, top_k=torch.zeros(4), top_p=torch.ones(4))
    assert len(emulated) == 2
    wanted = call(case, top_p=0.9), call(case, top_k=5), call(case, top_k=torch.tensor([0, 0, 3, 0])), call(case, top_p=torch.tensor([1, 1, 1, 0.5]))
    call(case, p_draft=case.p_draft.double()), call(case, logits=case.logits.double())
    assert len(emulated) == 2 and all(len(w.n_accepted) == 4 for w in wanted)
    monkeypatch.setattr(verify, "fused_kernel", lambda: None)  # no compiler
    call(case)
    monkeypatch.setattr(verify, "fused_kernel", lambda: pytest.fail("CPU tensors asked for a kernel"))
    monkeypatch.setattr(verify, "on_gpu", lambda tensor: tensor.is_cuda)
    call(case)
    assert len(emulated) == 2


@needs_gcc
def test_refusals_name_the_request_and_the_cause(emulated):
    for name, value, message in (("logits", NAN, "request 2: a row of logits holds NaN"), ("u", 1.5, "request 2: temperature, verify_len")):
        case = exact_case(4, 2, 30, F32, seed=7)
        (case.logits[case.first_row()[2]] if name == "logits" else case.u[2])[0] = value
        with pytest.raises(ValueError, match=message):
            call(case)


@needs_gcc
def test_engine_writes_the_same_text_through_the_kernel(request):
    """Three requests, two temperatures and a greedy one, over a reduced draft vocabulary, through dspark.generate."""
    target = tiny_target()
    drafter = tiny_drafter(target, K=32)
    sampling = [dspark.Sampling(temperature=t, seed=i, max_new_tokens=12) for i, t in enumerate((0.8, 0.0, 1.2))]

    def texts():
        return [r.ids for r in dspark.generate(target, drafter, [[1, 2, 3], [4, 5], [6]], sampling=sampling, gamma=3)]

    by_pytorch = texts()
    emulated = request.getfixturevalue("emulated")
    assert texts() == by_pytorch and len(emulated) > 0


def test_no_compiler_is_said_in_one_line(monkeypatch, capsys):
    import torch.utils.cpp_extension as cpp

    def fail(*args, **kwargs):
        raise OSError("CUDA_HOME environment variable is not set.\nand more")

    monkeypatch.setattr(cpp, "load", fail)
    verify.fused_kernel.cache_clear()
    assert verify.fused_kernel() is None
    assert "PyTorch judges instead (CUDA_HOME environment variable is not set.)" in capsys.readouterr().err
    assert verify.fused_kernel() is None and capsys.readouterr().err == ""  # tried once
    verify.fused_kernel.cache_clear()


def test_bench_without_a_gpu_shows_bytes_and_floor(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernel_bench.main_kernel()
    said = capsys.readouterr().out
    assert "need a GPU" in said
    # R = 64, V = 151936, bf16: 64 * 8 rows of 303,872 bytes; or 64 rows, and 64 rows of p_draft in float
    assert "155.58 MB" in said and "58.34 MB" in said


def test_bench_inputs_are_what_they_say():
    for mix, least in (("accepted", 7), ("mixed", 2)):
        inputs = kernel_bench.make_inputs(6, 300, BF16, mix, "cpu")
        n = kernel_bench.by_pytorch(**inputs).n_accepted
        assert n.double().mean() >= least and (mix == "accepted" or n.min() < 7)

"""
verify.py: from logits to probabilities, and from a drafted block to accepted tokens.

Speculative decoding is lossless because of the rule in this file, whatever the drafter is (DSpark, arXiv 2607.05147,
Sec. 2.1; the scheduled verify lengths come from Sec. 3.2.2). Left to right, draft token x is accepted with probability
min(1, p_target(x) / p_draft(x)). At the first rejection the next token is drawn from the residual
max(p_target - p_draft, 0) / sum (the correction). If all scheduled tokens pass, it is drawn from p_target (the bonus).

    logits_to_probs   logits (..., V)   -> probs (..., V)   temperature, top-k, top-p; temperature 0 is one-hot
    sample            probs (..., V), u (...)   -> ids (...)   inverse CDF in id order
    verify_tokens     a batch of drafted blocks -> VerifyResult(n_accepted (R,), next_token (R,))
    verify_logits     the same from raw target logits; on a GPU in one fused kernel (kernels.cu), whose reference this file is

Shapes: R requests, G draft positions per block, V target vocabulary, K drafter's vocabulary (V unless reduced),
N = sum(1 + verify_len) packed rows of the target. Positions k count from 0 here; the paper counts from 1.
Nothing here draws random numbers: uniforms u in [0, 1) are arguments, so every result can be replayed and enumerated.

Greedy decoding is no special case: with one-hot p_target a token passes iff it is the argmax, and the correction is the
argmax. Plain decoding is none either: it is verify length 0.

Run alone: python -m doctest verify.py -v        Proof of the law: python -m pytest tests/test_verify.py
"""
import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class VerifyResult:
    n_accepted: torch.Tensor  # (R,) int64, accepted draft tokens, 0..verify_len
    next_token: torch.Tensor  # (R,) int64, the correction after a rejection, else the bonus


def logits_to_probs(logits, temperature, top_k=0, top_p=1.0):
    """
    Turn logits (..., V) into probabilities of the same shape, float32 (float64 stays float64).
    temperature, top_k and top_p are numbers, or tensors that broadcast to the leading dims (one setting per request).
    temperature 0 is greedy: one-hot at the argmax, lowest id on ties. top_k 0 and top_p 1.0 are off. top_p keeps the
    smallest set of likeliest tokens whose share of what top_k left reaches top_p, and always one token at least.

    >>> logits = torch.tensor([4., 2., 1., 1.]).log()
    >>> logits_to_probs(logits, temperature=1.0)
    tensor([0.5000, 0.2500, 0.1250, 0.1250])
    >>> logits_to_probs(logits, temperature=1.0, top_p=0.7)          # 0.5 does not reach 0.7, 0.5 + 0.25 does
    tensor([0.6667, 0.3333, 0.0000, 0.0000])
    >>> logits_to_probs(torch.stack([logits, logits]), temperature=torch.tensor([0.0, 0.5]))
    tensor([[1.0000, 0.0000, 0.0000, 0.0000],
            [0.7273, 0.1818, 0.0455, 0.0455]])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # One reduction sees every kind of broken row: NaN propagates through a maximum, +inf is one, all -inf leaves -inf.
    top = logits.amax(-1, keepdim=True)  # (..., 1)
    if not top.isfinite().all():
        raise ValueError("logits: a row holds NaN, +inf or nothing but -inf; check the model and any mask used")

    def per_row(setting, dtype):  # a number or a tensor -> (..., 1)
        return torch.as_tensor(setting, dtype=dtype, device=logits.device).broadcast_to(logits.shape[:-1]).unsqueeze(-1)

    if all(isinstance(s, (int, float)) for s in (temperature, top_k, top_p)):
        # One setting for all rows: the same arithmetic, without the dozen small tensor operations that would cost a drafter's
        # inner loop more than its products.
        assert 0 <= temperature < float("inf") and top_k >= 0 and 0 <= top_p <= 1, "temperature and top_k: at least 0; top_p: 0 to 1"
        if temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.softmax((logits - top).div_(temperature), dim=-1)
        if top_k == 0 and top_p == 1:
            return probs
        rows = probs.flatten(0, -2) if probs.ndim > 1 else probs[None]
        # float64 below too: 0.7 in float32 is another top_p
        return _keep_likeliest(rows, torch.tensor([[top_k]], device=rows.device), torch.tensor([[top_p]], dtype=torch.float64,
                               device=rows.device)).view_as(probs)

    temperature = per_row(temperature, logits.dtype)
    top_k, top_p = per_row(top_k, torch.long), per_row(top_p, torch.float64)
    assert (temperature >= 0).all() and temperature.isfinite().all(), "temperature must be 0 (greedy) or positive"
    assert (top_k >= 0).all(), "top_k must be 0 (off) or positive"
    assert ((top_p >= 0) & (top_p <= 1)).all(), "top_p must be in [0, 1], 1.0 is off"

    greedy = temperature == 0
    one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The maximum is taken off before the division: logits / 0.001 could overflow, (logits - max) / 0.001 cannot.
    probs = torch.softmax((logits - top).div_(temperature.masked_fill(greedy, 1.0)), dim=-1)
    # Only rows that ask for a filter pay for the sort, and the others keep their bits whatever they are batched with.
    filtered = (~greedy & ((top_k > 0) | (top_p < 1))).squeeze(-1)  # (...)
    if filtered.any():
        probs[filtered] = _keep_likeliest(probs[filtered], top_k[filtered], top_p[filtered])
    return torch.where(greedy, one_hot, probs)


def _keep_likeliest(probs, top_k, top_p):
    """Apply top-k, then top-p, to rows (M, V) with settings (M, 1), and normalise what is left."""
    # Stable, so equal probabilities rank by id and the kept set is always the same one.
    ranked, ids = probs.sort(dim=-1, descending=True, stable=True)  # (M, V)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    ranked = ranked * ((top_k == 0) | (rank < top_k))
    # A token stays if the tokens ahead of it have not reached top_p yet; the last one kept is the one that reaches it.
    # top_p is a share of what top_k left. At 1.0 the test is skipped: a rounded sum reaches 1 before the tail does.
    mass = ranked.cumsum(-1, dtype=torch.float64)
    ahead = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    ranked = ranked * ((top_p >= 1) | (ahead < top_p * mass[:, -1:]) | (rank == 0))
    return torch.zeros_like(probs).scatter_(-1, ids, ranked / ranked.sum(-1, keepdim=True))


def sample(probs, u):
    """
    Draw one id per row by inverse CDF in id order: the first id whose cumulative probability exceeds u.
    probs (..., V) need not sum to 1 (a residual does not), u (...) in [0, 1). Returns (...) int64.

    >>> sample(torch.tensor([[0.0, 0.25, 0.75]]).expand(3, 3), torch.tensor([0.0, 0.2, 0.25]))
    tensor([1, 1, 2])
    """
    assert probs.shape[:-1] == u.shape, f"sample: one u per row, got probs {tuple(probs.shape)} and u {tuple(u.shape)}"
    assert ((u >= 0) & (u < 1)).all(), "sample: u must be in [0, 1)"
    # float64: near 1 a float32 running sum moves in steps of 6e-8, more than a token in the tail is worth.
    cdf = probs.cumsum(-1, dtype=torch.float64)  # (..., V)
    total = cdf[..., -1:]
    if not (total.isfinite() & (total > 0)).all():
        raise ValueError("sample: a row of probs holds NaN or inf, or sums to zero")
    # "Exceeds" (right=True) passes over leading zeros when u is 0. At the other end, a product that rounds up to total
    # (in float64 only a subnormal one can) would be exceeded by nothing and give id V. One step below total is exceeded
    # by the entries equal to total alone, and the first of them is the last id with any probability.
    point = torch.minimum(u.unsqueeze(-1).double() * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True).squeeze(-1)


def verify_tokens(p_target, p_draft, tokens, verify_len, u, draft_ids=None):
    """
    Accept a prefix of every drafted block and draw the token after it.

    p_target    (N, V)    packed by request: row k of request r judges tokens[r, k], row verify_len[r] is for its bonus
    p_draft     (R, G, V) what tokens were sampled from, that very tensor; (R, G, K) with draft_ids
    tokens      (R, G)    draft tokens, always target ids
    verify_len  (R,)      ints 0..G, how many are scheduled; tokens[r, k] among them only by what was known before its draw
    u           (R, G+1)  independent uniforms in [0, 1): u[r, k] judges tokens[r, k], u[r, G] draws next_token
    draft_ids   (K,)      target ids of the drafter's reduced vocabulary, ascending; p_draft is zero elsewhere

    Two requests, G = 2. The first is scheduled in full: token 0 passes (0.9 * 0.50 < 0.50), token 2 cannot (the target
    gives it 0, and 0 * 0.50 < 0 is false), so the correction comes from the residual (0.25, 0.25, 0): id 1 at u = 0.75.
    The second has nothing scheduled: its token is a plain draw from (0.25, 0.50, 0.25): id 2 at u = 0.75.

    >>> p_draft = torch.tensor([[0.50, 0.25, 0.25], [0.25, 0.25, 0.50]]).expand(2, 2, 3)
    >>> p_target = torch.tensor([[0.50, 0.25, 0.25], [0.50, 0.50, 0.00], [0.00, 0.00, 1.00],    # request 0, 1 + 2 rows
    ...                          [0.25, 0.50, 0.25]])                                           # request 1, 1 + 0 rows
    >>> u = torch.tensor([[0.9, 0.0, 0.75], [0.5, 0.5, 0.75]])
    >>> verify_tokens(p_target, p_draft, torch.tensor([[0, 2], [1, 1]]), torch.tensor([2, 0]), u)
    VerifyResult(n_accepted=tensor([1, 0]), next_token=tensor([1, 2]))
    """
    (R, G), (N, V) = tokens.shape, p_target.shape
    K = V if draft_ids is None else len(draft_ids)
    assert p_draft.shape == (R, G, K), f"p_draft is {tuple(p_draft.shape)}, expected {(R, G, K)}"
    assert u.shape == (R, G + 1), f"u is {tuple(u.shape)}, expected {(R, G + 1)}: one a position, one for next_token"
    assert verify_len.shape == (R,), f"verify_len is {tuple(verify_len.shape)}, expected {(R,)}"
    assert ((verify_len >= 0) & (verify_len <= G)).all(), f"verify_len must be in 0..{G}"
    n_rows = R + int(verify_len.sum())
    assert N == n_rows, f"p_target has {N} rows, expected sum(1 + verify_len) = {n_rows}"
    assert ((tokens >= 0) & (tokens < V)).all(), f"tokens must be target ids in 0..{V - 1}"
    assert ((u >= 0) & (u < 1)).all(), "u must be in [0, 1)"
    if not (p_target.sum().isfinite() and p_draft.sum().isfinite()):  # NaN compares false: it would pass as a rejection
        raise ValueError("verify_tokens: p_target or p_draft holds NaN or inf")

    # Both probabilities of every draft token. Unscheduled positions have no row: they look at the bonus row, unused.
    position = torch.arange(G, device=tokens.device)
    request = torch.arange(R, device=tokens.device)
    first_row = request + verify_len.cumsum(0) - verify_len  # (R,) where each request's rows start
    row = first_row[:, None] + torch.minimum(position, verify_len[:, None])  # (R, G)
    target_x = p_target[row, tokens].double()  # (R, G)
    if draft_ids is None:
        draft_x = p_draft[request[:, None], position, tokens].double()  # (R, G)
    else:
        assert K > 0 and (draft_ids[1:] > draft_ids[:-1]).all(), "draft_ids must be ascending, without repeats"
        assert 0 <= int(draft_ids[0]) and int(draft_ids[-1]) < V, f"draft_ids must be target ids in 0..{V - 1}"
        column = torch.searchsorted(draft_ids, tokens).clamp(max=K - 1)  # (R, G)
        draft_x = p_draft[request[:, None], position, column].double() * (draft_ids[column] == tokens)

    # u < p_target / p_draft without the division, which would be 0 / 0 for a token neither side can produce. Strict, as
    # u can be exactly 0 and `<=` would then accept a token the target never emits; and at equal probabilities every
    # u < 1 still passes. The rule repairs the drafter's error only for the distribution that x really came from: a
    # p_draft recomputed in another dtype, temperature or filter is a different one, and the output is biased.
    scheduled = position < verify_len[:, None]  # (R, G)
    accepted = scheduled & (u[:, :G].double() * draft_x < target_x)
    n_accepted = accepted.long().cumprod(dim=1).sum(dim=1)  # (R,) all before the first failure

    # The row that follows the accepted prefix gives the next token. Where the schedule ended the block, no draft token
    # failed there, so nothing is to be made up for: a plain p_target draw, as at the end of a full block. Taking the
    # residual there would push out exactly the tokens the drafter likes.
    weights = p_target[first_row + n_accepted].double()  # (R, V)
    rejected = (n_accepted < verify_len).nonzero().squeeze(1)  # requests whose block a draft token ended
    if len(rejected) > 0:
        p_draft_row = p_draft[rejected, n_accepted[rejected]].double()  # (rejected, K)
        residual = weights[rejected]  # (rejected, V), a copy
        residual[:, slice(None) if draft_ids is None else draft_ids] -= p_draft_row
        residual = residual.clamp(min=0)  # not divided by its sum: sample() takes it as it is
        # Not in the paper: after a rejection the residual is positive, unless rounding made p_draft sum to more than
        # p_target and cover it. The two are then equal but for rounding, so p_target is the answer.
        weights[rejected] = torch.where(residual.sum(1, keepdim=True) > 0, residual, weights[rejected])
    # u[:, G], never the u of the rejected position: that one is known to be high (it failed the test), and drawing with
    # it would pick the high ids of the residual. For the same reason no u may be shared with the drafter's sampling.
    return VerifyResult(n_accepted, sample(weights, u[:, G]))


def verify_logits(logits, temperature, top_k, top_p, p_draft, tokens, verify_len, u, draft_ids=None):
    """
    verify_tokens from the target's raw logits (N, V). The settings are per request: numbers, or tensors (R,).

    CPU tensors take logits_to_probs and verify_tokens. CUDA tensors take kernels.cu, unless a request asks for top-k or top-p
    (they need a sort), or there is no compiler. Same rule and same u, so the same ids, except where u is within rounding of a
    CDF edge. The kernel sees a broken row only if it reads it: rows after a rejection it does not.
    """
    kernel = fused_kernel() if fusible(logits, p_draft, top_k, top_p) else None
    if kernel is None:

        def per_row(setting):  # (R,) -> (N,)
            return setting.repeat_interleave(1 + verify_len) if torch.is_tensor(setting) and setting.dim() else setting

        p_target = logits_to_probs(logits, per_row(temperature), per_row(top_k), per_row(top_p))
        return verify_tokens(p_target, p_draft, tokens, verify_len, u, draft_ids)
    temperature = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device).expand(len(tokens)).contiguous()
    n_accepted, next_token, error = kernel(logits.contiguous(), temperature, p_draft.contiguous(), tokens.contiguous(),
                                           verify_len.contiguous(), u.double().contiguous(), draft_ids)
    # The kernel waited for nothing; here the host does, to read the errors. The engine reads the ids next, and would anyway.
    if (error != 0).any():
        r = int((error != 0).nonzero()[0])
        what = {1: "a row of logits holds NaN, +inf or nothing but -inf; check the model and any mask used",
                2: "p_draft holds NaN or inf", 3: "temperature, verify_len, tokens or u is out of range, or the rows are not N"}
        raise ValueError(f"verify_logits: request {r}: {what[int(error[r])]}")
    return VerifyResult(n_accepted, next_token)


def fusible(logits, p_draft, top_k, top_p):
    """Can kernels.cu judge these?"""
    dtypes = logits.dtype in (torch.float32, torch.bfloat16) and p_draft.dtype == torch.float32
    return on_gpu(logits) and dtypes and bool((torch.as_tensor(top_k) == 0).all() and (torch.as_tensor(top_p) == 1).all())


def on_gpu(tensor):  # a function of its own, for tests: they let the emulated kernel judge CPU tensors
    return tensor.is_cuda


@functools.cache
def fused_kernel():
    """kernels.cu as a function of tensors, built at first use (a minute or two, then torch keeps the build); None if it cannot be."""
    try:
        from torch.utils.cpp_extension import load

        print("verify.py: loading kernels.cu (the first time it is built) ..", file=sys.stderr)
        return load("dspark_kernels", [str(Path(__file__).with_name("kernels.cu"))], extra_cuda_cflags=["-O3"]).verify
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:  # no nvcc, no ninja, no host compiler, ..
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        print(f"verify.py: no fused kernel, PyTorch judges instead ({reason}). It needs nvcc and ninja.", file=sys.stderr)
        return None

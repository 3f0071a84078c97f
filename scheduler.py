"""
scheduler.py: how many draft tokens of each request are worth verifying this cycle.

DSpark (arXiv 2607.05147): Sec. 3.2.1, confidence c_k, survival a_k, Sequential Temperature Scaling
(STS); Sec. 3.2.2, Algorithm 1, the hardware-aware prefix scheduler; Appendix A, the early stop.

In    confidence (R, G): c_k in [0, 1], the chance that draft token k passes if all before it passed
      (torch tensor on any device, or array). sps (>= R*(1+G) + 1,): target steps per second at n
      packed tokens, index 0 unused, from profile_sps.
Out   verify_len (R,) int64, 0..G. The target then runs N = sum(1 + verify_len) packed tokens.
      schedule, fixed and threshold share the shape (confidence, parameter) -> verify_len;
      fixed(confidence, 0) is plain decoding.

R active requests, G draft positions, N packed tokens, n held-out blocks (STS). All of it is numpy
in float64: the arrays are tiny, and numpy costs least per call.

Worked example (Appendix A): R = 1, G = 2, a_1 = 0.8. Verifying one token already lowers the
throughput, from Theta = 1.0 to 1.8 * 0.5 = 0.9, so the answer is 0 whatever c_2 says:

    >>> sps = [float("nan"), 1.0, 0.5, 0.45]
    >>> schedule([[0.8, 0.9]], sps), schedule([[0.8, 0.0]], sps)
    (array([0]), array([0]))

A search over all lengths would return 2 for c_2 = 0.9 (Theta = 2.52 * 0.45 = 1.134) and 0 for
c_2 = 0. But c_2 was computed from the sampled x_1, so x_1 would decide whether x_1 is verified.

Lossless, because whether x_k is admitted depends only on what was known before x_k was drawn: c_k
never sees x_k; what does see it (c_{k+1}, ..) has no greater survival, so it is visited later; and
with the early stop nothing visited later can change the answer for x_k. For the same reason
temperatures and sps must be fixed before the cycle starts.

Known limits: the drafter's time is not in Theta, so a cycle that verifies nothing still pays for
its draft; and where SPS is a staircase the early stop can sit in a local optimum (with a cliff at
SPS(2), R = 1 never verifies anything). Not in the paper, chosen here: the bins and grid of STS, how
SPS is measured, and what is refused.

Run alone: python -m doctest scheduler.py (silent when the examples hold).
"""
import time
import warnings

import numpy as np

# --- Survival and the three policies (Sec. 3.2.2)


def as_float64(x):
    """Torch tensor (any device or dtype) or array-like -> float64 numpy array."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()  # double first: numpy has no bfloat16
    return np.asarray(x, dtype=np.float64)


def unit(x, name):
    """x as non-empty float64 in [0, 1], or ValueError."""
    x = as_float64(x)
    # "not (inside)" rather than "outside": NaN, which fails every comparison, is refused as well.
    if not (x.size and x.min() >= 0 and x.max() <= 1):
        raise ValueError(f"{name} {x.shape} is empty, has NaN or leaves [0, 1]: pass probabilities "
                         "(sigmoid outputs, not logits), and look for NaN in the model's logits")
    return x


def checked(confidence):
    """confidence as float64 (R, G), or ValueError."""
    c = unit(confidence, "confidence")
    if c.ndim != 2:
        raise ValueError(f"confidence must be (R, G), got {c.shape}")
    return c


def survival(confidence):
    """(R, G) conditional c_k -> (R, G) running products a_k = c_1 c_2 .. c_k."""
    return np.cumprod(checked(confidence), axis=1)


def schedule(confidence, sps):
    """Algorithm 1: from nothing admitted, visit (request, position) in descending a and stop at the
    first that does not raise Theta = tau * SPS(N), tau = R + sum of admitted a."""
    a = survival(confidence)
    R, G = a.shape
    sps = as_float64(sps)
    if sps.ndim != 1 or len(sps) <= R * (1 + G):
        raise ValueError(f"sps must be 1-D and reach R*(1+G) = {R * (1 + G)} tokens, got shape "
                         f"{sps.shape}: profile_sps(step, max_tokens={R * (1 + G)}) or more")
    sps = sps[R : R * (1 + G) + 1]  # N = R (nothing admitted) .. R*(1+G) (everything)
    if not sps.min() > 0:
        raise ValueError("sps has NaN or values <= 0 where this batch needs it: profile it again")

    # Stable: ties, common once sigmoids saturate at 1.0, stay in (request, position) order. If not,
    # a later position may come first, or a tie's winner may depend on confidences past it: a leak.
    order = np.argsort(-a, axis=None, kind="stable")  # (R*G,) flat indices r*G + (k-1)
    a = a.ravel()[order]
    # cumsum adds left to right, as the loop of Algorithm 1 does, so the two agree to the last bit.
    tau = np.cumsum(np.concatenate(([R], a)))  # (R*G + 1,) tau after 0, 1, 2, .. admissions
    theta = tau * sps
    rises = (theta[1:] > theta[:-1]) & (a > 0)  # a = 0 is never visited; those come last
    admitted = len(rises) if rises.all() else rises.argmin()  # argmin: the first False
    return np.bincount(order[:admitted] // G, minlength=R)


def fixed(confidence, length):
    """The same verify length for every request, at most G. Of confidence only the shape is used."""
    R, G = np.shape(confidence)
    if length < 0:
        raise ValueError(f"length must be >= 0, got {length}")
    return np.full(R, min(length, G), dtype=np.int64)


def threshold(confidence, tau_c):
    """Static threshold (Fig. 5): cut at the first position whose conditional c_k, not a_k, is below
    tau_c. Lossless too: it looks at c_1 .. c_k only.

    >>> threshold([[0.9, 0.4, 0.9], [0.7, 0.8, 0.9]], 0.5)
    array([1, 3])
    """
    return np.cumprod(checked(confidence) >= tau_c, axis=1).sum(axis=1)


def scheduled(sps, temperatures=None):
    """schedule as a policy of the confidence alone: calibrated by STS temperatures if given, on a
    fixed SPS table. Both were made before the cycle, so the policy stays causal."""
    def policy(confidence):
        calibrated = confidence if temperatures is None else apply_sts(confidence, temperatures)
        return schedule(calibrated, sps)
    return policy


# --- How good is a probability?


def ece(prob, outcome, bins=15):
    """Expected calibration error: |mean prob - mean outcome| per bin, weighted by the bin's share.
    Equal-width bins [b/bins, (b+1)/bins), 1.0 in the last. Outcomes may be probabilities too.

    >>> round(ece([0.9, 0.9, 0.9, 0.9], [1, 1, 1, 0]), 6)
    0.15
    """
    p, y = paired(prob, outcome)
    which = np.minimum((p * bins).astype(np.int64), bins - 1)
    # share * |mean p - mean y| = |sum of (p - y)| / total, so one weighted count is enough.
    return float(np.abs(np.bincount(which, weights=p - y)).sum() / len(p))


def brier(prob, outcome):
    """Mean squared error. A constant has ECE 0 if it is the base rate; it does not win here."""
    p, y = paired(prob, outcome)
    return float(np.mean((p - y) ** 2))


def auc(prob, outcome):
    """Chance that a random 1 outranks a random 0, ties count half; NaN if either is missing."""
    p, y = paired(prob, outcome)
    if not np.isin(y, (0, 1)).all():
        raise ValueError("auc needs 0/1 outcomes")
    ones, zeros = int(y.sum()), int((1 - y).sum())
    if not ones or not zeros:
        return float("nan")
    _, group, count = np.unique(p, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[group]  # 1-based; tied values share their mean rank
    return float((rank[y == 1].sum() - ones * (ones + 1) / 2) / (ones * zeros))  # Mann-Whitney U


def paired(prob, outcome):
    """Both as flat float64 arrays in [0, 1] of one length, or ValueError."""
    p, y = unit(prob, "prob"), unit(outcome, "outcome")
    if p.shape != y.shape:
        raise ValueError(f"prob {p.shape} and outcome {y.shape} must have the same shape")
    return p.ravel(), y.ravel()


# --- Sequential Temperature Scaling (Sec. 3.2.1)

# Half a float32 step below 1.0: from there on a float32 sigmoid returns exactly 1.0. Clipping to it
# keeps the logit finite, so that a saturated and wrong c can still be tempered.
EPS = 2.0**-24
# 0.1 .. 10 in steps of 2.3 %: geometric, because t and 1/t are equally strong. A best t at either
# end says that the head is broken, not merely uncalibrated. Sorted by distance from 1, so that
# taking the first minimum leaves alone whatever no temperature improves.
GRID = [10.0 ** (i / 100) for i in sorted(range(-100, 101), key=abs)]


def temper(c, t):
    """sigmoid(logit(c) / t): t > 1 pulls towards 0.5, t < 1 pushes away; order is kept."""
    c = np.clip(c, EPS, 1 - EPS)
    return 1 / (1 + np.exp((np.log1p(-c) - np.log(c)) / t))


def fit_sts(confidence, accepted, bins=15):
    """Temperatures (G,) from n held-out blocks: positions left to right, each by a 1-D grid search
    for the least ECE of the running product a_k, the temperatures before it fixed.

    confidence  (n, G) raw conditional c_k.
    accepted    (n, G) what a_k predicts: 1 if draft token k AND all before it passed, else 0. Rows
                never rise. As right, less noisy: np.cumprod of min(1, p_target / p_draft) at the
                drawn x_k. Not of the labels of Eq. 8, which average over x_k: those that pass are
                not the average ones, and c_{k+1} depends on which it was.
    Collect with fixed(confidence, G), or an unverified token would count as a rejected one, and at
    the sampling temperature in use. At least 10 blocks a bin: the ECE of even a perfect predictor
    averages up to 0.5 * sqrt(bins / n), 0.16 there and 0.02 at n = 10,000.
    """
    c, y = checked(confidence), unit(accepted, "accepted")
    n, G = c.shape
    if y.shape != c.shape or (np.diff(y, axis=1) > 0).any():
        raise ValueError(f"accepted {y.shape} must have shape {c.shape}, as confidence, and never "
                         "rise along a row: take np.cumprod(.., axis=1) of conditional outcomes")
    if n < 10 * bins:
        raise ValueError(f"{n} blocks are too few for {bins} bins: collect {10 * bins} or more")
    temperatures = np.ones(G)
    before = np.ones(n)  # calibrated a_{k-1}
    for k in range(G):
        error = [ece(before * temper(c[:, k], t), y[:, k], bins) for t in GRID]
        temperatures[k] = GRID[int(np.argmin(error))]
        before *= temper(c[:, k], temperatures[k])
    return temperatures


def apply_sts(confidence, temperatures):
    """confidence (.., G'), temperatures (G,) with G' <= G -> calibrated, float64, same shape."""
    # Checked here because the clip in temper would hide it from schedule.
    c, t = unit(confidence, "confidence"), as_float64(temperatures)
    if t.ndim != 1 or c.shape[-1] > len(t) or not t.min() > 0:
        raise ValueError(f"{c.shape[-1]} positions need as many positive temperatures, got {t}: "
                         "fit_sts on blocks of the full length")
    return temper(c, t[: c.shape[-1]])


# --- SPS, the target's speed table


def profile_sps(step, max_tokens, repeats=5, clock=time.perf_counter):
    """sps (max_tokens + 1,): target steps per second at n packed tokens, sps[0] = NaN. step(n) runs
    the target on exactly n tokens and returns when it has finished (on a GPU: synchronise in it).
    Measured once at start-up, for max_tokens >= R*(1+G). clock is for tests."""
    if max_tokens < 2 or repeats < 1:
        raise ValueError("max_tokens must be >= 2 (anchor and one draft token) and repeats >= 1")
    # Every n up to 16, where a single request lives; then 8 per doubling, powers of two included.
    grid = [1]
    while grid[-1] < max_tokens:
        grid.append(min(max_tokens, grid[-1] + max(1, 2 ** (grid[-1].bit_length() - 4))))
    for n in grid:
        step(n)  # warm-up at every n: the first call of a shape may allocate, compile or autotune
    seconds = np.empty((repeats, len(grid)))
    # Round robin over n, so that a slow drift (heat, another process) reaches every n alike.
    for row in seconds:
        for i, n in enumerate(grid):
            start = clock()
            step(n)
            row[i] = clock() - start
    # Non-decreasing in n: where noise makes n look cheaper than n - 1, returning to the true cost
    # at n + 1 looks like a cliff, and the early stop of Algorithm 1 would stick at it.
    seconds = np.maximum.accumulate(np.median(seconds, axis=0))
    if not seconds[0] > 0:
        raise ValueError("step(1) took no time: it must return only when the target has finished")
    if seconds[-1] < 1.02 * seconds[0]:
        warnings.warn(f"SPS is flat: {max_tokens} tokens cost under 2 % more than one, so schedule "
                      "verifies nearly everything; does step(n) really run n tokens?")
    # Time is what adds up over tokens, so time is interpolated, not its inverse.
    return np.append(np.nan, 1 / np.interp(np.arange(1, max_tokens + 1), grid, seconds))

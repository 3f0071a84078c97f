"""
scheduler.py: how many draft tokens of each request are worth verifying this cycle.

DSpark (arXiv 2607.05147): Sec. 3.2.1, confidence c_k, survival a_k, Sequential Temperature Scaling
(STS); Sec. 3.2.2, Algorithm 1, the hardware-aware prefix scheduler; Appendix A, the early stop.

In    confidence (R, G): c_k in [0, 1], the chance that draft token k passes if all before it passed
      (torch tensor on any device, or array). What rows cost: sps (>= R*(1+G) + 1,), target steps per
      second at n packed tokens, index 0 unused; or Costs, which knows T_draft as well.
Out   verify_len (R,) int64, 0..G. The target then runs N = sum(1 + verify_len) packed tokens.
      schedule, fixed and threshold share the shape (confidence, parameter) -> verify_len;
      fixed(confidence, 0) is plain decoding.

A policy is what the engine calls as policy(confidence) -> verify_len. Two of them learn and have two
methods more, so that what is decided from the past cannot see anything else:
      begin(R, G) -> block length, 0..G                 before anything of this cycle exists
      observe(confidence, verify_len, n_accepted)       when all of it is past
      Async     Sec. 5.2, the paper's production scheduler: the budget comes from two cycles before
      Adaptive  ours: T_draft is in Theta = tau * SPS(N), expected tokens per second; whether to draft at all, and how much, is decided first

R active requests, G draft positions, N packed tokens, n held-out blocks (STS), S slots (the most
requests there can be). All of it is numpy in float64: the arrays are tiny, and numpy costs least.

Worked example (Appendix A): R = 1, G = 2, a_1 = 0.8. Verifying one token already lowers the
throughput, from Theta = 1.0 to 1.8 * 0.5 = 0.9, so the answer is 0 whatever c_2 says:

    >>> sps = [float("nan"), 1.0, 0.5, 0.45]
    >>> schedule([[0.8, 0.9]], sps), schedule([[0.8, 0.0]], sps)
    (array([0]), array([0]))

A search over all lengths would return 2 for c_2 = 0.9 (Theta = 2.52 * 0.45 = 1.134) and 0 for
c_2 = 0. But c_2 was computed from the sampled x_1, so x_1 would decide whether x_1 is verified.

Lossless, because whether x_k is admitted depends only on what was known before x_k was drawn: c_k
never sees x_k (propose() computes it later, to save calls, but from h_k and x_{k-1} alone); what does see it (c_{k+1}, ..) has no greater survival, so it is visited later; and
with the early stop nothing visited later can change the answer for x_k. For the same reason
temperatures and sps must be fixed before the cycle starts.

Known limits of Algorithm 1: the drafter's time is not in Theta, so a cycle that verifies nothing
still pays for its draft; and where SPS is a staircase the early stop can sit in a local optimum (with
a cliff at SPS(2), R = 1 never verifies anything). Adaptive has neither. Not in the paper, chosen
here: Adaptive, the bins and grid of STS and what decides within noise, how costs are measured, and what is refused.

Run alone: python -m doctest scheduler.py (silent when the examples hold).
"""
import time
import warnings
from collections import deque
from dataclasses import dataclass

import numpy as np

# --- Survival, and the policies without memory (Sec. 3.2.2)


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
                         f"{sps.shape}: measure at least max_tokens={R * (1 + G)}")
    sps = sps[R : R * (1 + G) + 1]  # N = R (nothing admitted) .. R*(1+G) (everything)
    if not sps.min() > 0:
        raise ValueError("sps has NaN or values <= 0 where this batch needs it: profile it again")

    return admit(a, sps)


def admit(a, sps):
    """The loop of Algorithm 1, vectorised. a (R, G) survivals, sps (R*G + 1,) at N = R, R+1, .. R*(1+G)."""
    R, G = a.shape
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
    """schedule as a policy of the confidence alone: calibrated by STS temperatures if given, on fixed
    costs (an SPS table, or Costs). Both were made before the cycle, so the policy stays causal."""
    def policy(confidence):
        table = sps.sps(len(confidence)) if isinstance(sps, Costs) else sps
        return schedule(calibrated(confidence, temperatures), table)
    return policy


def calibrated(confidence, temperatures):
    return confidence if temperatures is None else apply_sts(confidence, temperatures)


# --- What a cycle costs


@dataclass
class Costs:
    """Seconds on one machine. Tables over R = 0..S requests (0 unused) and l = 0..G draft tokens each.

    The paper has SPS(N) alone. The same N costs less in few requests than in many, whose caches must
    all be read, and an engine meets both; so R stays visible. With N = R (1 + l), SPS(N) = 1 / verify.
    """
    verify: np.ndarray  # (S + 1, G + 1) the target's pass over N = R (1 + l) rows, and the test
    draft: np.ndarray   # (S + 1, G + 1) T_draft, a block of l tokens for R requests; 0 at l = 0

    def covers(self, R, G):
        """Refuse what was never measured: np.interp would go on with the last value, silently."""
        S, most = np.array(self.verify.shape) - 1
        if not (1 <= R <= S and 0 <= G <= most):
            raise ValueError(f"costs are known for up to {S} requests and blocks of {most}, not for {R} and {G}: measure more")

    def sps(self, R):
        """SPS(N) at N = R .. R (1 + G) for R requests, as `schedule` wants it: (R (1 + G) + 1,)."""
        G = self.verify.shape[1] - 1
        self.covers(R, G)
        # Time is what adds up over rows, so time is interpolated, not its inverse.
        seconds = np.interp(np.arange(R * G + 1) / R, np.arange(G + 1), self.verify[R])
        return np.concatenate((np.full(R, np.nan), 1 / seconds))


def costs_from(verify, draft, S, G):
    """Costs from measured points, two dicts (R, l) -> seconds: interpolated between them, and made
    non-decreasing. Where noise makes n rows look cheaper than n - 1, returning to the true cost at
    n + 1 looks like a cliff, and the early stop of Algorithm 1 would stick at it."""
    def table(points):
        Rs, rows = sorted({R for R, _ in points}), []
        for R in Rs:
            ls = sorted(l for r, l in points if r == R)
            rows.append(np.interp(np.arange(G + 1), ls, [points[R, l] for l in ls]))
        rows = np.maximum.accumulate(np.maximum.accumulate(rows, axis=0), axis=1)
        return np.stack([np.interp(np.arange(S + 1), Rs, column) for column in rows.T], axis=1)
    return Costs(table(verify), table({(R, 0): 0.0 for R, _ in draft} | draft))


def convex(seconds):
    """The largest convex curve below a staircase: past a cliff the steps on the way are averaged. On it
    Theta has one peak, which the early stop finds; on the staircase it may stop before the cliff.

    >>> convex(np.array([1.0, 2.0, 2.0, 2.0, 5.0]))
    array([1.        , 1.33333333, 1.66666667, 2.        , 5.        ])
    """
    out, i = seconds.copy(), 0
    while i < len(seconds) - 1:
        slope = (seconds[i + 1 :] - seconds[i]) / np.arange(1, len(seconds) - i)
        j = i + 1 + slope.argmin()
        out[i : j + 1] = np.linspace(seconds[i], seconds[j], j - i + 1)
        i = j
    return out


# --- Policies with memory


def search(a, R, verify, draft=0.0):
    """Global search over the staircase, for every block length g = 0..G at once: M past blocks of survivals a (M, G), sorted,
    stand for R requests. verify (>= G + 1,) and draft (G + 1,), or one number, are seconds at R. Returns the largest Theta (G + 1,), and the draft
    tokens per request (G + 1,) at which it lies.

    No early stop: that is sound only because no block in `a` is the one that is being decided on. On
    the current block it is the leak of Appendix A.
    """
    M, G = a.shape
    order = np.argsort(-a, axis=None)  # (M*G,)
    inside = np.zeros((G + 1, 1 + M * G))  # 1: this draft token lies within the first g of its block; column 0: nothing is verified
    inside[:, 1:] = order % G < np.arange(G + 1)[:, None]
    tau = R * (1 + np.cumsum(inside * np.append(0.0, a.ravel()[order]), axis=1) / M)  # (G + 1, 1 + M*G)
    l = np.cumsum(inside, axis=1) / M
    theta = tau / (np.reshape(draft, (-1, 1)) + np.interp(l, np.arange(len(verify)), verify))
    best = np.arange(G + 1), theta.argmax(axis=1)
    return theta[best], l[best]


def top_k(a, budget):
    """The `budget` likeliest of a (R, G) -> verify_len (R,). Causal as Algorithm 1 is: x_k's rank counts
    what is likelier, and what saw x_k is not likelier and comes later in a tie."""
    order = np.argsort(-a, axis=None, kind="stable")[: min(budget, np.count_nonzero(a > 0))]
    return np.bincount(order // a.shape[1], minlength=len(a))


class Async:
    """Sec. 5.2: this cycle's token budget is fixed before its draft exists, by a global search over the
    confidences of two cycles before (on a GPU the launch need not wait for the newest); this cycle's
    confidences only rank. If requests came or went since, each counts as the average one of then.
    """

    def __init__(self, costs, temperatures=None):
        self.costs, self.temperatures = costs, temperatures
        self.past = deque(maxlen=2)  # survivals of the last two finished cycles, older first
        self.budget = None

    def begin(self, R, G):
        self.costs.covers(R, G)
        if len(self.past) < 2:
            self.budget = R * G  # nothing to go by yet
        else:
            self.budget = int(round(R * search(self.past[0], R, self.costs.verify[R])[1][-1]))
        return G

    def __call__(self, confidence):
        return top_k(survival(calibrated(confidence, self.temperatures)), self.budget)

    def observe(self, confidence, verify_len, n_accepted):
        self.past.append(survival(calibrated(confidence, self.temperatures)))


class Adaptive:
    """Ours: Theta = tau / (T_draft(R, G) + T_verify(R, N)), the time of the whole cycle.

    First, from past cycles alone: for every block length 0..G, what would Theta have been over the
    recent blocks, at today's R? The best is drafted, and 0 is plain decoding. Load enters through R at
    once. So that a change of the text is heard too, every cycle saves `probing` of its time, and when
    that covers what another length would lose, it is tried: a whole block where a shorter one is best,
    the best of the others where nothing is drafted. That is rare if it is dear, and often if not.
    Then Algorithm 1 within the block, on the same Theta and on a convex cost curve.

    Survivals are corrected by what past cycles really accepted at each position, as STS is fitted to
    other text and at another temperature. All numbers here were made by finished cycles.
    """

    PRIOR = 8.0          # draft tokens' worth of belief in the calibration as it came
    DECAY = 1 - 1 / 128  # of all sums, per drafted block: they reach about 128 blocks back
    FIRST = 16, 4        # blocks and cycles before the first decision: of many requests that begin together, all are at their
                         # first words, and one cycle says little about the rest
    LEAST, MOST = 32, 128  # blocks that a decision looks at: the last four cycles', within these bounds

    def __init__(self, costs, temperatures=None, probing=0.01):
        self.costs, self.temperatures, self.probing = costs, temperatures, probing
        self.verify = [convex(seconds) for seconds in costs.verify]
        G = costs.verify.shape[1] - 1
        self.cycles = 0                                      # that drafted
        self.blocks = np.empty((0, G))                       # (M, G) survivals of recent blocks, newest first
        self.won, self.hoped = np.zeros(G), np.zeros(G)      # verified tokens accepted; sum of their survivals
        self.upon, self.before = np.zeros(G), np.zeros(G)    # sums of a_k and of a_{k-1}
        self.saved = 0.0                                     # seconds that probing may cost

    def believed(self, a):
        """Survivals as past cycles say they should be; running minimum, as they cannot rise along a block."""
        correction = (self.won + self.PRIOR) / (self.hoped + self.PRIOR)  # (G,)
        return np.minimum.accumulate(np.minimum(a * correction[: a.shape[1]], 1.0), axis=1)

    def begin(self, R, G):
        self.costs.covers(R, G)
        if len(self.blocks) < self.FIRST[0] or self.cycles < self.FIRST[1]:
            return G
        a, verify, draft = self.believed(self.blocks[: max(4 * R, self.LEAST)]), self.verify[R], self.costs.draft[R]
        theta, l = search(a[:, :G], R, verify, draft[: G + 1])  # (G + 1,) each; 0: nothing is drafted
        best = int(theta.argmax())
        other = G if best else 1 + int(theta[1:].argmax())
        seconds = draft[[best, other]] + np.interp(l[[best, other]], np.arange(len(verify)), verify)
        loss = seconds[1] * (1 - theta[other] / theta[best])  # what trying the other would lose; nothing if they are the same
        self.saved = min(self.saved + self.probing * seconds[0], loss)
        if self.saved >= loss:
            self.saved = 0.0
            return other
        return best

    def __call__(self, confidence):
        a = self.believed(survival(calibrated(confidence, self.temperatures)))
        R, G = a.shape
        verify = np.interp(np.arange(R * G + 1) / R, np.arange(len(self.verify[R])), self.verify[R])
        return admit(a, 1 / (self.costs.draft[R, G] + verify))

    def observe(self, confidence, verify_len, n_accepted):
        R, G = np.shape(confidence)
        if G == 0:  # nothing was drafted: nothing was learnt
            return
        a, k = survival(calibrated(confidence, self.temperatures)), np.arange(G)
        for total in (self.won, self.hoped, self.upon, self.before):
            total[:G] *= self.DECAY**R  # what this block did not reach is remembered: forgotten, it would look good again
        verified = k < np.asarray(verify_len)[:, None]  # (R, G)
        self.won[:G] += (k < np.asarray(n_accepted)[:, None]).sum(0)
        self.hoped[:G] += (a * verified).sum(0)
        self.upon[:G] += a.sum(0)
        self.before[:G] += np.hstack((np.ones((R, 1)), a[:, :-1])).sum(0)
        # Positions beyond a short block go on at the last known rate; those never seen look good, so they get tried.
        rate = (self.upon[G:] + 1) / (self.before[G:] + 1)
        whole = np.hstack((a, a[:, -1:] * np.cumprod(rate)))
        self.blocks = np.concatenate((whole, self.blocks))[: max(self.MOST, R)]
        self.cycles += 1


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


def temper(c, t, by=0.0):
    """sigmoid((logit(c) + by) / t): t > 1 pulls towards 0.5, t < 1 pushes away; order is kept."""
    c = np.clip(c, EPS, 1 - EPS)
    return 1 / (1 + np.exp((np.log1p(-c) - np.log(c) - by) / t))


def fit_sts(confidence, accepted, bins=15):
    """Temperatures (G,) from n held-out blocks: positions left to right, each by a 1-D grid search
    for the least ECE of the running product a_k (within noise: the least Brier score), those before it fixed.

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
    noise = 0.25 * np.sqrt(bins / n)
    before = np.ones(n)  # calibrated a_{k-1}
    for k in range(G):
        a = [before * temper(c[:, k], t) for t in GRID]
        error = np.array([ece(x, y[:, k], bins) for x in a])
        # ECE is blind to sharpness: t = 10 makes every c_k one half, and where half of them pass that is perfect, and no use to a
        # scheduler. So among temperatures that ECE cannot tell apart on so few blocks, the one with the least Brier score (ours).
        score = [brier(x, y[:, k]) if e <= error.min() + noise else np.inf for x, e in zip(a, error)]
        temperatures[k] = GRID[int(np.argmin(score))]
        before *= temper(c[:, k], temperatures[k])
    return temperatures


def shifted(confidence, by):
    """sigmoid(logit(c) + by), the confidences that a head with a bias higher by so much would give."""
    return temper(unit(confidence, "confidence"), 1.0, by)


def fit_shift(confidence, accepted):
    """The shift that makes mean confidence true, over all positions that were reached: (n, G) raw c_k and accepted as in fit_sts.

    Temperature alone cannot do that: it pulls towards one half, whatever the truth is. This shift is also the maximum of the
    likelihood; the mean rises with it, so it is found by bisection.

    >>> c = np.full((4, 1), 0.8)
    >>> round(float(shifted(c, fit_shift(c, [[1], [1], [0], [0]]))[0, 0]), 6)
    0.5
    """
    c, y = checked(confidence), unit(accepted, "accepted")
    reached = np.hstack((np.ones((len(y), 1)), y[:, :-1])) > 0  # x_k was judged: all before it had passed
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if shifted(c, middle)[reached].mean() < y[reached].mean() else (low, middle)
    return (low + high) / 2


def apply_sts(confidence, temperatures):
    """confidence (.., G'), temperatures (G,) with G' <= G -> calibrated, float64, same shape."""
    # Checked here because the clip in temper would hide it from schedule.
    c, t = unit(confidence, "confidence"), as_float64(temperatures)
    if t.ndim != 1 or c.shape[-1] > len(t) or not t.min() > 0:
        raise ValueError(f"{c.shape[-1]} positions need as many positive temperatures, got {t}: "
                         "fit_sts on blocks of the full length")
    return temper(c, t[: c.shape[-1]])


# --- Measuring


def profile(step, points, least_seconds=3.0, least=3, most=7, tolerance=0.1, clock=time.perf_counter):
    """Seconds of step(*point) for every point, and the noise in them. step returns when the work has
    finished (on a GPU: synchronise in it), and really does what its point says. clock is for tests.

    Rounds over all points are repeated until the typical spread of a point (interquartile range over
    median) is within `tolerance`, or `most` times: the noise returned says which it was. And for
    `least_seconds`, or 40 times: one request's points differ by a few per cent, where three samples of
    each would leave cliffs that are not there, and Algorithm 1 stops at the first.
    """
    begin = clock()
    for point in points:
        step(*point)  # warm-up: the first call of a shape may allocate, compile or autotune
    rounds = []
    while True:
        # Round robin, so that a slow drift (heat, another process) reaches every point alike.
        row = []
        for point in points:
            start = clock()
            step(*point)
            row.append(clock() - start)
        rounds.append(row)
        low, middle, high = np.percentile(rounds, (25, 50, 75), axis=0)  # (len(points),) each
        if not middle.min() > 0:
            raise ValueError("a step took no time: it must return only when its work has finished")
        noise = float(np.median((high - low) / middle))
        settled = len(rounds) >= least and noise <= tolerance or len(rounds) >= most
        if settled and (clock() - begin >= least_seconds or len(rounds) >= 40):
            return middle, noise


def fit(verify):
    """The simplest cost curve through measured points, a dict (R, l) -> seconds: T = a + b N with
    N = R (1 + l). Returns a, b and the mean relative error, and warns if the curve is flat."""
    N = np.array([R * (1 + l) for R, l in verify], dtype=np.float64)
    seconds = np.array(list(verify.values()))
    # weighted by 1 / seconds: it is relative errors that count, from a few rows to hundreds
    (a, b), *_ = np.linalg.lstsq(np.stack((np.ones_like(N), N), 1) / seconds[:, None], np.ones_like(N), rcond=None)
    if seconds[N.argmax()] < 1.02 * seconds[N.argmin()]:
        warnings.warn(f"SPS is flat: {N.max():.0f} rows cost under 2 % more than {N.min():.0f}, so a scheduler "
                      "verifies nearly everything; are they really run?")
    return a, b, float(np.abs(a + b * N - seconds).mean() / seconds.mean())

"""
Tests of verify.py: first the law by enumeration, then everything else. Run: python -m pytest tests/test_verify.py

The law. verify_tokens is a function of (draft tokens, u), so its output law can be computed instead of sampled. Draft
tokens are enumerated with their probability. The cube of uniforms is cut where the outcome can change: u[k] at
p_target(x) / p_draft(x), u[G] at every step of every CDF the next token may come from. The real verify_tokens then says
what happens in each cell, and the cell's volume is that outcome's probability. Shorter outputs are completed with
p_target, and the joint law of the first G + 1 tokens must equal p_target's own, to 1e-12.

A model here is a list of conditional tables: table[k] is (V**k, V), row c the distribution after the prefix coded c in
base V. So probabilities depend on everything before them, as a language model's do.
"""
import doctest
import itertools
import math
from fractions import Fraction

import pytest
import torch

import verify
from verify import VerifyResult, logits_to_probs, sample, verify_tokens

F32, F64 = torch.float32, torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------------------------------------------
# the enumeration harness


def prefix_codes(tokens, V):
    """(S, n) tokens -> (S, n + 1), column k the base-V code of tokens[:, :k]."""
    codes = [torch.zeros(len(tokens), dtype=torch.long)]
    for k in range(tokens.shape[1]):
        codes.append(codes[-1] * V + tokens[:, k])
    return torch.stack(codes, dim=1)


def joint_law(target):
    """The law of the first len(target) tokens when the target alone decodes: (V**len,)."""
    law = torch.ones(1, dtype=F64)
    for table in target:
        law = (law[:, None] * table).flatten()
    return law


def cycle_law(target, draft, verify_len, verify_fn=verify_tokens, where=0.5, draft_ids=None, proposal=None, grid=0):
    """
    The exact joint law (V**(G+1),) of the first G + 1 tokens that start with one verified block.

    target      G + 1 tables; draft: G tables, (V**k, K) when draft_ids is given
    verify_len  an int, or a function of the (S, G) drafted blocks returning (S,)
    where       the point of a cell that is evaluated, as a fraction of its width in every direction. If no cell hides a
                step, 0.001 and 0.999 give the same law: an outcome is monotone in each u, so equal ends mean constant.
    proposal    what the tokens are really drawn from, if that differs from the p_draft handed to verify_fn
    grid        extra cuts per axis, for functions with steps elsewhere (the broken ones): exact to about 1 / grid
    """
    G, V = len(draft), target[0].shape[1]
    ids = torch.arange(V) if draft_ids is None else draft_ids
    columns = torch.tensor(list(itertools.product(range(len(ids)), repeat=G)), dtype=torch.long)  # (S, G)
    tokens = ids[columns]  # (S, G) every block the drafter can produce
    S, codes = len(tokens), prefix_codes(tokens, V)
    p_target = torch.stack([target[k][codes[:, k]] for k in range(G + 1)], dim=1)  # (S, G+1, V)

    def along(tables):
        rows = [tables[k][codes[:, k]] for k in range(G)]
        return torch.stack(rows, dim=1) if G else torch.zeros(S, 0, len(ids), dtype=F64)

    p_draft = along(draft)  # (S, G, K)
    p_block = along(proposal or draft).gather(2, columns[:, :, None]).squeeze(2).prod(dim=1)  # (S,)
    lens = verify_len(tokens) if callable(verify_len) else torch.full((S,), verify_len)

    # The cuts of every axis: S x (cells + 1) edges, ascending. Cells of width zero are harmless, they weigh nothing.
    full_draft = torch.zeros(S, G, V, dtype=F64)
    full_draft[:, :, ids] = p_draft
    residual = (p_target[:, :G] - full_draft).clamp(min=0)
    cdfs = torch.cat([p_target, residual], dim=1).cumsum(-1)
    cdfs = (cdfs / cdfs[:, :, -1:].clamp(min=1e-300)).flatten(1)
    ratio = p_target[:, :G].gather(2, tokens[:, :, None]) / full_draft.gather(2, tokens[:, :, None]).clamp(min=1e-300)
    extra = torch.linspace(0, 1, grid + 2, dtype=F64).expand(S, -1)  # holds 0 and 1
    edges = [torch.cat([extra, ratio[:, k].clamp(max=1)], dim=1).sort(dim=1).values for k in range(G)]
    edges.append(torch.cat([extra, cdfs], dim=1).sort(dim=1).values)

    # All cells of all blocks become one big batch of requests.
    index = torch.cartesian_prod(torch.arange(S), *[torch.arange(e.shape[1] - 1) for e in edges])  # (B, 1 + G + 1)
    block = index[:, 0]
    low = torch.stack([e[block, index[:, 1 + k]] for k, e in enumerate(edges)], dim=1)  # (B, G+1)
    width = torch.stack([e[block, index[:, 1 + k] + 1] for k, e in enumerate(edges)], dim=1) - low
    weight = p_block[block] * width.prod(dim=1)
    alive = weight > 0
    block, weight, u = block[alive], weight[alive], (low + where * width)[alive].clamp(max=1 - 2**-53)
    scheduled = torch.arange(G + 1) <= lens[block, None]
    result = verify_fn(p_target[block][scheduled], p_draft[block], tokens[block], lens[block], u, draft_ids)

    # Probability by emitted prefix, level by level; what stops early is completed with the target.
    law = torch.zeros(1, dtype=F64)
    for k in range(G + 1):
        stops = result.n_accepted == k
        emitted = codes[block[stops], k] * V + result.next_token[stops]
        law = (law[:, None] * target[k]).flatten().index_add(0, emitted, weight[stops])
    return law


def random_tables(V, lengths, kind, g, K=None):
    """Conditional tables (V**k, K or V) for k = 0 .. lengths - 1. Kinds "sparse" and "one-hot" have zeros in them."""
    tables = []
    for k in range(lengths):
        if kind == "one-hot":
            row = torch.nn.functional.one_hot(torch.randint(K or V, (V**k,), generator=g), K or V).to(F64)
        else:
            row = torch.rand(V**k, K or V, generator=g, dtype=F64) ** 3 + 1e-3
            if kind == "sparse":
                row = row * (torch.rand(row.shape, generator=g) < 0.5)
                row[:, 0] += 1e-3 * (row.sum(1) == 0)
        tables.append(row / row.sum(1, keepdim=True))
    return tables


def gap(law, wanted):
    """Total variation distance."""
    return 0.5 * (law - wanted).abs().sum().item()


def same(result, n_accepted, next_token):
    return torch.equal(result.n_accepted, n_accepted) and torch.equal(result.next_token, next_token)


def tables_of(*rows):
    """One distribution per position, whatever came before."""
    return [torch.tensor(row, dtype=F64).expand(len(row) ** k, len(row)) for k, row in enumerate(rows)]


# ---------------------------------------------------------------------------------------------------------------------
# 1. the law

SIZES = [(3, 0), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3), (5, 1), (5, 2), (5, 3)]
KINDS = [  # of target, of draft
    ("random", "random"),
    ("sparse", "sparse"),
    ("one-hot", "random"),
    ("random", "one-hot"),
    ("one-hot", "one-hot"),
]


@pytest.mark.parametrize("V,G", SIZES)
def test_law_is_the_targets_for_every_verify_len(V, G):
    for seed, (target_kind, draft_kind) in enumerate(KINDS):
        g = generator(100 * V + 10 * G + seed)
        target, draft = random_tables(V, G + 1, target_kind, g), random_tables(V, G, draft_kind, g)
        for verify_len in range(G + 1):
            for where in (0.001, 0.999):
                law = cycle_law(target, draft, verify_len, where=where)
                assert (law - joint_law(target)).abs().max() < 1e-12, (target_kind, draft_kind, verify_len, where)


def test_law_with_equal_and_with_disjoint_distributions():
    g = generator(1)
    target = random_tables(4, 3, "random", g)
    assert (cycle_law(target, target[:2], 2) - joint_law(target)).abs().max() < 1e-12
    even, odd = (0.6, 0.0, 0.4, 0.0), (0.0, 0.1, 0.0, 0.9)
    target, draft = tables_of(even, odd, even), tables_of(odd, even)
    assert (cycle_law(target, draft, 2) - joint_law(target)).abs().max() < 1e-12


@pytest.mark.parametrize("draft_ids", [[1, 2, 4], [0, 3], [4], [0, 1, 2, 3, 4]])
def test_law_with_a_reduced_draft_vocabulary(draft_ids):
    draft_ids, g = torch.tensor(draft_ids), generator(2)
    for kind in ("random", "sparse"):
        target, draft = random_tables(5, 3, kind, g), random_tables(5, 2, kind, g, K=len(draft_ids))
        for verify_len in range(3):
            law = cycle_law(target, draft, verify_len, draft_ids=draft_ids)
            assert (law - joint_law(target)).abs().max() < 1e-12


def test_law_with_a_causal_verify_len():
    """x_k is scheduled or not by x_1 .. x_{k-1} only (Sec. 3.2.2): the law holds though the lengths differ by block."""

    def causal(x):  # x_1 always, x_2 only after a 0, x_3 only if x_2 != x_1
        second = x[:, 0] == 0
        return 1 + second.long() + (second & (x[:, 1] != x[:, 0])).long()

    for seed in range(3):
        g = generator(seed)
        target, draft = random_tables(3, 4, "random", g), random_tables(3, 3, "sparse", g)
        lens = causal(torch.cartesian_prod(*[torch.arange(3)] * 3))
        assert lens.unique().tolist() == [1, 2, 3]
        assert (cycle_law(target, draft, causal) - joint_law(target)).abs().max() < 1e-12


def test_noncausal_verify_len_breaks_the_law():
    """Appendix A: verify both tokens if x_1 = A, else none. 0.5 * 1 + 0.5 * 0.7 = 0.85 of the first tokens become A."""
    target, draft = tables_of((0.7, 0.3), (0.7, 0.3), (0.7, 0.3)), tables_of((0.5, 0.5), (0.5, 0.5))
    first_token = cycle_law(target, draft, lambda x: 2 * (x[:, 0] == 0).long()).reshape(2, -1).sum(1)
    assert (first_token - torch.tensor([0.85, 0.15], dtype=F64)).abs().max() < 1e-12


# ---------------------------------------------------------------------------------------------------------------------
# 2. a literal oracle


def verify_reference(p_target, p_draft, tokens, verify_len, u, draft_ids=None):
    """The rule as the paper words it: one request at a time, one token at a time, in python floats (float64)."""

    def draw(probs, u):
        last, running = None, 0.0
        for i, p in enumerate(probs):
            running += p
            last = i if p > 0 else last
            if u * sum(probs) < running:
                return i
        return last

    (R, G), V = tokens.shape, p_target.shape[1]
    n_accepted, next_token, start = [], [], 0
    for r in range(R):
        length = int(verify_len[r])
        rows = p_target[start : start + 1 + length].tolist()
        start += 1 + length
        weights, n = rows[length], 0
        for k in range(length):
            draft_row = [0.0] * V
            for column, p in enumerate(p_draft[r, k].tolist()):
                draft_row[column if draft_ids is None else int(draft_ids[column])] = p
            x = int(tokens[r, k])
            if not float(u[r, k]) * draft_row[x] < rows[k][x]:
                weights = [max(a - b, 0.0) for a, b in zip(rows[k], draft_row)]
                weights = weights if sum(weights) > 0 else rows[k]
                break
            n += 1
        n_accepted.append(n)
        next_token.append(draw(weights, float(u[r, G])))
    return VerifyResult(torch.tensor(n_accepted), torch.tensor(next_token))


def test_agrees_with_the_reference_on_ragged_batches():
    g, seen = generator(3), set()
    for trial in range(120):
        R, G, V = (int(torch.randint(low, high, (), generator=g)) for low, high in ((1, 7), (1, 8), (2, 20)))
        draft_ids = torch.randperm(V, generator=g)[: 1 + V // 2].sort().values if trial % 3 == 0 else None
        K = V if draft_ids is None else len(draft_ids)
        verify_len = torch.randint(0, G + 1, (R,), generator=g)
        target_type, draft_type = [(F32, F64), (F64, F32), (F64, F64), (F32, F32)][trial % 4]
        p_target = torch.softmax(2 * torch.randn(R + int(verify_len.sum()), V, generator=g, dtype=target_type), -1)
        p_draft = torch.softmax(2 * torch.randn(R, G, K, generator=g, dtype=draft_type), -1)
        columns = sample(p_draft, torch.rand(R, G, generator=g))
        tokens = columns if draft_ids is None else draft_ids[columns]
        u = torch.rand(R, G + 1, generator=g)
        got = verify_tokens(p_target, p_draft, tokens, verify_len, u, draft_ids)
        wanted = verify_reference(p_target, p_draft, tokens, verify_len, u, draft_ids)
        assert same(got, wanted.n_accepted, wanted.next_token)
        for n, length in zip(got.n_accepted.tolist(), verify_len.tolist()):  # do the inputs exercise every branch?
            seen.add("rejected" if n < length else "full" if n == G else "cut" if n > 0 else "none scheduled")
    assert seen == {"rejected", "full", "cut", "none scheduled"}


def test_float32_comparison_is_exact():
    """p_target(x) is put on float32(u * p_draft(x)), the hardest place, and compared with exact fractions."""
    g, outcomes = generator(4), []
    for _ in range(200):
        draft_x, u = 0.5 + 0.5 * torch.rand((), generator=g), torch.rand((), generator=g)
        p_draft = torch.stack([draft_x, 1 - draft_x])[None, None]
        p_target = torch.stack([u * draft_x, 1 - u * draft_x]).expand(2, 2)
        got = verify_tokens(p_target, p_draft, torch.tensor([[0]]), torch.tensor([1]), torch.stack([u, u])[None])
        exact = Fraction(u.item()) * Fraction(draft_x.item()) < Fraction((u * draft_x).item())
        assert got.n_accepted.item() == exact
        outcomes.append(exact)
    assert 50 < sum(outcomes) < 150  # a float32 product would reject every time


# ---------------------------------------------------------------------------------------------------------------------
# 3. broken variants: each is a fault some implementation had, and each must be seen by the harness that passes ours


def broken(fault):
    """One request per row, G = 1: the whole rule with one thing wrong."""

    def verify_fn(p_target, p_draft, tokens, verify_len, u, draft_ids=None):
        first = torch.arange(len(tokens)) + verify_len.cumsum(0) - verify_len
        rows = p_target[first]  # (R, V) row 0 of each request
        x, p_draft = tokens[:, :1], p_draft[:, 0]
        accepted = (u[:, :1] * p_draft.gather(1, x) < rows.gather(1, x)).squeeze(1) & (verify_len == 1)
        if fault == "<=":
            accepted = (u[:, :1] * p_draft.gather(1, x) <= rows.gather(1, x)).squeeze(1) & (verify_len == 1)
        residual = (rows - p_draft).clamp(min=0)
        if fault == "softmaxed residual":
            residual = torch.softmax(residual, dim=1)
        if fault == "subtracted only at the rejected token":
            residual = rows.scatter_add(1, x, -p_draft.gather(1, x)).clamp(min=0)
        if fault == "rejected token only zeroed":
            residual = rows.scatter(1, x, 0.0)
        if fault == "residual not clamped":
            residual = (rows - p_draft).abs()
        residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, rows)
        plain = accepted if fault == "cut block is a rejection" else accepted | (verify_len == 0)
        weights = torch.where(plain[:, None], p_target[first + accepted], residual)
        u_next = torch.where(plain, u[:, 1], u[:, 0]) if fault == "shared u" else u[:, 1]
        return VerifyResult(accepted.long(), sample(weights, u_next))

    return verify_fn


TARGET, DRAFT, GRID = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6), 64

# verify_len, and the law of the first token worked out by hand. Ours: accepted (0.2, 0.2, 0.2), rejected 0.4, whose
# residual is (0.3, 0.1, 0) / 0.4.
FAULTS = {
    # softmax(0.3, 0.1, 0) = (0.3907, 0.3199, 0.2894): 0.4 of that comes on top
    "softmaxed residual": (1, [0.3563, 0.3280, 0.3158]),
    # only token 2 is ever rejected: (0.5, 0.3, 0) / 0.8
    "subtracted only at the rejected token": (1, [0.45, 0.35, 0.20]),
    "rejected token only zeroed": (1, [0.45, 0.35, 0.20]),
    # (0.3, 0.1, 0.4) / 0.8
    "residual not clamped": (1, [0.35, 0.25, 0.40]),
    # nothing scheduled, yet the residual: (0.75, 0.25, 0)
    "cut block is a rejection": (0, [0.75, 0.25, 0.00]),
    # u[0] is in [1/3, 1) after a rejection, 5/12 / (2/3) = 5/8 of it below 0.75
    "shared u": (1, [0.45, 0.35, 0.20]),
}


def first_token_law(verify_len, draft=DRAFT, **kwargs):
    return cycle_law(tables_of(TARGET, TARGET), tables_of(draft), verify_len, grid=GRID, **kwargs).reshape(3, 3).sum(1)


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_variants_break_the_law(fault):
    verify_len, by_hand = FAULTS[fault]
    right, by_hand = torch.tensor(TARGET, dtype=F64), torch.tensor(by_hand, dtype=F64)
    assert gap(first_token_law(verify_len), right) < 1e-12
    assert gap(first_token_law(verify_len, verify_fn=broken("none")), right) < 1e-12  # the fault alone makes the gap
    law = first_token_law(verify_len, verify_fn=broken(fault))
    assert gap(law, by_hand) < 1 / GRID
    assert gap(law, right) > 0.04


def test_p_draft_must_be_what_was_sampled_from():
    right = torch.tensor(TARGET, dtype=F64)
    # Sampled at temperature 1, checked against temperature 0.5: (0.04, 0.04, 0.36) / 0.44 = (1, 1, 9) / 11. Accepted:
    # 0.2, 0.2, and 0.6 * 0.2 * 11/9 = 0.1467; the rest, 0.4533, goes to (0.4091, 0.2091, 0) / 0.6182.
    other = first_token_law(1, draft=(1 / 11, 1 / 11, 9 / 11), proposal=tables_of(DRAFT))
    assert gap(other, torch.tensor([0.5, 0.3533, 0.1467], dtype=F64)) < 1e-4
    assert gap(other, right) > 0.05
    # Greedy draft (always token 2) checked against its soft probabilities: 1/3 accepted, 2/3 from (0.75, 0.25, 0).
    greedy = first_token_law(1, proposal=tables_of((0.0, 0.0, 1.0)))
    assert gap(greedy, torch.tensor([1 / 2, 1 / 6, 1 / 3], dtype=F64)) < 1e-12
    assert gap(greedy, right) > 0.13
    # The same greedy draft is lossless once p_draft says so: a one-hot.
    assert gap(first_token_law(1, draft=(0.0, 0.0, 1.0)), right) < 1e-12


def test_comparison_is_strict():
    """u = 0 has probability 2**-24 in float32: `<=` would emit a token of target probability 0 that often."""
    p_target, p_draft = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[[0.5, 0.5]]])
    args = (p_target, p_draft, torch.tensor([[1]]), torch.tensor([1]), torch.zeros(1, 2))
    assert same(verify_tokens(*args), torch.tensor([0]), torch.tensor([0]))
    assert broken("<=")(*args).n_accepted.tolist() == [1]


# ---------------------------------------------------------------------------------------------------------------------
# 4. the law, sampled: through logits_to_probs and sample() as a decoder would, with float32 uniforms


def test_sampled_law():
    """
    First two tokens of n decodes against p_target, V = 4, so 16 cells. Hoeffding and a union bound: some cell is off by
    more than t with probability at most 2 * 16 * exp(-2 n t**2) = 1e-9 for a fresh seed and a correct decoder.
    """
    n, V, G = 200_000, 4, 2
    t = math.sqrt(math.log(2 * V**2 / 1e-9) / (2 * n))  # 0.0078
    g = generator(5)
    target = [logits_to_probs(1.5 * torch.randn(V**k, V, generator=g), 0.8) for k in range(G + 1)]
    draft = [logits_to_probs(1.5 * torch.randn(V**k, V, generator=g), 1.3) for k in range(G)]
    u_draft, u = torch.rand(n, G, generator=g), torch.rand(n, G + 1, generator=g)

    def decode(u_draft, u):
        tokens, p_draft = torch.zeros(n, 0, dtype=torch.long), []
        for k in range(G):  # left to right, each conditioned on the one before
            p_draft.append(draft[k][prefix_codes(tokens, V)[:, k]])
            tokens = torch.cat([tokens, sample(p_draft[-1], u_draft[:, k])[:, None]], dim=1)
        codes = prefix_codes(tokens, V)
        verify_len = torch.arange(n) % (G + 1)
        rows = torch.stack([target[k][codes[:, k]] for k in range(G + 1)], dim=1)  # (n, G+1, V)
        packed = rows[torch.arange(G + 1) <= verify_len[:, None]]
        result = verify_tokens(packed, torch.stack(p_draft, dim=1), tokens, verify_len, u)
        out = torch.nn.functional.pad(tokens, (0, 1))  # (n, G+1)
        out = out.scatter(1, result.n_accepted[:, None], result.next_token[:, None])
        second = sample(target[1][out[:, 0]], torch.rand(n, generator=g))  # where only one token came out
        out[:, 1] = torch.where(result.n_accepted == 0, second, out[:, 1])
        return torch.bincount(out[:, 0] * V + out[:, 1], minlength=V**2) / n, result

    wanted = joint_law([table.double() for table in target[:2]])
    law, result = decode(u_draft, u)
    assert (law - wanted).abs().max() < t
    assert result.n_accepted.bincount().min() > 0.05 * n  # 0, 1 and 2 accepted all happen
    # One stream for drafting and verifying, the commonest seeding fault, is far outside.
    assert (decode(u[:, :G], u)[0] - wanted).abs().max() > 5 * t


# ---------------------------------------------------------------------------------------------------------------------
# 5. logits_to_probs


def test_greedy_is_one_hot_at_the_lowest_argmax():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0], [-math.inf, -2.0, -3.0]])
    assert logits_to_probs(logits, 0).tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]
    assert logits_to_probs(logits, 0, top_k=2, top_p=0.5).tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_settings_per_row_match_one_row_at_a_time():
    g = generator(6)
    logits = torch.randn(5, 3, 11, generator=g)  # (R, G, V)
    temperature, top_k = torch.tensor([0.0, 0.7, 1.0, 1.0, 2.0]), torch.tensor([0, 0, 4, 0, 3])
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.6, 0.8])
    probs = logits_to_probs(logits, temperature[:, None], top_k[:, None], top_p[:, None])
    for r in range(5):
        alone = logits_to_probs(logits[r], temperature[r].item(), top_k[r].item(), top_p[r].item())
        assert torch.equal(probs[r], alone)
        flat = logits_to_probs(logits[:, 0], temperature, top_k, top_p)  # (N, V) with (N,)
        assert torch.equal(flat[r], alone[0])
    assert torch.allclose(probs[1], torch.softmax(logits[1] / 0.7, -1))
    assert torch.allclose(probs.sum(-1), torch.ones(5, 3))
    kept = (probs > 0).sum(-1)  # (R, G)
    assert (kept[:3] == torch.tensor([[1], [11], [4]])).all() and (kept[4] <= 3).all()


def test_filters_by_hand():
    logits = torch.tensor([0.10, 0.40, 0.20, 0.30], dtype=F64).log()

    def check(wanted, **settings):
        probs = logits_to_probs(logits, settings.pop("temperature", 1.0), **settings)
        assert (probs - torch.tensor(wanted, dtype=F64)).abs().max() < 1e-12

    check([0.1, 0.4, 0.2, 0.3])
    check([0, 4 / 7, 0, 3 / 7], top_k=2)
    check([0.1, 0.4, 0.2, 0.3], top_k=9)
    check([0, 4 / 7, 0, 3 / 7], top_p=0.65)  # 0.4 < 0.65 <= 0.7
    check([0, 4 / 9, 2 / 9, 3 / 9], top_p=0.75)
    check([0, 1, 0, 0], top_p=1e-9)
    check([0, 1, 0, 0], top_p=0.0)
    # Top-p counts shares of what top-k left: 4/7 reaches 0.55 there, while 0.4 alone does not.
    check([0, 1, 0, 0], top_k=2, top_p=0.55)
    check([0, 4 / 7, 0, 3 / 7], top_p=0.55)
    # ... and of the temperature-scaled distribution (1, 16, 4, 9) / 30: 16/30 < 0.55, 25/30 reaches it.
    check([0, 16 / 25, 0, 9 / 25], temperature=0.5, top_p=0.55)
    check([0, 1, 0, 0], temperature=0.5, top_p=0.5)
    equal = logits_to_probs(torch.zeros(5), 1.0, top_k=2)  # ties go to the lowest ids, exactly top_k remain
    assert equal.tolist() == [0.5, 0.5, 0, 0, 0]


def test_unfiltered_rows_keep_their_tail_beside_filtered_ones():
    """A running sum reaches 1.0 before the tail (40 nats down): top_p = 1.0 must mean off, not `cumulative < 1`."""
    logits = torch.cat([torch.tensor([40.0]), torch.zeros(50)]).expand(3, 51)
    probs = logits_to_probs(logits, 1.0, top_k=torch.tensor([0, 51, 5]), top_p=torch.tensor([1.0, 1.0, 0.5]))
    assert (probs > 0).sum(-1).tolist() == [51, 51, 1]


def test_extreme_logits():
    inf = math.inf
    assert logits_to_probs(torch.tensor([-inf, 0.0, -inf, 0.0]), 1.0).tolist() == [0, 0.5, 0, 0.5]
    assert logits_to_probs(torch.tensor([-inf, 0.0, -inf, 0.0]), 1.0, top_k=3, top_p=0.99).tolist() == [0, 0.5, 0, 0.5]
    assert logits_to_probs(torch.tensor([1000.0, 999.0]), 1e-38).tolist() == [1, 0]  # 1000 / 1e-38 is inf in float32
    for bad in (math.nan, inf):
        for temperature in (0, 1.0, torch.tensor([0.0, 1.0])):
            with pytest.raises(ValueError, match="NaN"):
                logits_to_probs(torch.tensor([[0.0, 1.0], [bad, 1.0]]), temperature)
    with pytest.raises(ValueError, match="nothing but -inf"):
        logits_to_probs(torch.tensor([[0.0, 1.0], [-inf, -inf]]), 1.0)


def test_dtypes_and_ranges():
    for dtype, wanted in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (F64, F64)):
        for temperature in (0, 0.5, torch.tensor([0.0, 0.5])):
            assert logits_to_probs(torch.randn(2, 4).to(dtype), temperature, top_p=0.9).dtype == wanted
    exact = torch.tensor([1 / 3, 2 / 3], dtype=F64)
    assert (logits_to_probs(exact.log(), 1.0) - exact).abs().max() < 1e-15
    for settings in ({"temperature": -1.0}, {"temperature": 1.0, "top_k": -1}, {"temperature": 1.0, "top_p": 1.1}):
        with pytest.raises(AssertionError):
            logits_to_probs(torch.zeros(3), **settings)
    assert logits_to_probs(torch.zeros(0, 7), 1.0).shape == (0, 7)


# ---------------------------------------------------------------------------------------------------------------------
# 6. sample


def test_sample_at_both_ends():
    probs = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0])
    for dtype in (torch.float32, F64):
        last = 1 - 2**-24 if dtype == torch.float32 else 1 - 2**-53
        for scale in (1.0, 1e-30, 7.0, 1 / 3):  # need not be normalised
            got = sample((scale * probs.to(dtype)).expand(3, 6), torch.tensor([0.0, 0.299, last], dtype=dtype))
            assert got.tolist() == [2, 2, 4]
    subnormal = torch.tensor([0.0, 5e-324, 0.0], dtype=F64)  # 0.9 * 5e-324 rounds up to 5e-324
    assert sample(subnormal, torch.tensor(0.9)).item() == 1
    assert sample(torch.zeros(0, 5), torch.zeros(0)).shape == (0,)
    assert sample(torch.tensor([0.0, 1.0]), torch.tensor(0.5)).item() == 1  # no leading dims


def test_sample_never_draws_a_zero():
    g = generator(7)
    for _ in range(200):
        probs = torch.rand(64, 33, generator=g) ** 20  # many orders of magnitude
        probs *= torch.rand(64, 33, generator=g) < 0.3
        probs[:, 16] += 1e-35
        u = torch.rand(64, generator=g)
        u[:16], u[16:32], u[32:40] = 0.0, 1 - 2**-24, 2**-24
        ids = sample(probs, u)
        assert ids.dtype == torch.long and (probs.gather(1, ids[:, None]) > 0).all()


def test_sample_finds_its_way_in_the_tail_of_a_large_vocabulary():
    """One likely token and 49151 tail tokens worth 1e-9 each, less than a step (6e-8) of a float32 sum near 1."""
    V, tail = 49152, 1e-9
    probs = torch.full((V,), tail)
    probs[0] = 1 - tail * (V - 1)
    ids = torch.tensor([1, 2, 1000, V // 2, V - 1000, V - 2, V - 1])
    exact = probs.double()
    u = (exact[0] + (ids.double() - 0.5) * exact[1]) / exact.sum()  # the middle of each token's interval
    assert torch.equal(sample(probs.expand(7, V), u), ids)
    in_float32 = torch.searchsorted(probs.cumsum(0), u.float(), right=True)
    assert (in_float32 != ids).sum() >= 4  # what sample() would do without float64
    assert sample(probs, torch.tensor(1 - 2**-24)).item() < V


def test_sample_refuses_what_is_no_distribution():
    for row in ([0.5, math.nan], [math.inf, 0.0], [0.0, 0.0]):
        with pytest.raises(ValueError):
            sample(torch.tensor([row]), torch.tensor([0.5]))
    for u in (1.0, -0.1, math.nan):
        with pytest.raises(AssertionError):
            sample(torch.tensor([0.5, 0.5]), torch.tensor(u))


# ---------------------------------------------------------------------------------------------------------------------
# 7. verify_tokens: limits


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_distributions_accept_everything(dtype):
    g = generator(8)
    R, G, V = 50, 6, 30
    p = torch.softmax(4 * torch.randn(R, G + 1, V, generator=g, dtype=dtype), -1)
    tokens = sample(p[:, :G], torch.rand(R, G, generator=g))
    u, largest = torch.rand(R, G + 1, generator=g, dtype=dtype), 1 - (2**-24 if dtype == torch.float32 else 2**-53)
    everything = torch.full((R,), G)
    for u in (u, torch.zeros_like(u), torch.full_like(u, largest)):
        result = verify_tokens(p.flatten(0, 1), p[:, :G], tokens, everything, u)
        assert same(result, everything, sample(p[:, G], u[:, G]))


def test_disjoint_supports_reject_everything():
    p_target, p_draft = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    for u in (0.0, 0.4, 0.6, 1 - 2**-24):
        u = torch.full((1, 3), u)
        args = (p_draft.expand(1, 2, 4), torch.tensor([[2, 3]]), torch.tensor([2]), u)
        assert same(verify_tokens(p_target.expand(3, 4), *args), torch.tensor([0]), sample(p_target[None], u[:, 2]))


def test_greedy_target_follows_the_argmax():
    """One-hot p_target under a soft drafter: passes iff it is the argmax, and the correction is the argmax."""
    best = torch.tensor([2, 0, 1])
    p_target = torch.nn.functional.one_hot(best, 4).float()
    for u in (0.0, 0.5, 1 - 2**-24):
        for tokens, n in (([2, 0], 2), ([2, 3], 1), ([1, 0], 0)):
            args = (torch.full((1, 2, 4), 0.25), torch.tensor([tokens]), torch.tensor([2]), torch.full((1, 3), u))
            assert same(verify_tokens(p_target, *args), torch.tensor([n]), best[n : n + 1])


def test_verify_len_zero_and_no_block_are_plain_decoding():
    g = generator(9)
    R, G, V = 40, 3, 12
    p_target = torch.softmax(torch.randn(R, V, generator=g), -1)
    p_draft = torch.softmax(torch.randn(R, G, V, generator=g), -1)
    u, none = torch.rand(R, G + 1, generator=g), torch.zeros(R, dtype=torch.long)
    tokens, plain = torch.randint(V, (R, G), generator=g), sample(p_target, u[:, G])
    assert same(verify_tokens(p_target, p_draft, tokens, none, u), none, plain)
    assert same(verify_tokens(p_target, p_draft[:, :0], tokens[:, :0], none, u[:, G:]), none, plain)  # G = 0


def test_a_token_outside_draft_ids_has_p_draft_zero():
    """No drafter draws it, but the rule is defined: accepted iff the target can produce it."""
    draft_ids, u = torch.tensor([1, 3]), torch.tensor([[0.9, 0.1]])
    p_target = torch.tensor([[0.1, 0.1, 0.0, 0.3, 0.5]]).expand(2, 5)
    for token, wanted in ((0, 1), (2, 0), (4, 1), (3, 0)):  # 3 is inside: 0.9 * 0.9 < 0.3 is false
        args = (torch.tensor([[[0.1, 0.9]]]), torch.tensor([[token]]), torch.tensor([1]), u, draft_ids)
        assert verify_tokens(p_target, *args).n_accepted.item() == wanted


def test_no_requests():
    empty = torch.zeros(0, dtype=torch.long)
    result = verify_tokens(torch.zeros(0, 5), torch.zeros(0, 3, 5), empty.reshape(0, 3), empty, torch.zeros(0, 4))
    assert result.n_accepted.shape == result.next_token.shape == (0,)


def test_zero_residual_falls_back_to_p_target():
    """p_draft sums to more than 1 by rounding and covers p_target everywhere: no residual is left after a rejection."""
    p_target = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], dtype=F64)
    p_draft = torch.tensor([[[1e-16, 0.5, 0.5]]], dtype=F64)
    result = verify_tokens(p_target, p_draft, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[0.5, 0.6]]))
    assert same(result, torch.tensor([0]), torch.tensor([2]))


def test_wrong_inputs_are_refused():
    def call(**changes):
        args = {"p_target": torch.full((3, 4), 0.25), "p_draft": torch.full((1, 2, 4), 0.25)}
        args |= {"tokens": torch.tensor([[0, 1]]), "verify_len": torch.tensor([2]), "u": torch.full((1, 3), 0.5)}
        return verify_tokens(**(args | changes))

    assert call().n_accepted.tolist() == [2]
    half = torch.full((1, 2, 2), 0.5)
    for changes, message in [
        ({"p_target": torch.full((2, 4), 0.25)}, "p_target has 2 rows"),
        ({"p_draft": half}, "p_draft is"),
        ({"u": torch.full((1, 2), 0.5)}, "u is"),
        ({"u": torch.ones(1, 3)}, "u must be"),
        ({"tokens": torch.tensor([[0, -1]])}, "tokens must be"),
        ({"tokens": torch.tensor([[0, 4]])}, "tokens must be"),
        ({"verify_len": torch.tensor([3])}, "verify_len must be"),
        ({"verify_len": torch.tensor([2, 0])}, "verify_len is"),
        ({"p_draft": half, "draft_ids": torch.tensor([1, 0])}, "draft_ids must be ascending"),
        ({"p_draft": half, "draft_ids": torch.tensor([0, 4])}, "draft_ids must be target ids"),
    ]:
        with pytest.raises(AssertionError, match=message):
            call(**changes)
    for name, shape in (("p_target", (3, 4)), ("p_draft", (1, 2, 4))):
        values = torch.full(shape, 0.25)
        values[..., -1] = math.nan
        with pytest.raises(ValueError, match="NaN"):
            call(**{name: values})


def test_docstrings():
    results = doctest.testmod(verify)
    assert results.attempted >= 9 and results.failed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature, top_k, top_p", [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 1.0), (0.3, 5, 1.0), (1.3, 0, 0.7), (0.9, 7, 0.35), (0, 3, 0.5)])
def test_numbers_and_tensors_of_settings_give_the_same_bits(dtype, temperature, top_k, top_p):
    """Numbers take a shorter way through logits_to_probs; a request's law must not depend on whether its neighbours agree with it."""
    logits = (torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    a = logits_to_probs(logits, temperature, top_k, top_p)
    full = lambda x, d: torch.full((3, 4), x, dtype=d)  # noqa: E731
    b = logits_to_probs(logits, full(temperature, torch.float64), full(top_k, torch.float64), full(top_p, torch.float64))
    assert a.dtype == b.dtype == dtype and torch.equal(a, b)
    assert torch.equal(logits_to_probs(logits[0, 0], temperature, top_k, top_p), a[0, 0])  # one row alone, without a batch dimension

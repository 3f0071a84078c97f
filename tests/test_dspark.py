"""
Tests of dspark.py: the engine and generate(). Run: python -m pytest tests/test_dspark.py (no weights needed but for the last)

Three kinds of actors:
  tiny_target, tiny_drafter   random models: the real code, float64, so that no near tie hides behind rounding. Bad drafts.
                              Untied: with its head tied to so few embeddings a random model repeats its last token for ever.
  ScriptedDrafter             proposes what it is told to, so that acceptance at every block offset is known beforehand.
  ScriptTarget                continues a given script, so that EOS and stop strings fall exactly where a test wants them.

The law of sampled output is compared with direct forwards of the target by a chi-square test that alarms falsely once in a
million; the same test must reject engines that are broken in known ways.
"""
import dataclasses
import math
from types import SimpleNamespace

import pytest
import tiktoken
import torch

import cli
import drafter as drafting
import dspark
import scheduler
import smollm2
from dspark import Engine, Result, Sampling, generate
from drafter import Draft, tiny_drafter
from target import tiny_target
from verify import logits_to_probs

V, G = 12, 4
PROMPTS = [[3], [5, 1, 7, 2, 2, 9], list(range(11)), [8, 8]]  # ragged on purpose
NEVER = -1  # an eos that no model draws

# SPS tables long enough for 8 requests of 1 + G rows: no cost at all, a cliff after n rows, steps of 3 and of 5 rows
N_MAX = 8 * (1 + G) + 1
FLAT = [math.nan] + [1.0] * N_MAX


def cliff(n):
    return [math.nan] + [1.0 if i <= n else 0.01 for i in range(1, N_MAX + 1)]


def stairs(width):
    return [math.nan] + [1 / (1 + 0.25 * ((i - 1) // width)) for i in range(1, N_MAX + 1)]


POLICIES = {
    "fixed": None,
    "threshold": lambda c: scheduler.threshold(c, 0.5),
    "flat": scheduler.scheduled(FLAT),
    "cliff 2": scheduler.scheduled(cliff(2)),
    "cliff 6": scheduler.scheduled(cliff(6)),
    "stairs 3": scheduler.scheduled(stairs(3)),
    "stairs 5, tempered": scheduler.scheduled(stairs(5), [0.5, 1.0, 2.0, 0.7]),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(V, seed=4, tied=False).double()


def lively(drafter, by=8.0):
    """A random confidence head says 0.5 to everything; this one has opinions, so that policies really cut."""
    drafter.confidence.weight.mul_(by)
    return drafter


def plain_loop(target, prompt, n, eos=NEVER):
    """The oracle: no cache, no batch, no drafter, nothing of dspark.py."""
    tokens = list(prompt)
    for _ in range(n):
        x = torch.tensor(tokens)
        logits, _ = target(x, torch.zeros_like(x), torch.arange(len(x)), target.new_cache(1, len(x)))
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


class Context(dict):
    """A scripted model's cache: slot -> positions whose features were handed over."""

    def clear(self, slot, end):
        self[slot] = []


class ScriptedDrafter:
    """Proposes scripts[slot], prompt and continuation, except at places where wrong(slot, place) says so.

    p_draft is one-hot, which is the truth about such a proposal, or with soft > 0 mixed with the uniform distribution (only
    the truth at temperature 0, where p_draft decides nothing). It also checks what the engine tells it.
    """

    feature_layers = (0, 1)

    def __init__(self, scripts, vocab, gamma=G, wrong=lambda slot, place: False, soft=0.0, confidence=lambda slot, place: 0.9):
        self.scripts, self.vocab, self.gamma = scripts, vocab, gamma
        self.wrong, self.soft, self.confidence = wrong, soft, confidence

    def new_cache(self, slots, max_len):
        return Context({slot: [] for slot in range(slots)})

    def extend(self, tokens, features, slots, positions, cache):
        assert len(features) == len(slots) == len(positions)
        for slot, place in zip(slots.tolist(), positions.tolist()):
            cache[slot].append(place)

    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        assert 1 <= gamma <= self.gamma and u.shape == (len(anchors), gamma)
        tokens, confidence = [], []
        for slot, place in zip(slots.tolist(), positions.tolist()):
            assert cache[slot] == list(range(place)), "the context is every committed token before the anchor, each once"
            script = self.scripts[slot]
            row = [script[place + k] if place + k < len(script) else 0 for k in range(1, gamma + 1)]
            tokens.append([(t + 1) % self.vocab if self.wrong(slot, place + k) else t for k, t in enumerate(row, 1)])
            confidence.append([self.confidence(slot, place + k) for k in range(1, gamma + 1)])
        tokens = torch.tensor(tokens)
        one_hot = torch.nn.functional.one_hot(tokens, self.vocab).double()
        p_draft = (1 - self.soft) * one_hot + self.soft / self.vocab
        return Draft(tokens, p_draft, torch.tensor(confidence), torch.arange(self.vocab))


class ScriptTarget:
    """Continues scripts[slot] for as long as it is fed that script; after any other token it says the last id."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, scripts, vocab, max_len=4096):
        self.scripts, self.config = scripts, SimpleNamespace(vocab_size=vocab, max_len=max_len, eos=(2,))

    def new_cache(self, slots, max_len):
        return Context()

    def __call__(self, tokens, slots, positions, cache, feature_layers=(), logit_rows=None):
        logits = torch.zeros(len(tokens), self.config.vocab_size)
        for row, (token, slot, place) in enumerate(zip(tokens.tolist(), slots.tolist(), positions.tolist())):
            script = self.scripts[slot]
            logits[row, script[place + 1] if place + 1 < len(script) and script[place] == token else -1] = 50.0
        return logits if logit_rows is None else logits[logit_rows], torch.zeros(len(tokens), 1)


class Wrapped:
    """A target that is watched: before(tokens, slots, positions) at every call, after(logits) may change what comes back."""

    def __init__(self, target, before=lambda *rows: None, after=lambda logits: logits):
        self.target, self.before, self.after = target, before, after

    def __getattr__(self, name):
        return getattr(self.target, name)

    def __call__(self, tokens, slots, positions, *rest, **named):
        self.before(tokens, slots, positions)
        logits, features = self.target(tokens, slots, positions, *rest, **named)
        return self.after(logits), features


def engine_of(target, drafter, prompts, sampling, gamma=None, policy=None, **kw):
    """generate() up to, but without, its loop; all that was submitted is in engine.waiting."""
    sampling = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    g = drafter.gamma if gamma is None else gamma
    max_len = max(len(p) + s.max_new_tokens for p, s in zip(prompts, sampling))
    engine = Engine(target, drafter, len(prompts), max_len, g, policy, **kw)
    for p, s in zip(prompts, sampling):
        engine.submit(p, s)
    return engine


def scripts_of(target, prompts, n):
    return [p + plain_loop(target, p, n) for p in prompts]


def greedy(n, **kw):
    return Sampling(max_new_tokens=n, **{"eos": NEVER} | kw)


# ---------------------------------------------------------------------------------------------------------------------
# greedy: whatever drafts and whatever cuts, the ids are those of plain decoding


@pytest.mark.parametrize("head", drafting.KINDS)
def test_greedy_is_plain_decoding_for_every_head_gamma_and_policy(target, head):
    n = 12
    wanted = [plain_loop(target, p, n) for p in PROMPTS]
    assert [r.ids for r in generate(target, None, PROMPTS, sampling=greedy(n))] == wanted
    drafter = lively(tiny_drafter(target, G, head, K=None if head in ("markov", "eagle") else 9))
    accepted, rejected, lengths = 0, 0, set()
    for gamma in range(1, G + 1):
        for name, policy in POLICIES.items():
            cycles = []
            results = generate(target, drafter, PROMPTS, sampling=greedy(n), gamma=gamma, policy=policy,
                               on_cycle=lambda r, c: c and cycles.append(c))
            assert [r.ids for r in results] == wanted, (gamma, name)
            accepted += sum(c.n_accepted for c in cycles)
            rejected += sum(c.n_accepted < c.verify_len for c in cycles)
            lengths |= {c.verify_len for c in cycles}
    assert accepted > 50 and rejected > 50 and lengths == set(range(G + 1))  # the inputs went everywhere


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_greedy_with_drafts_right_and_wrong_at_every_offset(target, soft):
    n = 24
    scripts = scripts_of(target, PROMPTS, n + G)
    wanted = [s[len(p) : len(p) + n] for s, p in zip(scripts, PROMPTS)]
    seen = set()  # (verify length, accepted)
    for period in range(1, 8):  # every period-th draft is wrong; 1: all of them
        drafter = ScriptedDrafter(scripts, V, wrong=lambda slot, place: (place + slot) % period == 0, soft=soft,
                                  confidence=lambda slot, place: (0.95, 0.2, 1.0, 0.7)[(place + 2 * slot) % 4])
        for policy in POLICIES.values():
            for gamma in (1, G):
                results = generate(target, drafter, PROMPTS, sampling=greedy(n), gamma=gamma, policy=policy,
                                   on_cycle=lambda r, c: c and seen.add((c.verify_len, c.n_accepted)))
                assert [r.ids for r in results] == wanted
    assert seen == {(l, a) for l in range(G + 1) for a in range(l + 1)}


def test_float32_greedy_is_plain_decoding():
    target = tiny_target(40, seed=2, tied=False)
    results = [generate(target, d, PROMPTS, sampling=greedy(20))
               for d in (None, tiny_drafter(target, 5, "gated"), ScriptedDrafter(scripts_of(target, PROMPTS, 26), 40, 5))]
    assert all([r.ids for r in rs] == [plain_loop(target, p, 20) for p in PROMPTS] for rs in results)


def test_no_drafter_and_gamma_zero_are_the_same_thing(target):
    drafter = tiny_drafter(target, G)
    for s in (greedy(10), greedy(10, temperature=1.0, seed=3)):
        plain, zero = generate(target, None, PROMPTS, sampling=s), generate(target, drafter, PROMPTS, sampling=s, gamma=0)
        for a, b in zip(plain, zero):
            a.ledger = b.ledger = {}
            assert a == b and a.origins == ["first"] + ["bonus"] * 9 and a.cycles == 9 and a.tau == 1


def test_a_long_prompt_is_run_in_pieces(target, monkeypatch):
    wanted = [r.ids for r in generate(target, tiny_drafter(target, G), PROMPTS, sampling=greedy(10, temperature=1.0))]
    monkeypatch.setattr(dspark, "PREFILL_ROWS", 3)
    rows = []
    watched = Wrapped(target, lambda tokens, slots, positions: rows.append(len(tokens)))
    assert [r.ids for r in generate(watched, tiny_drafter(target, G), PROMPTS, sampling=greedy(10, temperature=1.0))] == wanted
    assert rows[:8] == [1, 3, 3, 3, 3, 3, 2, 2]


# ---------------------------------------------------------------------------------------------------------------------
# the law of sampled output


LAW_V, LAW_G, LAW_N, CROWD = 5, 3, 3, 10_000
FALSE_ALARM = 1e-6  # per test. With 10,000 requests and 124 degrees of freedom a TV of 0.06 is all but certain to be seen


def exact_law(target, tokens, n, **settings):
    """Joint law (V**n,) of the n tokens after `tokens`, by direct forwards over every prefix, no cache kept."""
    law, prefixes = torch.ones(1, dtype=torch.float64), torch.zeros(1, 0, dtype=torch.long)
    for _ in range(n):
        rows = torch.cat([torch.tensor(tokens).expand(len(prefixes), -1), prefixes], 1)  # (S, L)
        S, L = rows.shape
        slots, places = torch.arange(S).repeat_interleave(L), torch.arange(L).repeat(S)
        logits, _ = target(rows.flatten(), slots, places, target.new_cache(S, L), logit_rows=torch.arange(1, S + 1) * L - 1)
        p = logits_to_probs(logits, **settings).double()
        law = (law[:, None] * p).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(p.shape[1], 0), torch.arange(p.shape[1]).repeat(S)[:, None]], 1)
    return law


def p_value(counts, law):
    """Chi-square test of counts (M,) against law (M,), cells that expect less than 10 pooled."""
    if counts[law == 0].sum() > 0:
        return 0.0  # what cannot be, was
    counts, expected = counts[law > 0].double(), law[law > 0] * counts.sum()
    small = expected < 10
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    x = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), x / 2))


def crowd(target, drafter, prompt, policy=None, seed=0, n=LAW_N, size=CROWD, mutate=None, **settings):
    """Many requests with one prompt and a seed each: how often every n tokens after the first came, and the cycles.

    One prefill serves all: its cache row is copied. The first token is the same for all; its law is tested with generate().
    """
    sampling = [Sampling(seed=seed * size + i, max_new_tokens=n + LAW_G + 2, eos=NEVER, **settings) for i in range(size)]
    cycles = []
    engine = engine_of(target, drafter, [prompt] * size, sampling, policy=policy, on_cycle=lambda r, c: c and cycles.append(c))
    if mutate:
        mutate(engine)
    everyone = list(engine.waiting)
    while engine.waiting:  # what join() does, but for the passes
        r = engine.waiting.popleft()
        r.slot = engine.free.pop(0)
        engine.joining.append(r)
    engine.prefill([(everyone[0], len(prompt))])
    everyone[0].result.ids[0] = 1
    for cache in (engine.cache, engine.draft_cache):
        for x in cache.k + cache.v if hasattr(cache, "k") else ():
            x[1:] = x[:1]
    for r in everyone[1:]:
        engine.joining.remove(r)
        engine.active.append(r)
        engine.cached[r.slot] = len(prompt)
        engine.deliver(r, [1], ["first"])
        if not hasattr(engine.draft_cache, "k"):
            engine.draft_cache[r.slot] += range(len(prompt))
    while engine.active:
        engine.step()
        for r in [r for r in engine.active if len(r.result.ids) > n]:
            engine.active.remove(r)
            engine.release(r)
    codes = torch.tensor([r.result.ids[1 : n + 1] for r in everyone]) @ torch.tensor([LAW_V**i for i in reversed(range(n))])
    return torch.bincount(codes, minlength=LAW_V**n), cycles


@pytest.fixture(scope="module")
def small():
    return tiny_target(LAW_V, seed=1, tied=False).double()


PAIR_SPS = [math.nan, 1.0] + [1 / (1 + 0.2 * n) for n in range(2 * LAW_G + 1)]  # every draft token costs a fifth of a plain step


def pairs(confidence):
    """Algorithm 1 in batches of two requests, as if each pair had the machine to itself: lengths 0..G all occur."""
    c = confidence.double().numpy()
    return [int(l) for i in range(0, len(c), 2) for l in scheduler.schedule(c[i : i + 2], PAIR_SPS)]


LAWS = [
    ("markov", None, None, dict(temperature=1.0)),
    ("none", 4, None, dict(temperature=0.7)),
    ("rnn", None, None, dict(temperature=1.0, top_k=3)),
    ("markov", None, pairs, dict(temperature=1.0)),
    ("gated", 3, pairs, dict(temperature=0.7, top_p=0.8)),
    ("eagle", 4, None, dict(temperature=1.0)),
    ("eagle", None, pairs, dict(temperature=0.7)),
    ("markov", None, POLICIES["threshold"], dict(temperature=1.0)),
    ("markov", 4, POLICIES["threshold"], dict(temperature=1.5, top_k=4, top_p=0.9)),
]


@pytest.mark.parametrize("head, K, policy, settings", LAWS)
def test_law(small, head, K, policy, settings):
    drafter = lively(tiny_drafter(small, LAW_G, head, K))
    counts, cycles = crowd(small, drafter, [3, 0, 2], policy, **settings)
    law = exact_law(small, [3, 0, 2, 1], LAW_N, **settings)
    assert p_value(counts, law) > FALSE_ALARM
    lengths = {c.verify_len for c in cycles}
    assert len(lengths) >= 3 if policy else lengths == {LAW_G}
    share = sum(c.n_accepted for c in cycles) / sum(c.verify_len for c in cycles)
    assert 0.1 < share < 0.9


def test_law_with_a_deterministic_draft(small):
    """A greedy draft under a sampled target is a one-hot p_draft."""
    script = [[3, 0, 2, 1, 4, 1, 0, 2, 2, 2, 2, 2]]
    drafter = ScriptedDrafter(script * CROWD, LAW_V, LAW_G)
    counts, _ = crowd(small, drafter, [3, 0, 2], temperature=1.0)
    assert p_value(counts, exact_law(small, [3, 0, 2, 1], LAW_N, temperature=1.0)) > FALSE_ALARM


def test_law_of_generate_from_its_first_token(small):
    size, drafter = 2500, tiny_drafter(small, LAW_G)
    sampling = [greedy(3, temperature=1.0, seed=i) for i in range(size)]
    results = generate(small, drafter, [[3, 0, 2]] * size, sampling=sampling)
    codes = torch.tensor([r.ids for r in results]) @ torch.tensor([25, 5, 1])
    assert p_value(torch.bincount(codes, minlength=125), exact_law(small, [3, 0, 2], 3, temperature=1.0)) > FALSE_ALARM


def peeking(engine):
    """A scheduler that sees the sampled tokens: verify the block iff x_1 is a 0."""
    engine.schedule = lambda draft: (LAW_G * (draft.tokens[:, 0] == 0)).tolist()


def without_early_stop(engine):
    """Appendix A: the best of all lengths. c_2 depends on x_1, so x_1 has a say in whether x_1 is verified."""
    sps = torch.tensor([1.0, 0.5, 0.45, 0.4])

    def policy(confidence):
        a = confidence.double().cumprod(1)
        theta = torch.cat([torch.ones(len(a), 1), 1 + a.cumsum(1)], 1) * sps
        return theta.argmax(1).numpy()

    engine.policy = policy


def another_temperature(engine):
    """p_draft recomputed at temperature 1.5, not what the tokens were drawn from."""
    propose = engine.drafter.propose

    def wrong(*args):
        draft = propose(*args)
        p = draft.p_draft ** (1 / 1.5)
        return dataclasses.replace(draft, p_draft=p / p.sum(-1, keepdim=True))

    engine.drafter = SimpleNamespace(propose=wrong, extend=engine.drafter.extend, feature_layers=engine.drafter.feature_layers)


def shared_uniforms(engine):
    """The uniforms that drew the draft tokens also judge them."""
    draft_of = engine.draft

    def draft(G):
        state = [r.random.get_state() for r in engine.active]
        u = torch.stack([torch.rand(LAW_G, generator=r.random, dtype=torch.float64) for r in engine.active])
        for r, s in zip(engine.active, state):
            r.random.set_state(s)
        out, rest = draft_of(G)
        return out, torch.cat([u, rest[:, -1:]], 1)

    engine.draft = draft


def confident_about_zero(drafter):
    """c_2 is near 1 after x_1 = 0 and near 0 after anything else: what makes a non-causal scheduler visible."""
    drafter.confidence.weight.zero_()
    first = drafter.head.W1.weight[:LAW_V]
    direction = torch.linalg.lstsq(first, torch.tensor([9.0, -9, -9, -9, -9], dtype=first.dtype)[:, None]).solution[:, 0]
    drafter.confidence.weight[0, -len(direction) :] = direction
    return drafter


@pytest.mark.parametrize("fault", [peeking, without_early_stop, another_temperature, shared_uniforms])
def test_the_test_of_the_law_rejects_broken_engines(small, fault):
    drafter = tiny_drafter(small, LAW_G)
    if fault is without_early_stop:
        drafter = confident_about_zero(drafter)
    counts, _ = crowd(small, drafter, [3, 0, 2], mutate=fault, temperature=1.0)
    assert p_value(counts, exact_law(small, [3, 0, 2, 1], LAW_N, temperature=1.0)) < FALSE_ALARM


def test_causal_scheduling_keeps_the_law_where_a_search_breaks_it(small):
    """The same confidences and a table on which Algorithm 1 does not stop at once."""
    drafter = confident_about_zero(tiny_drafter(small, LAW_G))
    counts, cycles = crowd(small, drafter, [3, 0, 2], pairs, temperature=1.0)
    assert p_value(counts, exact_law(small, [3, 0, 2, 1], LAW_N, temperature=1.0)) > FALSE_ALARM
    assert len({c.verify_len for c in cycles}) > 1


@pytest.mark.parametrize("policy", ["threshold", "stairs 3"])
def test_admission_of_a_token_cannot_depend_on_it(small, policy):
    """Change the uniforms of x_k and of all after it, in one request: whether x_k is verified must stay, in that cycle."""
    drafter = lively(tiny_drafter(small, LAW_G), 20)
    prompts = [[3, 0, 2], [1], [4, 4]]
    engine = engine_of(small, drafter, prompts, greedy(8, temperature=1.0), policy=POLICIES[policy])
    engine.join()
    rows = engine.rows([[r.tokens[-1]] for r in engine.active])
    g, moved, lengths = torch.Generator().manual_seed(0), 0, set()

    def lengths_for(u):
        draft = drafter.propose(*rows, engine.draft_cache, LAW_G, u, 1.0)
        return engine.schedule(draft), draft.tokens

    for _ in range(40):
        u = torch.rand(3, LAW_G, generator=g, dtype=torch.float64)
        before, tokens = lengths_for(u)
        lengths |= set(before)
        for r in range(3):
            for k in range(LAW_G):
                other = u.clone()
                other[r, k:] = torch.rand(LAW_G - k, generator=g, dtype=torch.float64)
                after, new_tokens = lengths_for(other)
                assert (before[r] > k) == (after[r] > k)
                moved += bool(after != before)
                assert (tokens[r, :k] == new_tokens[r, :k]).all()
    assert moved > 10 and len(lengths) > 2  # later tokens do move later admissions


def test_the_policy_is_given_confidences_and_nothing_else(target):
    seen = []

    def policy(*args, **kw):
        seen.append((args, kw))
        return scheduler.fixed(args[0], 2)

    drafter = tiny_drafter(target, G)
    generate(target, drafter, PROMPTS, sampling=greedy(6), policy=policy)
    assert all(len(a) == 1 and not kw and a[0].shape[1] == G and a[0].dtype == torch.float32 for a, kw in seen)


# ---------------------------------------------------------------------------------------------------------------------
# a batch is its requests


EIGHT = [[1], [2, 3], [4, 5, 6, 7, 8, 9, 10], [11] * 5, [0, 1, 0], [6, 6], [9, 8, 7, 6], [3]]


@pytest.mark.parametrize("policy", POLICIES)
def test_batch_equals_solo_at_temperature_zero(target, policy):
    drafter = lively(tiny_drafter(target, G))
    sampling = [greedy(4 + 3 * i) for i in range(8)]  # neighbours come to their end all along
    together = generate(target, drafter, EIGHT, sampling=sampling, policy=POLICIES[policy])
    for prompt, s, r in zip(EIGHT, sampling, together):
        [alone] = generate(target, drafter, [prompt], sampling=s, policy=POLICIES[policy])
        assert alone.ids == r.ids and len(r.ids) == s.max_new_tokens


@pytest.mark.parametrize("policy", ["fixed", "threshold"])  # Algorithm 1 lets the load decide, so its draws may differ
def test_batch_equals_solo_with_a_seed_each_and_mixed_settings(target, policy):
    drafter = lively(tiny_drafter(target, G, "rnn"))
    kinds = [dict(temperature=1.0), dict(), dict(temperature=0.7, top_k=4), dict(temperature=1.3, top_p=0.7)]
    sampling = [greedy(5 + 2 * i, seed=i, **kinds[i % 4]) for i in range(8)]
    together = generate(target, drafter, EIGHT, sampling=sampling, policy=POLICIES[policy])
    for prompt, s, r in zip(EIGHT, sampling, together):
        [alone] = generate(target, drafter, [prompt], sampling=s, policy=POLICIES[policy])
        assert alone.ids == r.ids and alone.verified_at == r.verified_at and alone.accepted_at == r.accepted_at
    other = generate(target, drafter, EIGHT, sampling=[dataclasses.replace(s, seed=s.seed + 100) for s in sampling])
    assert sum(a.ids != b.ids for a, b in zip(together, other)) >= 5  # the seed matters


def test_mixed_settings_do_not_lose_digits():
    """p = 0.7 - 5e-9 is below top_p = 0.7 but not below 0.7 rounded to float32: the second token must stay in the running."""
    class Coin(ScriptTarget):
        def __call__(self, tokens, slots, positions, cache, feature_layers=(), logit_rows=None):
            p = torch.tensor([0.7 - 5e-9, 0.3 + 5e-9], dtype=torch.float64).log().expand(len(tokens), 2)
            return p if logit_rows is None else p[logit_rows], torch.zeros(len(tokens), 1)

    nucleus = greedy(40, temperature=1.0, top_p=0.7, seed=1)
    [alone] = generate(Coin([[]], 2), None, [[0]], sampling=nucleus)
    mixed = generate(Coin([[], []], 2), None, [[0], [0]], sampling=[nucleus, greedy(40)])
    assert mixed[0].ids == alone.ids and sum(alone.ids) > 5


# ---------------------------------------------------------------------------------------------------------------------
# ends


def encoding_of(*pieces):
    """Every byte is a token (its value + 3), longer pieces follow from 259 on; 2 is EOS, as in the real vocabulary."""
    ranks = {bytes([b]): 3 + b for b in range(256)} | {piece: 259 + i for i, piece in enumerate(pieces)}
    return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2})


BYTES = encoding_of()


def scripted(ids, n, gamma=G, wrong=lambda slot, place: False, encoding=BYTES, vocab=300, policy=None, on_cycle=None, **kw):
    """[plain, speculative] results for a target that wants to say `ids` after a prompt of one token."""
    script = [[5] + list(ids) + [7] * (gamma + 2)]
    return [generate(ScriptTarget(script, vocab), d, [[5]], sampling=Sampling(max_new_tokens=n, **kw), encoding=encoding,
                     policy=policy, on_cycle=on_cycle if d else None)[0]
            for d in (None, ScriptedDrafter(script, vocab, gamma, wrong))]


def account_holds(r):
    own = [o for o in r.origins if o in ("correction", "bonus")]
    assert len(r.ids) == len(r.origins)
    assert r.origins[:1] == ["first"] * bool(r.ids) and "first" not in r.origins[1:]
    assert len(r.ids) == bool(r.ids) + sum(r.accepted_at) + len(own)
    assert r.origins.count("accepted") == sum(r.accepted_at)
    assert all(v >= a for v, a in zip(r.verified_at, r.accepted_at)) and all(v <= r.cycles for v in r.verified_at)
    assert all(x == sorted(x, reverse=True) for x in (r.verified_at, r.accepted_at))
    assert r.tau == (max(0, len(r.ids) - 1) / r.cycles if r.cycles else 0)


def same_end(plain, fast):
    assert (fast.ids, fast.text, fast.finish) == (plain.ids, plain.text, plain.finish)
    account_holds(plain), account_holds(fast)


@pytest.mark.parametrize("place", range(2 * G + 3))
def test_eos_ends_the_text_at_every_block_offset(place):
    ids = [100 + i for i in range(place)] + [2] + [50] * 20
    plain, fast = scripted(ids, 30)
    same_end(plain, fast)
    assert fast.ids == ids[: place + 1] and fast.finish == "eos"
    assert fast.text == BYTES.decode(ids[:place])
    # first at prefill, then blocks of G accepted and a bonus
    assert fast.origins[place] == ("first" if place == 0 else "bonus" if place % (G + 1) == 0 else "accepted")


def test_eos_may_be_a_correction():
    plain, fast = scripted([60, 61, 62, 2, 63], 30, wrong=lambda slot, place: place == 4)
    same_end(plain, fast)
    assert fast.ids == [60, 61, 62, 2] and fast.origins[-1] == "correction"


@pytest.mark.parametrize("offset", range(G))
def test_eos_drafted_but_rejected_ends_nothing(offset):
    """The wrong draft is script + 1: where the script says 1, the draft says 2, EOS."""
    ids = [100 + i for i in range(20)]
    ids[1 + offset] = 1
    drafts = []
    plain, fast = scripted(ids, 15, wrong=lambda slot, place: place == 2 + offset, on_cycle=lambda r, c: c and drafts.append(c.draft))
    assert drafts[0][offset] == 2
    same_end(plain, fast)
    assert fast.ids == ids[:15] and fast.finish == "length"
    # ... nor does one beyond the scheduled length, even if it is right
    ids[1 + offset] = 2
    _, cut = scripted(ids, 15, policy=lambda c: scheduler.fixed(c, offset))
    assert cut.ids == ids[: 2 + offset] and cut.finish == "eos" and cut.origins[-1] == "bonus"


@pytest.mark.parametrize("n", range(1, 2 * G + 5))
def test_max_new_tokens_is_exact_at_every_offset(target, n):
    scripts = scripts_of(target, PROMPTS, 40)
    for d in (None, ScriptedDrafter(scripts, V), tiny_drafter(target, G)):
        rows = []
        watched = Wrapped(target, lambda tokens, slots, positions: rows.append((slots, positions)))
        for p, s, r in zip(PROMPTS, scripts, generate(watched, d, PROMPTS, sampling=greedy(n))):
            assert r.ids == s[len(p) : len(p) + n] and r.finish == "length"
            account_holds(r)
        # nothing past the last token that can be delivered is ever run
        assert all(p < len(PROMPTS[s]) + n - 1 for slots, places in rows for s, p in zip(slots.tolist(), places.tolist()))
    assert generate(target, tiny_drafter(target, G), PROMPTS[:1], sampling=greedy(1))[0].cycles == 0


@pytest.mark.parametrize("wrong", [None, 3, 4])
@pytest.mark.parametrize("before", range(2 * G + 3))
def test_a_stop_string_ends_at_any_position_and_may_span_cycles(before, wrong):
    ids = BYTES.encode_ordinary("x" * before + "END" + "y" * 20)
    plain, fast = scripted(ids, 40, stop=("END",), wrong=lambda slot, place: bool(wrong) and place % wrong == 0)
    same_end(plain, fast)
    assert fast.text == "x" * before and fast.finish == "stop" and fast.ids == ids[:before]


@pytest.mark.parametrize("pieces, stop, text, kept", [
    (["ab", "cEN", "Dxx"], ("END",), "abc", 2),          # begins and ends within tokens: the token it begins in stays
    (["ab", "END", "x"], ("END",), "ab", 1),             # is one token: that token goes
    (["ab", "xENDy", "z"], ("END",), "abx", 2),
    (["aE", "EN", "D"], ("END",), "aE", 1),
    (["ab", "cd", "ef"], ("ef", "bc"), "a", 1),          # several: the first to be complete
    (["ab", "cd", "ef"], ("de", "cdef"), "ab", 1),       # two complete at once: the one that begins first
    (["a", "bcde", "f"], ("e", "bcd"), "a", 1),
    (["ab"], ("ab",), "", 0),                            # already the first token, drawn at prefill
    (["ba", "b"], ("a",), "b", 1),
    (["E", "N", "D", "END"], ("END",), "", 0),           # nothing is left of what earlier cycles delivered
    (["é", "日本", "🙂", "ende"], ("🙂",), "é日本", 2),
    (["日本語", "x"], ("本",), "日", 1),                  # inside a token of three characters
])
def test_stop_strings_in_tokens_of_several_characters(pieces, stop, text, kept):
    encoding = encoding_of(*dict.fromkeys(p.encode() for p in pieces if len(p.encode()) > 1))
    ids = [encoding.encode_single_token(p.encode()) for p in pieces]
    for gamma in (1, 2, G):
        for period in (1, 2, 3, 99):
            plain, fast = scripted(ids + [3 + ord("z")] * 9, 12, gamma, lambda slot, place: place % period == 0, encoding, stop=stop)
            same_end(plain, fast)
            assert (fast.text, fast.finish, len(fast.ids)) == (text, "stop", kept)
            assert encoding.decode(fast.ids).startswith(fast.text) and not any(s in fast.text for s in stop)


def test_a_stop_string_of_many_bytes_one_token_each():
    ids = BYTES.encode_ordinary("né 日本語. 🙂🙃 more")
    for stop, text in ((("🙃",), "né 日本語. 🙂"), (("語. ",), "né 日本"), (("é",), "n"), (("nö", "🙃", "本"), "né 日")):
        plain, fast = scripted(ids, 40, stop=stop)
        same_end(plain, fast)
        assert fast.text == text and BYTES.decode(fast.ids) == text


def test_stop_and_eos_and_length_meet():
    ids = BYTES.encode_ordinary("abc")
    assert scripted(ids + [2], 3, stop=("c",))[1].finish == "stop"  # complete with the last token allowed: it goes all the same
    assert scripted(ids, 3)[1].finish == "length"
    assert scripted(ids[:2] + [2], 3, stop=("c",))[1].finish == "eos"
    assert scripted(ids[:2] + [2], 3, stop=("<|im_end|>",))[1].finish == "eos"
    # within one block: what is complete first ends the text, whatever the same block brings after it
    for stop, text in ((("b",), "a"), (("abcdef", "cd"), "ab"), (("bcdef", "c", "ef"), "ab")):
        plain, fast = scripted(BYTES.encode_ordinary("abcdef") + [2], 30, 7, stop=stop)
        same_end(plain, fast)
        assert (fast.text, fast.finish) == (text, "stop")
    plain, fast = scripted(ids + [2], 4, 7, stop=("c",))
    same_end(plain, fast)
    assert (fast.text, fast.finish) == ("ab", "stop")


def test_without_an_encoding_there_is_no_text(target):
    assert generate(target, None, PROMPTS, sampling=greedy(3))[0].text == ""


# ---------------------------------------------------------------------------------------------------------------------
# counts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_account_of_a_run(target, policy, temperature):
    scripts = scripts_of(target, PROMPTS, 40)
    for drafter in (lively(tiny_drafter(target, G)), ScriptedDrafter(scripts, V, wrong=lambda slot, place: place % 3 == 0)):
        log, cycles, rows = {}, [], []
        watched = Wrapped(target, lambda tokens, slots, positions: rows.append((tokens.tolist(), slots.tolist(), positions.tolist())))

        def on_cycle(request, cycle):
            if cycle is None:  # after its prefill
                return
            log.setdefault(request.slot, []).append(cycle)
            cycles.append((request.slot, cycle, len(request.tokens) - len(cycle.delivered) - 1))

        engine = engine_of(watched, drafter, PROMPTS, greedy(17, temperature=temperature, seed=5), policy=POLICIES[policy],
                           on_cycle=on_cycle)
        results = [r.result for r in engine.waiting]
        engine.join()
        while engine.active:
            del rows[:], cycles[:]
            engine.step()
            # one target pass, of exactly the anchors and the scheduled draft tokens: what was cut is not run
            [(tokens, slots, places)] = rows
            wanted = [(t, slot, at + k) for slot, c, at in cycles for k, t in enumerate([c.anchor, *c.draft[: c.verify_len]])]
            assert list(zip(tokens, slots, places)) == wanted and len(tokens) == sum(1 + c.verify_len for _, c, _ in cycles)
        for slot, r in enumerate(results):
            account_holds(r)
            rest = log[slot]
            assert len(rest) == r.cycles
            assert r.ids == r.ids[:1] + sum((c.delivered for c in rest), []) and len(r.ids) == 17
            assert r.origins == ["first"] + sum((c.origins for c in rest), [])
            assert r.verified_at == [sum(c.verify_len > k for c in rest) for k in range(G)]
            assert r.accepted_at == [sum(c.origins[k : k + 1] == ["accepted"] for c in rest) for k in range(G)]
            for c in rest:
                assert c.delivered == (c.draft[: c.n_accepted] + [c.next_token])[: len(c.delivered)]
                own = "bonus" if c.n_accepted == c.verify_len else "correction"
                assert c.origins == (["accepted"] * c.n_accepted + [own])[: len(c.delivered)]
            # the mean of tau is one (the target's own token) plus the unconditional acceptance of each position
            assert abs(r.tau - (1 + sum(a / r.cycles for a in r.accepted_at))) < 1e-12 or r.origins[-1] == "accepted"


def test_the_ledger_has_all_phases(target):
    [r] = generate(target, tiny_drafter(target, G), [[1]], sampling=greedy(8))
    assert set(r.ledger) == {"prefill", "draft", "schedule", "verify", "commit"} and all(v > 0 for v in r.ledger.values())


# ---------------------------------------------------------------------------------------------------------------------
# caches


@pytest.mark.parametrize("policy", ["fixed", "threshold", "stairs 3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_caches_equal_a_fresh_forward_after_every_cycle(target, policy, temperature):
    drafter = lively(tiny_drafter(target, G))
    sampling = [greedy(6 + 3 * i, temperature=temperature, seed=i) for i in range(4)]
    engine = engine_of(target, drafter, PROMPTS, sampling, policy=POLICIES[policy])
    everyone = list(engine.waiting)
    while engine.busy:
        engine.step()
        for r in engine.active:
            n = engine.cached[r.slot]
            x, zeros, places = torch.tensor(r.tokens[:n]), torch.zeros(n, dtype=torch.long), torch.arange(n)
            cache, context = target.new_cache(1, n), drafter.new_cache(1, n)
            _, features = target(x, zeros, places, cache, drafter.feature_layers)
            drafter.extend(zeros, features, zeros, places, context)
            assert n == len(r.tokens) - 1
            for have, wanted in ((engine.cache, cache), (engine.draft_cache, context)):
                for a, b in zip(have.k + have.v, wanted.k + wanted.v):
                    assert (a[r.slot, :n] - b[0, :n]).abs().max() < 1e-10
    rejected = sum(sum(r.result.verified_at) - sum(r.result.accepted_at) for r in everyone)
    assert rejected > 0
    for x in [t for c in (engine.cache, engine.draft_cache) for t in c.k + c.v]:
        assert (x == 0).all()  # and they are left as they were found


# ---------------------------------------------------------------------------------------------------------------------
# what goes wrong


@pytest.mark.parametrize("call", [0, 1, 5, 6])
def test_nan_logits_are_an_error_at_once(target, call):
    calls = []

    def after(logits):
        calls.append(0)
        if len(calls) == call + 1:
            logits = logits.clone()
            logits[-1, 3] = math.nan
        return logits

    with pytest.raises(ValueError, match="NaN"):
        generate(Wrapped(target, after=after), tiny_drafter(target, G), PROMPTS, sampling=greedy(20, temperature=1.0))
    assert len(calls) == call + 1


@pytest.mark.parametrize("change", [
    dict(prompts=[[1], []]),
    dict(prompts=[[V]]), dict(prompts=[[-1]]),
    dict(sampling=Sampling(max_new_tokens=128)),
    dict(sampling=Sampling(max_new_tokens=0)), dict(sampling=Sampling(max_new_tokens=-3)),
    dict(gamma=G + 1), dict(gamma=-1), dict(drafter=None, gamma=2),
    *(dict(sampling=Sampling(temperature=t)) for t in (-0.1, math.nan, math.inf, 1e39)),
    dict(sampling=Sampling(top_k=-1)),
    *(dict(sampling=Sampling(top_p=p)) for p in (0.0, -0.5, 1.1, math.nan)),
    dict(sampling=Sampling(stop=("",)), encoding=BYTES), dict(sampling=Sampling(stop=("x",))),
    dict(sampling=[Sampling()]), dict(sampling=[]),
], ids=str)
def test_what_cannot_be_run_is_refused_in_one_line(target, change):
    run = []
    args = dict(prompts=[[1], [2]], drafter=tiny_drafter(target, G), sampling=greedy(4), gamma=None, encoding=None) | change
    with pytest.raises(ValueError) as error:
        generate(Wrapped(target, lambda *rows: run.append(1)), args.pop("drafter"), args.pop("prompts"), **args)
    assert "\n" not in str(error.value) and len(str(error.value)) > 10 and not run  # before anything runs


def test_what_is_on_the_edge_runs(target):
    drafter = tiny_drafter(target, G)
    assert generate(target, drafter, []) == []
    [r] = generate(target, drafter, [[1] * 100], sampling=greedy(28))  # 128 tokens: the context to its last place
    assert r.ids == plain_loop(target, [1] * 100, 28)
    for s in (greedy(6, temperature=1e-30), greedy(6, temperature=1.0, top_k=10**6), greedy(6, temperature=1.0, top_p=1e-9)):
        generate(target, drafter, PROMPTS, sampling=s)
    nearly = generate(target, drafter, PROMPTS, sampling=greedy(6, temperature=1.0, top_k=1))
    assert [r.ids for r in nearly] == [plain_loop(target, p, 6) for p in PROMPTS]  # top_k 1 is greedy


@pytest.mark.parametrize("calls", [1, 3, 4, 5, 9])
def test_an_interrupt_keeps_what_was_produced(calls):
    scripts = [[5] + BYTES.encode_ordinary("some text, and more of it, " * 3)] * 4
    seen = []

    def on_cycle(request, cycle):
        seen.append(request.slot)
        if len(seen) == calls:
            raise KeyboardInterrupt

    results = generate(ScriptTarget(scripts, 300), ScriptedDrafter(scripts, 300), [[5]] * 4, encoding=BYTES, on_cycle=on_cycle,
                       sampling=[Sampling(max_new_tokens=n) for n in (2, 30, 30, 30)])
    assert len(seen) == calls
    for i, (r, s) in enumerate(zip(results, scripts)):
        assert r.ids == s[1 : 1 + len(r.ids)] and r.text == BYTES.decode(r.ids) and len(r.ids) == len(r.origins)
        assert bool(r.ids) == (i in seen) and r.finish == ("length" if len(r.ids) == 2 else "cancelled")
        assert "draft" in r.ledger
        account_holds(r)


def test_seeds_repeat(target):
    drafter, s = tiny_drafter(target, G), greedy(12, temperature=1.0, seed=9)
    first, again = (generate(target, drafter, PROMPTS, sampling=s) for _ in range(2))
    assert [r.ids for r in first] == [r.ids for r in again]


# ---------------------------------------------------------------------------------------------------------------------
# the table of costs


def test_measure_costs_runs_exactly_what_it_records(target, monkeypatch):
    rows, drafted, stepped = [], [], []
    drafter = tiny_drafter(target, G)
    watched = Wrapped(target, lambda tokens, slots, positions: rows.append((slots.tolist(), positions.tolist())))
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda anchors, slots, positions, cache, gamma, *rest: drafted.append(
        (slots.tolist(), positions.tolist(), gamma)) or propose(anchors, slots, positions, cache, gamma, *rest))

    def profile(step, points):
        for point in points:
            step(*point)
            stepped.append(point[1:])
        return torch.ones(len(points)).numpy(), 0.0

    monkeypatch.setattr(scheduler, "profile", profile)
    verify, draft, _ = cli.measure_costs(watched, drafter, 5, G, context=20)
    wanted = cli.grid(5, G)
    assert {R for R, _ in wanted} == {1, 2, 4, 5} and {(R, l) for R in (1, 5) for l in (0, 1, 2, G)} <= set(wanted)
    assert stepped == wanted + [x for x in wanted if x[1]] and list(verify) == wanted and list(draft) == [x for x in wanted if x[1]]
    for (slots, positions), (R, l) in zip(rows, verify, strict=True):
        lengths = cli.spread(R, l, min(G, 2 * l + 1))
        assert sum(lengths) == R * l and slots == [s for s, n in enumerate(lengths) for _ in range(1 + n)]
        assert positions == [20 + k for n in lengths for k in range(1 + n)]
    assert drafted == [(list(range(R)), [20] * R, l) for R, l in draft]


def test_costs_are_measured_once_and_survive_a_broken_file(target, tmp_path, monkeypatch, capsys):
    measured, noise = [], 0.01

    def measure(target, drafter, slots, gamma, context):
        assert context in (256, 64)
        measured.append((slots, gamma))
        points = {x: 1.0 + len(measured) + x[0] * (1 + x[1]) for x in cli.grid(slots, gamma)}
        return points, {x: t / 10 for x, t in points.items() if x[1]}, noise

    monkeypatch.setattr(cli, "measure_costs", measure)
    path, drafter = tmp_path / "new" / "sps.json", tiny_drafter(target, G)
    first = cli.cached_costs(target, drafter, 3, G, path)
    assert first.verify.shape == first.draft.shape == (4, 1 + G) and (first.draft[1:, 0] == 0).all()
    again = cli.cached_costs(target, drafter, 3, G, path)
    assert (again.verify == first.verify).all() and (again.draft == first.draft).all() and measured == [(3, G)]
    cli.cached_costs(target, drafter, 2, G, path), cli.cached_costs(target, drafter, 3, 2, path)  # other slots, other block
    cli.cached_costs(target, tiny_drafter(target, G, "rnn"), 3, G, path)  # another model
    assert (cli.cached_costs(target, drafter, 3, G, path).verify == first.verify).all() and len(measured) == 4
    cli.cached_costs(target, drafter, 3, G, path, context=64)
    assert len(measured) == 5
    shown = []
    assert (cli.cached_costs(target, drafter, 3, G, path, again=True, show=lambda *x: shown.append(x)).verify != first.verify).any()
    assert len(shown) == 1 and list(shown[0][0]) == cli.grid(3, G)
    for broken in ("{", "[]", "null", path.read_text().replace("[1, 0, ", "[1, 0, -"), path.read_text().replace('"draft"', '"d"')):
        path.write_text(broken)
        before = len(measured)
        assert cli.cached_costs(target, drafter, 3, G, path).verify.shape == (4, 1 + G) and len(measured) == before + 1
    # nowhere to write: measured anew each time, no more
    (tmp_path / "file").write_text("")
    assert cli.cached_costs(target, drafter, 3, G, tmp_path / "file" / "sps.json").verify.shape == (4, 1 + G)
    # a noisy one is used, with a word about it, and not kept
    noise, before = 0.3, path.read_text()
    capsys.readouterr()
    cli.cached_costs(target, drafter, 3, G, path, again=True)
    assert "too busy" in capsys.readouterr().err and path.read_text() == before


# ---------------------------------------------------------------------------------------------------------------------
# the real model


def test_real_model_greedy_equals_plain(real):
    target, encoding = real
    weights = smollm2.Path(dspark.__file__).parent / "weights" / "dspark.safetensors"
    if weights.is_file():
        drafter = drafting.load(weights, target)
    else:  # untrained, but it starts as the target's last layers
        drafter = drafting.from_target(drafting.DrafterConfig(gamma=4), target, torch.arange(1024)).eval().requires_grad_(False)
    prompts = [smollm2.chat(encoding, p) for p in ("What is 2 + 2?", "Name three colours.")]
    s = Sampling(max_new_tokens=24)
    plain = generate(target, None, prompts, sampling=s, encoding=encoding)
    cycles = []
    fast = generate(target, drafter, prompts, sampling=s, encoding=encoding, on_cycle=lambda r, c: c and cycles.append(c))
    assert [(r.ids, r.text, r.finish) for r in fast] == [(r.ids, r.text, r.finish) for r in plain]
    assert any(c.n_accepted < c.verify_len for c in cycles)
    if weights.is_file():
        assert any(c.n_accepted for c in cycles)


def test_a_policy_must_return_verify_lengths(target):
    """R integers in 0..G, or a clear error: numpy would broadcast a list of one over the whole batch."""
    for lengths in ([1], [1, 1, 1], [1, G + 1], [1, -1], [1.0, 1.0], [[1, 1]], None):
        with pytest.raises(ValueError, match="the policy returned"):
            generate(target, tiny_drafter(target, G), PROMPTS[:2], policy=lambda c: lengths, max_new_tokens=4)


def test_settings_by_name(target):
    """Fields of Sampling, for all prompts alike, with a seed for each; numpy prompts are as good as lists."""
    import numpy as np

    same = [PROMPTS[0], PROMPTS[0]]
    a, b = generate(target, None, same, temperature=1.0, max_new_tokens=12, seed=3, eos=-1)
    assert a.ids != b.ids and len(a.ids) == 12
    solo = generate(target, None, [np.array(PROMPTS[0])], temperature=1.0, max_new_tokens=12, seed=4, eos=-1)[0]
    assert solo.ids == b.ids
    with pytest.raises(ValueError, match="not both"):
        generate(target, None, same, sampling=Sampling(), temperature=1.0)
    with pytest.raises(ValueError, match="tuple of strings"):
        generate(target, None, same, stop="END", max_new_tokens=4)

"""
Tests of continuous batching (dspark.Engine) and of the scheduling policies through the whole engine.
Run: python -m pytest tests/test_engine.py (no weights needed)

One oracle throughout: a request is what it is alone. generate() runs it by itself; here hundreds come and go, wait, are run in
pieces, cancelled, and follow each other into the same slots. All in float64, so that no near tie hides behind rounding.
"""
import math
import random

import numpy as np
import pytest
import torch

import scheduler
from drafter import tiny_drafter
from dspark import Engine, Sampling, generate
from target import tiny_target
from test_dspark import (BYTES, FALSE_ALARM, G, LAW_G, LAW_N, LAW_V, NEVER, V, Wrapped, account_holds, crowd, exact_law, greedy,
                         lively, p_value, plain_loop)


@pytest.fixture(scope="module")
def target():
    return tiny_target(V, seed=4, tied=False).double()


@pytest.fixture(scope="module")
def drafter(target):
    return lively(tiny_drafter(target, G))


def threshold(confidence):
    return scheduler.threshold(confidence, 0.5)


def drained(engine):
    """Nobody is left, and nothing of anybody: every slot free, every cache as it was made."""
    assert not engine.busy and sorted(engine.free) == list(range(len(engine.cached))) and not any(engine.cached)
    for cache in (engine.cache, engine.draft_cache):
        assert cache is None or all((x == 0).all() for x in cache.k + cache.v)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# coming and going


@pytest.mark.parametrize("policy", [None, threshold])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_that_come_and_go_equal_their_solo_runs(target, drafter, policy, temperature):
    prompts = [[(7 * i + j) % V for j in range(1 + 5 * i % 13)] for i in range(12)]
    sampling = [greedy(2 + 5 * i % 11, temperature=temperature, seed=i) for i in range(12)]
    engine = Engine(target, drafter, 3, 40, G, policy, prefill_rows=4)
    requests = []
    for prompt, s in zip(prompts, sampling):  # one arrives per step; three slots: most of them wait
        requests.append(engine.submit(prompt, s))
        engine.step()
    while engine.busy:
        engine.step()
    for prompt, s, r in zip(prompts, sampling, requests):
        [alone] = generate(target, drafter, [prompt], sampling=s, policy=policy)
        assert (r.result.ids, r.result.cycles, r.result.verified_at) == (alone.ids, alone.cycles, alone.verified_at)
        account_holds(r.result)
    assert drained(engine) and {r.slot for r in requests} == {0, 1, 2}


def test_a_long_prompt_does_not_stall_the_others(target, drafter):
    """Thirty rows of prompt, four a step: the request beside it gets a cycle in every one of those steps."""
    rows = []
    watched = Wrapped(target, lambda tokens, slots, positions: rows.append(slots.tolist()))
    engine = Engine(watched, drafter, 2, 80, G, prefill_rows=4)
    first = engine.submit([3], greedy(40))
    engine.step()
    second = engine.submit([i % V for i in range(30)], greedy(4))
    for _ in range(8):
        before, rows[:] = first.result.cycles, []
        engine.step()
        assert first.result.cycles == before + 1
        assert len(rows) == 2 and set(rows[0]) == {second.slot} and len(rows[0]) <= 4
    assert len(second.result.ids) >= 1
    whole = Engine(target, drafter, 2, 80, G)  # without a limit it is run at once
    whole.submit([i % V for i in range(30)], greedy(4))
    whole.step()
    assert whole.active[0].result.cycles == 1


def test_first_come_first_served_and_never_more_than_the_slots(target, drafter):
    engine = Engine(target, drafter, 2, 40, G)
    requests = [engine.submit([i], greedy(3 + i % 4)) for i in range(7)]
    order = []
    while engine.busy:
        engine.step()
        assert len(engine.active) <= 2
        order += [r for r in requests if r.slot is not None and r not in order]
    assert order == requests and drained(engine)


def test_a_cancelled_request_leaves_at_once_wherever_it_is(target, drafter):
    engine = Engine(target, drafter, 2, 60, G, prefill_rows=3)
    active, joining, waiting, last = (engine.submit([i] * n, greedy(30)) for i, n in enumerate((2, 20, 3, 3)))
    engine.step(), engine.step()
    assert active in engine.active and joining in engine.joining and waiting in engine.waiting
    said = list(active.result.ids)
    for r in (active, joining, waiting):
        engine.cancel(r)
        engine.cancel(r)  # twice is once
        assert r.result.finish == "cancelled"
    engine.assert_sound()
    assert engine.free == [0, 1] and active.result.ids == said and not joining.result.ids and not waiting.result.ids
    while engine.busy:
        engine.step()
    [alone] = generate(target, drafter, [last.prompt], sampling=last.sampling)
    assert last.result.ids == alone.ids and drained(engine)
    engine.cancel(last)
    assert last.result.finish == "length"  # what has ended stays as it ended


def test_cancelling_from_on_cycle(target, drafter):
    """A server learns from the tokens it streams that nobody listens any more."""
    def on_cycle(request, cycle):
        if len(request.result.ids) >= 5:
            for r in requests:
                engine.cancel(r)

    engine = Engine(target, drafter, 3, 60, G, on_cycle=on_cycle)
    requests = [engine.submit([i], greedy(40)) for i in range(4)]
    while engine.busy:
        engine.step()
    assert [r.result.finish for r in requests] == ["cancelled"] * 4 and drained(engine)


def test_what_cannot_be_run_is_refused_on_arrival(target, drafter):
    engine = Engine(target, drafter, 1, 20, G)
    for prompt, s in (([], greedy(3)), ([V], greedy(3)), ([1] * 15, greedy(6)), ([1], greedy(0)), ([1], greedy(3, stop=("x",)))):
        with pytest.raises(ValueError):
            engine.submit(prompt, s)
    assert not engine.busy
    engine.submit([1] * 15, greedy(5))  # to the last place
    while engine.busy:
        engine.step()
    assert drained(engine)


def test_the_engine_notices_a_broken_invariant(target, drafter):
    def leak(engine):
        engine.free.pop()

    def twice(engine):
        engine.free.append(engine.active[0].slot)

    def ahead(engine):
        engine.cached[engine.active[0].slot] += 1

    def dead(engine):
        engine.active[0].result.finish = "length"

    def disorder(engine):
        engine.active.reverse()

    def dirty(engine):
        engine.cached[engine.free[0]] = 3

    for fault in (leak, twice, ahead, dead, disorder, dirty):
        engine = Engine(target, drafter, 4, 40, G)
        for i in range(2):
            engine.submit([i], greedy(30))
        engine.step()
        fault(engine)
        with pytest.raises(AssertionError):
            engine.step()


# ---------------------------------------------------------------------------------------------------------------------
# slots have no memory


def poison(engine, slot):
    for cache in (engine.cache, engine.draft_cache):
        for x in cache.k + cache.v:
            x[slot] = math.nan


def fill(engine, drafter):
    """Two requests; the first leaves early, the second goes on; a third takes the first one's slot."""
    first, second = engine.submit([1, 2, 3, 4, 5, 6], greedy(4)), engine.submit([3], greedy(30))
    while not first.result.finish:
        engine.step()
    third = engine.submit([9, 8], greedy(10))
    return second, third


def test_nan_of_a_former_tenant_is_gone(target, drafter):
    """A tenant whose caches went bad is thrown out; the next one must not inherit it through masked attention."""
    for cleared in (True, False):
        engine = Engine(target, drafter, 2, 60, G)
        first, second = engine.submit([1, 2, 3, 4, 5, 6], greedy(20)), engine.submit([3], greedy(30))
        engine.step()
        # as far as a tenant writes: its tokens, and the last block's rejected tail
        for cache in (engine.cache, engine.draft_cache):
            for x in cache.k + cache.v:
                x[0, : engine.cached[0] + G + 1] = math.nan
        if not cleared:  # BROKEN: the slot is handed on as it is; rows beyond a length are "never seen", but they are multiplied
            engine.release = lambda r: (engine.cached.__setitem__(r.slot, 0), engine.free.append(r.slot))
        engine.cancel(first)
        third = engine.submit([9, 8], greedy(10))
        if not cleared:
            with pytest.raises(ValueError, match="NaN"):
                while engine.busy:
                    engine.step()
            continue
        while engine.busy:
            engine.step()
        for r in (second, third):
            [alone] = generate(target, drafter, [r.prompt], sampling=r.sampling)
            assert r.result.ids == alone.ids
        assert drained(engine)


def test_nan_in_an_empty_slot_between_two_requests_reaches_nobody(target, drafter):
    """The padded grid of attention covers every slot between the lowest and the highest, also one without a tenant."""
    engine = Engine(target, drafter, 3, 60, G)
    requests = [engine.submit([i, 5], greedy(n)) for i, n in enumerate((30, 3, 30))]
    while not requests[1].result.finish:
        engine.step()
    poison(engine, 1)
    while engine.busy:
        engine.step()
    for r in requests:
        assert r.result.ids == plain_loop(target, r.prompt, r.sampling.max_new_tokens)


def test_nothing_of_the_last_tenant_matters(target, drafter):
    """The same request after ten different predecessors, sampled: the same tokens and the same confidences, to the last bit."""
    seen = []
    for seed in range(10):
        log = []
        engine = Engine(target, drafter, 1, 60, G, threshold, on_cycle=lambda r, c: c and r is last and log.append(c))
        last = None
        before = engine.submit([(seed + j) % V for j in range(1 + 2 * seed)], greedy(3 + seed, temperature=1.0, seed=seed))
        while engine.busy:
            engine.step()
        last = engine.submit([4, 2], greedy(15, temperature=1.0, seed=77))
        while engine.busy:
            engine.step()
        seen.append((last.result.ids, [(c.draft, c.confidence, c.verify_len) for c in log]))
        assert before.slot == last.slot == 0
    assert all(s == seen[0] for s in seen)


# ---------------------------------------------------------------------------------------------------------------------
# five hundred requests


def random_request(rng):
    """Prompt and Sampling: lengths, temperatures, filters, seeds, ends of every kind."""
    prompt = [rng.randrange(V) for _ in range(rng.choice((1, 2, 3, 5, 8, 13, 30)))]
    kind = rng.choice((dict(), dict(temperature=1.0), dict(temperature=0.6, top_k=4), dict(temperature=1.4, top_p=0.8)))
    # ids 3 .. V - 1 are the bytes 0 .. V - 4 of the test encoding: short stop strings do occur
    stop = tuple(bytes(rng.randrange(V - 3) for _ in range(rng.choice((1, 2)))).decode() for _ in range(rng.choice((0, 0, 1, 2))))
    return prompt, Sampling(max_new_tokens=rng.choice((1, 2, 5, 9, 14)), seed=rng.randrange(2**40), stop=stop,
                            eos=rng.choice((NEVER, 2)), **kind)


def test_five_hundred_random_requests_equal_their_solo_runs(target, drafter):
    rng = random.Random(0)
    jobs = [random_request(rng) for _ in range(500)]
    alone = [generate(target, drafter, [p], sampling=s, policy=threshold, encoding=BYTES)[0] for p, s in jobs]
    order = list(range(500))
    rng.shuffle(order)
    engine = Engine(target, drafter, 8, 48, G, threshold, encoding=BYTES, prefill_rows=20)
    requests, unwanted, most = {}, {}, 0
    while order or engine.busy:
        for _ in range(min(len(order), rng.choice((0, 0, 1, 2, 6)))):
            i = order.pop()
            requests[i] = engine.submit(*jobs[i])
            if rng.random() < 0.15:  # the user will lose patience after so many tokens; some while they still wait
                unwanted[i] = rng.randrange(6)
        engine.step()  # asserts its invariants
        most = max(most, len(engine.active))
        for i in [i for i, n in unwanted.items() if len(requests[i].result.ids) >= n]:
            engine.cancel(requests[i])
            del unwanted[i]
    assert drained(engine) and len(requests) == 500 and most == 8
    finishes = {}
    for i, request in requests.items():
        r, wanted = request.result, alone[i]
        finishes[r.finish] = finishes.get(r.finish, 0) + 1
        if r.finish == "cancelled":
            assert r.ids == wanted.ids[: len(r.ids)] or wanted.finish == "stop"  # a stop would have taken some back
        else:
            assert (r.ids, r.text, r.finish, r.cycles, r.origins) == (wanted.ids, wanted.text, wanted.finish, wanted.cycles, wanted.origins)
        assert r.text == BYTES.decode([t for t in r.ids if t != request.sampling.eos]) or r.finish == "stop"
        account_holds(r)
    assert all(finishes[f] > 20 for f in ("eos", "stop", "length", "cancelled")), finishes


# ---------------------------------------------------------------------------------------------------------------------
# the law of the output, with policies that remember


def table(S, G, shape, draft=lambda R, l: 0.1 + 0.03 * R * l):
    points = [(R, l) for R in (1, 2, S) for l in range(G + 1)]
    return scheduler.costs_from({x: shape(*x) for x in points}, {x: draft(*x) for x in points if x[1]}, S, G)


def steep(R, l):
    """A draft token is worth verifying from a survival of about a half on."""
    return 1 + 0.3 * l


def cliff(R, l):
    return 1 + 0.8 * (l > 0) + 0.01 * R * l


class InPairs:
    """Each two neighbours in the batch have a policy of their own, as if the machine were theirs: what one token of one request
    can move is not lost among ten thousand."""

    def __init__(self, make):
        self.make, self.each = make, {}

    def parts(self, *arrays):
        for i in range(0, len(arrays[0]), 2):
            yield self.each.setdefault(i, self.make()), *(np.asarray(x[i : i + 2]) for x in arrays)

    def begin(self, R, G):
        for policy, pair in self.parts(np.zeros(R)):
            if hasattr(policy, "begin"):
                policy.begin(len(pair), G)
        return G

    def __call__(self, confidence):
        return np.concatenate([policy(c) for policy, c in self.parts(confidence)])

    def observe(self, confidence, verify_len, n_accepted):
        for policy, *finished in self.parts(confidence, verify_len, n_accepted):
            policy.observe(*finished)


class Restless(scheduler.Adaptive):
    """Adaptive that looks back a few blocks only and probes a lot: every block length occurs."""

    FIRST, LEAST, PRIOR, DECAY = (2, 1), 2, 1.0, 0.7


class SearchesNow(scheduler.Async):
    """BROKEN: the budget from the block it is for."""

    def __call__(self, confidence):
        R = len(confidence)
        self.budget = int(round(R * scheduler.search(scheduler.survival(confidence), R, self.costs.verify[R])[1][-1]))
        return super().__call__(confidence)


class ProbesByDraft(Restless):
    """BROKEN: a whole block is verified when this draft looks good to its end."""

    def __call__(self, confidence):
        a = scheduler.survival(confidence)
        return np.where(a[:, -1] > 0.3, a.shape[1], 0)


def opinionated(small):
    """c_1 is 0.6, whatever the anchor; c_2 is near 1 after x_1 = 0 and small after anything else."""
    drafter = tiny_drafter(small, LAW_G)
    confidence_logit = drafter.confidence_logit
    first = drafter.head.W1.weight[0]

    def logit(h, previous):
        c = torch.where((previous - first).abs().sum(-1) < 1e-9, 3.0, -2.0)  # (R, G)
        c[:, 0] = 0.4
        return c + 0.0 * confidence_logit(h, previous)

    drafter.confidence_logit = logit
    return drafter


@pytest.fixture(scope="module")
def small():
    return tiny_target(LAW_V, seed=1, tied=False).double()


SOME = 6000  # requests: few enough for a policy each, and the broken ones are still caught

LEARNERS = {
    "async": lambda: scheduler.Async(table(SOME, LAW_G, steep)),
    "adaptive": lambda: Restless(table(SOME, LAW_G, steep, lambda R, l: 0.02 * l), probing=0.2),
    "async in pairs": lambda: InPairs(lambda: scheduler.Async(table(2, LAW_G, cliff))),
    "adaptive in pairs": lambda: InPairs(lambda: Restless(table(2, LAW_G, steep))),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", LEARNERS)
def test_law_with_policies_that_remember(small, name, temperature):
    """Chi-square as in test_dspark.py: it alarms falsely once in a million."""
    counts, cycles = crowd(small, opinionated(small), [3, 0, 2], LEARNERS[name](), seed=3, size=SOME, temperature=temperature)
    assert p_value(counts, exact_law(small, [3, 0, 2, 1], LAW_N, temperature=temperature)) > FALSE_ALARM
    assert len({c.verify_len for c in cycles}) >= 3, {c.verify_len for c in cycles}
    assert sum(c.n_accepted for c in cycles) > SOME / 10


@pytest.mark.parametrize("broken", [lambda: SearchesNow(table(2, LAW_G, cliff)), lambda: ProbesByDraft(table(2, LAW_G, steep))])
def test_the_law_is_lost_where_the_present_decides(small, broken):
    counts, _ = crowd(small, opinionated(small), [3, 0, 2], InPairs(broken), seed=3, size=SOME, temperature=1.0)
    assert p_value(counts, exact_law(small, [3, 0, 2, 1], LAW_N, temperature=1.0)) < FALSE_ALARM


# ---------------------------------------------------------------------------------------------------------------------
# policies that remember, in the engine


def mixed(small_or_target, drafter, policy, n=12, temperature=1.0, on_cycle=None):
    engine = Engine(small_or_target, drafter, 4, 40, G, policy, on_cycle=on_cycle, prefill_rows=6)
    requests = [engine.submit([(3 * i + j) % V for j in range(1 + i % 5)], greedy(6 + i, temperature=temperature, seed=i)) for i in range(n)]
    while engine.busy:
        engine.step()
    assert drained(engine)
    return requests


class Alternating:
    """Cycles with and without a draft, and of every length, come one after the other."""

    def __init__(self):
        self.lengths, self.told = [], []

    def begin(self, R, G):
        self.lengths.append((2 * len(self.lengths)) % (G + 1) if len(self.lengths) % 3 else 0)
        return self.lengths[-1]

    def __call__(self, confidence):
        assert confidence.shape[1] == self.lengths[-1] > 0
        return scheduler.threshold(confidence, 0.3)

    def observe(self, confidence, verify_len, n_accepted):
        assert confidence.shape == (len(verify_len), self.lengths[-1]) and (n_accepted <= verify_len).all()
        self.told.append((len(verify_len), int(n_accepted.sum())))


def test_cycles_without_a_draft_leave_no_gap_in_the_context(target, drafter):
    """After every cycle, drafted or not, both caches equal those of a fresh forward over the committed tokens."""
    policy = Alternating()
    engine = Engine(target, drafter, 3, 40, G, policy)
    for i in range(5):
        engine.submit([i, 3, 1], greedy(8 + 3 * i, temperature=1.0, seed=i))
    while engine.busy:
        engine.step()
        for r in engine.active:
            n = engine.cached[r.slot]
            x, zeros, places = torch.tensor(r.tokens[:n]), torch.zeros(n, dtype=torch.long), torch.arange(n)
            cache, context = target.new_cache(1, n), drafter.new_cache(1, n)
            _, features = target(x, zeros, places, cache, drafter.feature_layers)
            drafter.extend(x, features, zeros, places, context)
            for have, wanted in ((engine.cache, cache), (engine.draft_cache, context)):
                for a, b in zip(have.k + have.v, wanted.k + wanted.v):
                    assert (a[r.slot, :n] - b[0, :n]).abs().max() < 1e-10
    assert {0, 1, 2, G} <= set(policy.lengths)
    assert len(policy.told) == len(policy.lengths) and sum(n for _, n in policy.told) > 0


@pytest.mark.parametrize("make", [lambda: scheduler.Async(table(8, G, steep)), lambda: Restless(table(8, G, steep)), Alternating])
def test_greedy_output_is_plain_decoding_under_policies_that_remember(target, drafter, make):
    lengths = set()
    requests = mixed(target, drafter, make(), temperature=0.0, on_cycle=lambda r, c: c and lengths.add((len(c.draft), c.verify_len)))
    for r in requests:
        assert r.result.ids == plain_loop(target, r.prompt, r.sampling.max_new_tokens)
        account_holds(r.result)
    assert len(lengths) >= 4, lengths


def test_a_block_length_out_of_range_is_an_error(target, drafter):
    for wrong in (-1, G + 1):
        policy = Alternating()
        policy.begin = lambda R, G, wrong=wrong: wrong
        with pytest.raises(ValueError, match="asked for a block"):
            mixed(target, drafter, policy)


def test_begin_hears_of_nothing_but_the_past(target, drafter):
    """In every cycle, whatever the draft of that cycle: begin comes before propose, observe after the target, and begin's answer
    is a function of what observe was told before."""
    events = []

    class Watching(scheduler.Adaptive):
        def begin(self, R, G):
            events.append("begin")
            return super().begin(R, G)

        def __call__(self, confidence):
            events.append("policy")
            return super().__call__(confidence)

        def observe(self, *finished):
            events.append("observe")
            super().observe(*finished)

    proposing = Watched(drafter, lambda: events.append("propose"))
    watched = Wrapped(target, lambda tokens, slots, positions: events.append("target"))
    engine = Engine(watched, proposing, 2, 40, G, Watching(table(2, G, steep)))
    for i in range(2):
        engine.submit([i], greedy(12, temperature=1.0, seed=i))
    while engine.busy:
        engine.step()
    drafted = "begin propose policy target observe".split()
    rest = events[2:]  # two prefills
    while rest:
        kind = drafted if rest[1] == "propose" else ["begin", "target", "observe"]
        assert rest[: len(kind)] == kind
        rest = rest[len(kind) :]


class Watched:
    """A drafter that tells when it proposes."""

    def __init__(self, drafter, tell):
        self.drafter, self.tell = drafter, tell

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, *args):
        self.tell()
        return self.drafter.propose(*args)

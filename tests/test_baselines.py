"""
Tests of baselines.py. The law of the output with an Eagle drafter is in test_dspark.py, its gradients in test_train.py; here: that
Eagle is the chain its docstring says, in decoding and in training, and that prompt lookup copies what it should.
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import scheduler
from baselines import CopyFirst, Eagle, PromptLookup, count_chances
from drafter import DrafterConfig, tiny_drafter
from dspark import Sampling, generate
from target import tiny_target
from verify import logits_to_probs

V, D = 64, 32
EXACT = 1e-12  # float64 on both sides


def rand(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def target():
    return tiny_target(V, tied=False).double()


@pytest.fixture(scope="module")
def eagle(target):
    drafter = tiny_drafter(target, gamma=4, head="eagle")
    for p in drafter.parameters():
        p.mul_(2)  # livelier than the initial one
    return drafter


def states(target, tokens):
    """Features (n, m * D) of a text by a plain forward."""
    n = len(tokens)
    return target(tokens, torch.zeros(n, dtype=torch.long), torch.arange(n), target.new_cache(1, n), (0, 1))[1]


def chain(eagle, tokens, features, anchor, drafted, keep=True):
    """The drafter's own definition, whole and uncached: hidden states (G, D) before each of the draft tokens.

    Every row of the text and of the draft goes through the layer by dense causal attention, from the embedded token and the
    state of the row before: fused features for the text, the layer's output for the draft. keep=False: a wrong variant whose
    draft rows read fused features of a zero vector instead of their own states.
    """
    layer, out = eagle.layers[0], []
    fused = [*eagle.context(features)]
    before = [torch.zeros(D, dtype=torch.float64), *fused]  # before[t]: state of t - 1
    ids = [*tokens.tolist(), anchor, *drafted]
    for k in range(len(drafted)):
        n = len(tokens) + 1 + k  # rows so far; the last is the newest
        x = torch.stack([eagle.row(torch.tensor(ids[t]), before[t]) for t in range(n)])
        cos, sin = eagle.rotation(torch.arange(n))
        q, key, value = layer.attn.project(layer.attn_norm(x), cos, sin)  # (n, H or J, d)
        H, J = q.shape[1], key.shape[1]
        mixed = []
        for h in range(H):
            weight = torch.softmax(key[:, h * J // H] @ q[-1, h] / q.shape[-1] ** 0.5, 0)
            mixed.append(weight @ value[:, h * J // H])
        y = x[-1] + layer.attn.out(torch.cat(mixed))
        y = y + layer.mlp(layer.mlp_norm(y))
        before.append(y if keep else torch.zeros_like(y))
        out.append(eagle.norm(y))
    return torch.stack(out)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_draft_is_the_chain_of_its_definition(target, eagle, n):
    tokens = torch.arange(5, 5 + n)
    features = states(target, tokens)
    cache, first = eagle.new_cache(3, 30), n // 2  # in two pieces, in a slot that is not the first
    cache.state.fill_(7.0)  # a former tenant's state must not matter
    for part in (slice(0, first), slice(first, n)):
        rows = torch.arange(n)[part]
        if len(rows):
            eagle.extend(tokens[part], features[part], torch.full_like(rows, 1), rows, cache)
    draft = eagle.propose(torch.tensor([20]), torch.tensor([1]), torch.tensor([n]), cache, 4, rand(1, 4), 1.0)
    h = chain(eagle, tokens, features, 20, draft.tokens[0].tolist())
    p = logits_to_probs(h @ eagle.head_rows.T, 1.0)
    assert (draft.p_draft[0] - p).abs().max() < EXACT
    c = torch.sigmoid(h @ eagle.confidence.weight[0] + eagle.confidence.bias)
    assert (draft.confidence[0] - c).abs().max() < 1e-6  # confidences are float32
    wrong = chain(eagle, tokens, features, 20, draft.tokens[0].tolist(), keep=False)
    assert (draft.p_draft[0] - logits_to_probs(wrong @ eagle.head_rows.T, 1.0)).abs().max() > 1e-3


def test_several_slots_are_extended_in_one_call(target, eagle):
    texts = [torch.arange(3, 8), torch.arange(30, 32), torch.arange(40, 49)]
    together, apart = eagle.new_cache(3, 20), eagle.new_cache(3, 20)
    features, cuts = [states(target, t) for t in texts], [(0, 3), (0, 1), (0, 9)]
    for _ in range(2):  # first pieces, then the rest, which the third slot has none of
        live = [s for s, (a, b) in enumerate(cuts) if b > a]
        rows = [torch.arange(*cuts[s]) for s in live]
        eagle.extend(torch.cat([texts[s][r] for s, r in zip(live, rows)]), torch.cat([features[s][r] for s, r in zip(live, rows)]),
                     torch.cat([torch.full_like(r, s) for s, r in zip(live, rows)]), torch.cat(rows), together)
        for s, r in zip(live, rows):
            eagle.extend(texts[s][r], features[s][r], torch.full_like(r, s), r, apart)
        cuts = [(b, len(t)) for (_, b), t in zip(cuts, texts)]
    assert torch.allclose(together.state, apart.state, atol=EXACT) and together.state.abs().sum() > 0
    assert all(torch.allclose(a, b, atol=EXACT) for a, b in zip(together.k + together.v, apart.k + apart.v))


def test_training_runs_the_chain_that_decoding_runs(target, eagle):
    """Teacher-forced block states from forward() equal the chain along the same tokens, for every anchor at once."""
    tokens = torch.randint(V, (2, 14), generator=torch.Generator().manual_seed(1))
    features = torch.stack([states(target, t) for t in tokens])
    anchors = torch.tensor([[1, 4, 9], [2, 3, 8]])
    h, code, previous = eagle(features, tokens, anchors)
    assert h.shape == (2, 3, 4, D) and code.shape == previous.shape == (2, 3, 4, 0)
    for b in range(2):
        for i, a in enumerate(anchors[b].tolist()):
            wanted = chain(eagle, tokens[b, :a], features[b, :a], tokens[b, a].item(), tokens[b, a + 1 : a + 5].tolist())
            assert (h[b, i] - wanted).abs().max() < EXACT


def test_eagle_has_one_layer(target):
    with pytest.raises(AssertionError, match="one layer"):
        Eagle(DrafterConfig(4, 2, (0, 1), "eagle"), target, torch.arange(V))


# ---------------------------------------------------------------------------------------------------------------------
# prompt lookup


@pytest.mark.parametrize("text, G, matched, copied", [
    ([1, 2, 3, 4, 5, 2, 3], 3, 2, [4, 5, 2]),        # the longest match that has been seen
    ([9, 3, 7, 1, 3, 8, 2, 3], 1, 1, [8]),           # of one token: the latest place
    ([1, 2, 3, 8, 7, 2, 3, 9, 1, 2, 3], 2, 3, [8, 7]),  # a longer match wins over a later one
    ([5, 6, 5, 6, 5], 4, 3, [6, 5, 6, 5]),           # overlapping: what repeats goes on repeating
    ([4, 4], 3, 1, [4, 4, 4]),
    ([1, 2, 3], 2, 0, [3, 3]),                       # nothing to copy
    ([7], 2, 0, [7, 7]),
])
def test_what_is_copied(text, G, matched, copied):
    lookup = PromptLookup(G)
    cache = lookup.new_cache(1, len(text))
    lookup.extend(torch.tensor(text[:-1]), None, torch.zeros(len(text) - 1, dtype=torch.long), torch.arange(len(text) - 1), cache)
    assert lookup.follow(cache, 0, text[-1], G) == (matched, copied)


def test_prompt_lookup_through_the_engine(target):
    """Greedy ids are plain decoding's; a prompt that repeats is copied from; slots may be refilled."""
    prompts = [[1, 2, 3, 4] * 4, [7, 8, 9], [5, 5, 5]]
    sampling = [Sampling(0.0, max_new_tokens=40, eos=-1)] * 3
    plain, cycles = generate(target, None, prompts, sampling=sampling), []
    fast = generate(target, PromptLookup(5), prompts, sampling=sampling, on_cycle=lambda r, c: c and cycles.append(c))
    assert [r.ids for r in fast] == [r.ids for r in plain]
    assert any(c.n_accepted for c in cycles) and any(c.n_accepted < c.verify_len for c in cycles)
    drafter, ids = PromptLookup(3), torch.tensor([1, 2, 1])
    cache = drafter.new_cache(1, 10)
    for _ in range(2):  # the second text is not appended to the first
        drafter.extend(ids, None, torch.zeros(3, dtype=torch.long), torch.arange(3), cache)
    assert cache.text == [[1, 2, 1]]


def test_prompt_lookup_keeps_the_law():
    """One-hot p_draft under a sampled target: the law of the token after the first, by 20,000 seeds; false alarm 1 in 10,000."""
    small, n = tiny_target(6, seed=1, tied=False).double(), 20000
    prompt = [3, 0, 2, 3, 0, 2, 3]
    sampling = [Sampling(1.0, seed=i, max_new_tokens=3, eos=-1) for i in range(n)]
    results = generate(small, PromptLookup(2), [prompt] * n, sampling=sampling)
    pairs = torch.tensor([r.ids[0] * 6 + r.ids[1] for r in results]).bincount(minlength=36)
    slots = torch.arange(6).repeat_interleave(8)
    rows = torch.cat([torch.tensor(prompt).expand(6, 7), torch.arange(6)[:, None]], 1)  # the prompt and each possible first token
    logits, _ = small(rows.flatten(), slots, torch.arange(8).repeat(6), small.new_cache(6, 8))
    p = logits_to_probs(logits.view(6, 8, 6), 1.0)
    law = (p[0, 6][:, None] * p[:, 7]).flatten()
    x = ((pairs - n * law) ** 2 / (n * law)).sum()
    assert (law * n).min() > 5, "cells too small for the test"
    assert torch.special.gammaincc(torch.tensor(35 / 2, dtype=torch.float64), x / 2) > 1e-4
    assert sum(r.accepted_at[0] for r in results) > 100


# ---------------------------------------------------------------------------------------------------------------------
# copying first


def copy_first(target, gamma=4, least=0.55, **kw):
    drafter = CopyFirst(tiny_drafter(target, gamma=gamma, K=20, **kw))
    drafter.least = least
    return drafter


def test_copies_where_the_text_repeats_and_asks_the_network_elsewhere(target):
    """Request 0 repeats four tokens, request 1 repeats nothing: the first block is copied, the second is the network's, with its p_draft."""
    drafter = copy_first(target)
    prompts = [[1, 2, 3, 4] * 4 + [1], [7, 8, 9, 10]]
    cache, alone = drafter.new_cache(2, 40), drafter.network.new_cache(2, 40)
    rows = [(t, s, i) for s, p in enumerate(prompts) for i, t in enumerate(p[:-1])]
    tokens, slots, positions = torch.tensor(rows).T
    features = target(tokens, slots, positions, target.new_cache(2, 40), drafter.feature_layers)[1]
    for d, c in ((drafter, cache), (drafter.network, alone)):
        d.extend(tokens, features, slots, positions, c)
    anchors, at, where = torch.tensor([1, 10]), torch.tensor([0, 1]), torch.tensor([16, 3])
    u = torch.rand(2, 4, dtype=torch.float64)
    draft = drafter.propose(anchors, at, where, cache, 4, u, 0.7)
    wanted = drafter.network.propose(anchors[1:], at[1:], where[1:], alone, 4, u[1:], 0.7)
    assert draft.tokens[0].tolist() == [2, 3, 4, 1] and draft.tokens[1].tolist() == wanted.tokens[0].tolist()
    assert (draft.draft_ids[1:] > draft.draft_ids[:-1]).all()
    full = torch.zeros(2, 4, V, dtype=draft.p_draft.dtype).index_copy(2, draft.draft_ids, draft.p_draft)
    theirs = torch.zeros(1, 4, V, dtype=wanted.p_draft.dtype).index_copy(2, wanted.draft_ids, wanted.p_draft)
    assert torch.equal(full[1], theirs[0].float().to(full.dtype))
    assert full[0].argmax(-1).tolist() == [2, 3, 4, 1] and (full[0].sum(-1) == 1).all() and (full[0].amax(-1) == 1).all()
    assert torch.equal(draft.confidence[1], wanted.confidence[0].float())
    both = PromptLookup.chance[:, 12]  # a match of 12 tokens and more
    assert (draft.confidence[0] - (0.3 * both[0] + 0.7 * both[1])).abs().max() < 1e-6


@pytest.mark.parametrize("policy", [None, lambda c: np.full(len(c), 2)])
def test_copying_first_changes_no_greedy_token_and_leaves_no_gap(target, policy):
    """Ids are plain decoding's; both kinds of draft occur; and the network's context ends as if it had drafted all along."""
    prompts = [[1, 2, 3, 4] * 4, [7, 8, 9], [5, 5, 5], [11, 3, 60, 2]]
    sampling = [Sampling(0.0, max_new_tokens=40, eos=-1)] * len(prompts)
    plain, cycles = generate(target, None, prompts, sampling=sampling), []
    drafter, kept = copy_first(target), []
    new_cache = drafter.new_cache

    def spy(slots, max_len):
        kept.append(new_cache(slots, max_len))
        kept[-1].clear = lambda *a: None  # to look at it when all is over
        return kept[-1]

    drafter.new_cache = spy
    asked = []
    propose = drafter.network.propose
    drafter.network.propose = lambda anchors, *a: asked.append(len(anchors)) or propose(anchors, *a)
    fast = generate(target, drafter, prompts, sampling=sampling, policy=policy, on_cycle=lambda r, c: c and cycles.append(c))
    assert [r.ids for r in fast] == [r.ids for r in plain]
    assert 0 < sum(asked) < len(cycles), "some blocks are the network's and some are copies"
    whole, rows = drafter.network.new_cache(len(prompts), 80), []
    for slot, (p, r) in enumerate(zip(prompts, plain)):
        rows += [(t, slot, i) for i, t in enumerate(p + r.ids[:-1])]
    tokens, slots, positions = torch.tensor(rows).T
    features = target(tokens, slots, positions, target.new_cache(len(prompts), 80), drafter.feature_layers)[1]
    drafter.network.extend(tokens, features, slots, positions, whole)
    for slot, (p, r) in enumerate(zip(prompts, plain)):
        n = len(p + r.ids) - 8  # what was delivered for certain: the last cycle may have won more than was wanted
        assert kept[0].lookup.text[slot][:n] == (p + r.ids)[:n]
        for a, b in zip(kept[0].network.k + kept[0].network.v, whole.k + whole.v):
            assert (a[slot, :n] - b[slot, :n]).abs().max() < EXACT


def test_copying_first_keeps_the_law():
    """The law of the second and third token at temperature 1 where blocks are copies, networks' or cut, by 10,000 seeds; false alarm 1 in 10,000."""
    small, n = tiny_target(6, seed=1, tied=False).double(), 10000
    drafter = CopyFirst(tiny_drafter(small, gamma=2, K=5))
    drafter.least = 0.2  # matches of two tokens and more: the prompt's end is one, most first tokens end it
    prompt = [3, 0, 2, 3, 0, 2, 3]
    sampling = [Sampling(1.0, seed=i, max_new_tokens=3, eos=-1) for i in range(n)]
    asked, propose = [], drafter.network.propose
    drafter.network.propose = lambda anchors, *a: asked.append(len(anchors)) or propose(anchors, *a)
    results = generate(small, drafter, [prompt] * n, sampling=sampling)
    assert n / 10 < sum(asked) < 1.9 * n
    pairs = torch.tensor([r.ids[0] * 6 + r.ids[1] for r in results]).bincount(minlength=36)
    slots = torch.arange(6).repeat_interleave(8)
    rows = torch.cat([torch.tensor(prompt).expand(6, 7), torch.arange(6)[:, None]], 1)
    logits, _ = small(rows.flatten(), slots, torch.arange(8).repeat(6), small.new_cache(6, 8))
    p = logits_to_probs(logits.view(6, 8, 6), 1.0)
    law = (p[0, 6][:, None] * p[:, 7]).flatten()
    order = law.argsort()
    rare, rest = order.tensor_split([int((n * law[order].cumsum(0) < 20).sum()) + 1])  # too few for the test: together, one cell
    pairs, law = torch.cat([pairs[rest], pairs[rare].sum()[None]]), torch.cat([law[rest], law[rare].sum()[None]])
    x = ((pairs - n * law) ** 2 / (n * law)).sum()
    assert (n * law).min() > 5 and torch.special.gammaincc(torch.tensor((len(law) - 1) / 2, dtype=torch.float64), x / 2) > 1e-4


def test_the_networks_confidence_is_calibrated_by_the_nearest_temperature(target):
    network = tiny_drafter(target, gamma=3, K=20)
    drafter = CopyFirst(network, {0.0: np.array([2.0, 2.0, 2.0]), 1.0: np.array([0.5, 1.0, 4.0])})
    c = torch.tensor([[0.9, 0.6, 0.2], [0.9, 0.6, 0.2]])
    got = drafter.calibrated(c, torch.tensor([0.2, 0.8]))
    assert np.allclose(got[0], scheduler.apply_sts(c[0], np.array([2.0, 2.0, 2.0])), atol=1e-6)
    assert np.allclose(got[1], scheduler.apply_sts(c[1], np.array([0.5, 1.0, 4.0])), atol=1e-6)
    assert torch.equal(drafter.calibrated(c, 0.0), drafter.calibrated(c, torch.zeros(2)))


def test_chances_are_counted_in_answers_alone():
    """Two texts of which one repeats: after matches of 1 and 2 tokens every copy is right; prompts are not counted."""
    text = torch.tensor([1, 2, 3, 1, 2, 3, 1, 2, 9])
    d = [SimpleNamespace(ids=text, answer=3, temperature=0.0), SimpleNamespace(ids=text, answer=3, temperature=1.0)]
    counted = count_chances(d, 0.0)
    # places 3..7: matches of 1, 2, 3, 4, 5 tokens; the last goes on with 9, where 3 was copied
    assert counted[:7] == [0, 1, 1, 1, 1, 0, 0]

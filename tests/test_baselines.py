"""
Tests of baselines.py. The law of the output with an Eagle drafter is in test_dspark.py, its gradients in test_train.py; here: that
Eagle is the chain its docstring says, in decoding and in training, and that prompt lookup copies what it should.
"""
import pytest
import torch

from baselines import Eagle, PromptLookup
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
    assert PromptLookup(G).follow(text, G) == (matched, copied)


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

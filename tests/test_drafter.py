"""
Tests of drafter.py. No weights needed. Run: python -m pytest tests/test_drafter.py

The oracle. Eq. 2 to 7 written out below for one anchor, position by position and head by head, in float64 and with none of
the drafter's own code: no cache, no packing, no mask, no shared rotation. The drafter has two forms, propose() with a cache and
forward() for training, and both must equal it; everything else here is about what packing and cycles could spoil.

Tolerances. float64 throughout: 1e-10 where two orders of summation are compared, bit equality where a value must not be looked
at at all. Confidence is handed over in float32, so there it is one float32 step below 1: 1.2e-7. A broken variant must miss the
oracle by GAP = 1e-3 of probability, seven orders above the tolerance.
"""
import json
import struct
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import drafter as drafting
from drafter import HEADS, Drafter, DrafterConfig, tiny_drafter
from target import tiny_target
from verify import sample

EXACT, F32_STEP, GAP = 1e-10, 1.2e-7, 1e-3
V, D, RANK = 64, 32, 8


def make(head="markov", K=None, gamma=3, max_len=128, seed=3, anchor_state=False, **kw):
    """A float64 target and a random two-layer drafter (one layer would hide what crosses layers) with every weight random."""
    target = tiny_target(max_len=max_len, **kw).double()
    torch.manual_seed(seed)
    ids = torch.randperm(V)[:K].sort().values if K else torch.arange(V)
    drafter = Drafter(DrafterConfig(gamma, n_layers=2, feature_layers=(0, 1), head=head, rank=RANK, anchor_state=anchor_state), target, ids)
    drafter = drafter.double().eval().requires_grad_(False)
    for name, p in drafter.named_parameters():
        if name.endswith("norm.weight"):  # norms start at one, where forgetting their weight would not show
            p.add_(0.5 * torch.randn_like(p))
    drafter.norm.weight.mul_(0.06)  # the tiny target's head is sharp: without this p_draft is all but one-hot
    return target, drafter


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rand(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def features_of(n, seed=0):
    return randn(n, 2 * D, seed=seed)


def fill(drafter, cache, slot, features, start=0):
    """Add features (n, m * D) to the slot's context at positions start, start + 1, .."""
    n = len(features)
    if n:
        drafter.extend(torch.zeros(n, dtype=torch.long), features, torch.full((n,), slot), torch.arange(start, start + n), cache)


def solo(drafter, features, anchor, u, temperature=1.0, **kw):
    """One request alone, in a fresh cache: the proposal after all of features."""
    cache = drafter.new_cache(1, max(1, len(features) + 1))
    fill(drafter, cache, 0, features)
    return drafter.propose(torch.tensor([anchor]), torch.tensor([0]), torch.tensor([len(features)]), cache, u.shape[1], u,
                           temperature, **kw)


def gap(a, b):
    return (a - b).abs().max().item()


# ---------------------------------------------------------------------------------------------------------------------
# the oracle


def rms(x, norm):
    return x / (x.pow(2).mean() + norm.eps).sqrt() * norm.weight


def turn(x, position, base):
    """RoPE of one head's vector: the pair (i, i + h/2) turns by position * base^(-2i/h). The table keeps float32 phases."""
    half = len(x) // 2
    angle = torch.tensor([position * base ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64)
    c, s = angle.cos().float().double(), angle.sin().float().double()
    a, b = x[:half], x[half:]
    return torch.cat([a * c - b * s, b * c + a * s])


def oracle_block(drafter, features, anchor, G, *, first=None, causal=False, own_context=None, norm_context=False):
    """Hidden states (G, D) of one block after features (n, m * D); the keywords break it on purpose.

    first: position of slot 0, rightly n.  causal: slots see only slots before them.  own_context: a feature of the anchor
    itself, rightly absent.  norm_context: the layer's input norm applied to H_ctx as well, which Eq. 3 does not.
    """
    t, n = drafter.target_config, len(features)
    H, Hkv, h = t.n_heads, t.n_kv_heads, t.head_dim
    seen = features if own_context is None else torch.cat([features, own_context])
    context = [rms(drafter.context_proj.weight @ f, drafter.context_norm) for f in seen]  # Eq. 2
    place = [(n if first is None else first) + j for j in range(G)]
    x = [drafter.embed[anchor]] + [drafter.mask] * (G - 1)
    if drafter.config.anchor_state:
        state = rms(context[-1] if context else torch.zeros(D, dtype=torch.float64), drafter.state_norm)
        x = [drafter.join.weight @ torch.cat([rms(v, drafter.token_norm), state]) for v in x]
    for layer in drafter.layers:
        W_q, W_k, W_v = layer.attn.qkv.weight.split([H * h, Hkv * h, Hkv * h])
        norm_q = (lambda v: rms(v, layer.attn.q_norm)) if t.qk_norm else (lambda v: v)
        norm_k = (lambda v: rms(v, layer.attn.k_norm)) if t.qk_norm else (lambda v: v)
        y = [rms(v, layer.attn_norm) for v in x]
        # Eq. 3: keys and values are [W H_ctx ; W H_block], the same W for both
        below = [rms(c, layer.attn_norm) if norm_context else c for c in context]
        sources = [(c, i) for i, c in enumerate(below)] + list(zip(y, place))
        keys = [[turn(norm_k((W_k @ s)[i * h : (i + 1) * h]), p, t.rope_base) for s, p in sources] for i in range(Hkv)]
        values = [[(W_v @ s)[i * h : (i + 1) * h] for s, _ in sources] for i in range(Hkv)]
        for j in range(G):
            mixed = []
            last = len(context) + (j + 1 if causal else G)
            for i in range(H):
                q = turn(norm_q((W_q @ y[j])[i * h : (i + 1) * h]), place[j], t.rope_base)
                g = i * Hkv // H
                k, v = torch.stack(keys[g][:last]), torch.stack(values[g][:last])
                mixed.append(torch.softmax(k @ q / h**0.5, dim=0) @ v)
            x[j] = x[j] + layer.attn.out.weight @ torch.cat(mixed)
        for j in range(G):
            gate, up = (layer.mlp.gate_up.weight @ rms(x[j], layer.mlp_norm)).chunk(2)
            x[j] = x[j] + layer.mlp.down.weight @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([rms(v, drafter.norm) for v in x])


def oracle_head(drafter, h, anchor, tokens, *, see_own=False):
    """(logits (G, K), confidence (G)) of one block along the given tokens. see_own: x_k in the place of x_{k-1}, a leak."""
    kind, head, K = drafter.config.head, drafter.head, len(drafter.draft_ids)
    W1, W2, r = head.W1.weight, head.W2.weight, drafter.config.rank
    row = {int(t): i for i, t in enumerate(drafter.draft_ids)}
    logits, confidence, s = [], [], torch.zeros(r, dtype=torch.float64)
    for k in range(len(h)):
        before = tokens[k] if see_own else anchor if k == 0 else tokens[k - 1]
        e = W1[row.get(int(before), K)]  # ids that are never drafted share the last row
        if kind == "none":
            e, code = torch.zeros(r, dtype=torch.float64), torch.zeros(r, dtype=torch.float64)
        elif kind == "markov":  # Eq. 5
            code = e
        elif kind == "gated":
            code = e * torch.sigmoid(head.gate.weight @ torch.cat([h[k], e]) + head.gate.bias)
        else:  # Eq. 6
            z = torch.cat([s, e, h[k]])
            W_g, W_c, W_o = head.joint.weight.chunk(3)
            b_g, b_c, b_o = head.joint.bias.chunk(3)
            gate = torch.sigmoid(W_g @ z + b_g)
            code, s = torch.tanh(W_o @ z + b_o), gate * s + (1 - gate) * torch.tanh(W_c @ z + b_c)
        logits.append(drafter.head_rows @ h[k] + W2 @ code)
        confidence.append(torch.sigmoid(drafter.confidence.weight[0] @ torch.cat([h[k], e]) + drafter.confidence.bias[0]))  # Eq. 7
    return torch.stack(logits), torch.stack(confidence)


def oracle(drafter, features, anchor, tokens, see_own=False, **broken):
    """-> p_draft (G, K) and confidence (G) at temperature 1 along the tokens."""
    h = oracle_block(drafter, features, anchor, len(tokens), **broken)
    logits, confidence = oracle_head(drafter, h, anchor, tokens, see_own=see_own)
    return torch.softmax(logits, dim=-1), confidence


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("qk_norm, anchor_state", [(False, False), (True, False), (False, True)])
def test_proposal_equals_the_oracle(head, qk_norm, anchor_state):
    _, drafter = make(head, K=40, qk_norm=qk_norm, anchor_state=anchor_state)
    for n in (0, 1, 9):  # an empty context too: a block that only sees itself
        features, u = features_of(n, seed=n), rand(1, 3, seed=n)
        draft = solo(drafter, features, 5, u)
        p, c = oracle(drafter, features, 5, draft.tokens[0])
        assert gap(draft.p_draft[0], p) < EXACT
        assert gap(draft.confidence[0].double(), c) < F32_STEP


BROKEN = {
    "causal inside the block": dict(causal=True),
    "the anchor's own feature in the context": dict(own_context=features_of(1, seed=99)),
    "block one position late": dict(first=10),
    "block one position early": dict(first=8),
    "context normed again by the layer": dict(norm_context=True),
    "head sees x_k": dict(see_own=True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_noticed(name):
    _, drafter = make("markov", K=40)
    features = features_of(9)
    draft = solo(drafter, features, 5, rand(1, 3))
    assert gap(draft.p_draft[0], oracle(drafter, features, 5, draft.tokens[0])[0]) < EXACT
    assert gap(draft.p_draft[0], oracle(drafter, features, 5, draft.tokens[0], **BROKEN[name])[0]) > GAP


# ---------------------------------------------------------------------------------------------------------------------
# training form and decoding form


def teacher_forced(drafter, features, tokens, anchors):
    h, code, previous = drafter(features, tokens, anchors)
    logits = h @ drafter.head_rows.T + drafter.head.W2(code)
    return logits.softmax(-1), drafter.confidence_logit(h, previous).sigmoid(), h


def test_the_anchors_state_is_the_one_before_it():
    """anchor_state in training: every block of forward() has the state of its own anchor's predecessor, as decoding leaves it in the
    cache, whatever the slot and however its context came in; with any other state the block differs."""
    _, drafter = make("markov", K=40, anchor_state=True)
    features, tokens, anchors = randn(2, 16, 2 * D), randint(V, 2, 16), torch.tensor([[1, 4, 11], [2, 5, 9]])
    _, _, h = teacher_forced(drafter, features, tokens, anchors)
    for b in range(2):
        for i, a in enumerate(anchors[b].tolist()):
            cache = drafter.new_cache(3, 16)
            cache.state.fill_(9.0)  # what a former tenant left
            fill(drafter, cache, 0, features[1 - b, :3])  # a neighbour
            fill(drafter, cache, 2, features[b, : a // 2])
            fill(drafter, cache, 2, features[b, a // 2 : a], a // 2)
            where = torch.stack([tokens[b, a], torch.tensor(2), torch.tensor(a)])[:, None]
            assert gap(drafter.block(*where, cache, 3)[0], h[b, i]) < EXACT
            cache.state[2] = drafter.context(features[b, a])  # the anchor's own, which does not exist yet
            assert gap(drafter.block(*where, cache, 3)[0], h[b, i]) > 1e-3


@pytest.mark.parametrize("head", HEADS)
def test_teacher_forced_equals_the_sampled_path(head):
    """Three dialogues of unequal length, three blocks in each. The sampled tokens are written into the dialogue where they
    would stand, then one teacher-forced pass must give every block's probabilities and confidences again."""
    _, drafter = make(head, K=40)
    lengths, anchors = [20, 14, 23], torch.tensor([[0, 7, 15], [1, 5, 9], [4, 10, 18]])
    B, A, G, L = 3, 3, 3, 23
    features, tokens = randn(B, L, 2 * D), randint(V, B, L)
    cache, slots = drafter.new_cache(7, L), torch.tensor([1, 2, 5])
    p, c, hidden = torch.zeros(B, A, G, 40, dtype=torch.float64), torch.zeros(B, A, G), torch.zeros(B, A, G, D, dtype=torch.float64)
    for b in range(B):
        fill(drafter, cache, int(slots[b]), features[b, : lengths[b]])
    for a in reversed(range(A)):  # last block first: a block's scratch would spoil the cached context of a later one
        x0 = tokens[torch.arange(B), anchors[:, a]]
        draft = drafter.propose(x0, slots, anchors[:, a], cache, G, rand(B, G, seed=a), 1.0)
        hidden[:, a] = drafter.block(x0, slots, anchors[:, a], cache, G)
        p[:, a], c[:, a] = draft.p_draft, draft.confidence
        for b in range(B):
            tokens[b, anchors[b, a] + 1 : anchors[b, a] + 1 + G] = draft.tokens[b]
    p_forced, c_forced, h = teacher_forced(drafter, features, tokens, anchors)
    assert gap(p_forced, p) < EXACT and gap(h, hidden) < EXACT
    assert gap(c_forced, c.double()) < F32_STEP
    # teeth: other previous tokens give other rows, for every head that has any
    other, _, _ = teacher_forced(drafter, features, (tokens + 1) % V, anchors)
    same_anchor = tokens.clone()
    same_anchor[torch.arange(B)[:, None, None], anchors[:, :, None] + torch.arange(1, 3)] += 1
    later, _, _ = teacher_forced(drafter, features, same_anchor % V, anchors)
    assert gap(other, p) > GAP
    assert gap(later[:, :, 0], p[:, :, 0]) < EXACT
    assert (gap(later, p) > GAP) == (head != "none")


def test_forward_sees_exactly_what_lies_before_each_anchor():
    """By derivative, which is exactly zero where nothing is looked at. Anchors unsorted, one twice, one without a context."""
    _, drafter = make()
    features, tokens = randn(2, 12, 2 * D).requires_grad_(), randint(V, 2, 12)
    anchors = torch.tensor([[8, 3, 3, 0], [11, 1, 6, 2]])
    h, _, _ = drafter(features, tokens, anchors)
    for b in range(2):
        for a in range(4):
            for k in range(3):
                grad = torch.autograd.grad((h[b, a, k] * randn(D)).sum(), features, retain_graph=True)[0]
                touched = grad.abs().sum(-1) > 0
                expected = torch.zeros(2, 12, dtype=torch.bool)
                expected[b, : anchors[b, a]] = True
                assert torch.equal(touched, expected), f"dialogue {b}, anchor {anchors[b, a]}, slot {k}"


def test_blocks_of_different_anchors_do_not_see_each_other():
    _, drafter = make("rnn")
    features, tokens, anchors = randn(2, 12, 2 * D), randint(V, 2, 12), torch.tensor([[2, 4, 4, 9], [3, 5, 6, 8]])
    together = drafter(features, tokens, anchors)
    for a in range(4):
        alone = drafter(features, tokens, anchors[:, a : a + 1])
        for x, y in zip(together, alone):
            assert gap(x[:, a], y[:, 0]) < 1e-12
    # and what stands at one anchor moves its own block alone
    moved = tokens.clone()
    moved[0, 9] += 1
    change = (drafter(features, moved % V, anchors)[0] - together[0]).abs().amax((2, 3))
    assert change[0, 3] > GAP and change.flatten().sort().values[-2] == 0


def test_padding_of_a_ragged_batch_is_never_looked_at():
    _, drafter = make("gated")
    features, tokens, anchors = randn(2, 14, 2 * D), randint(V, 2, 14), torch.tensor([[3, 6], [5, 9]])
    before = drafter(features, tokens, anchors)
    features[0, 9:], tokens[0, 9:] = 1e6, 7  # dialogue 0 ends at 9, its last block needs tokens up to 6 + 2
    assert all(torch.equal(x, y) for x, y in zip(before, drafter(features, tokens, anchors)))


# ---------------------------------------------------------------------------------------------------------------------
# the draft cache


def test_cached_context_is_strictly_before_the_anchor():
    """The cache is filled beyond the anchor, as it is after a rejection; nothing from the anchor on may be seen."""
    _, drafter = make()
    n, at, u = 12, torch.tensor([7]), rand(1, 3)
    features = features_of(n)

    def proposal(features):
        cache = drafter.new_cache(1, n)
        fill(drafter, cache, 0, features)
        return drafter.propose(torch.tensor([5]), torch.tensor([0]), at, cache, 3, u, 1.0)

    plain = proposal(features)
    for j in range(n):
        changed = features.clone()
        changed[j] += 1
        other = proposal(changed)
        if j >= 7:
            assert torch.equal(other.p_draft, plain.p_draft) and torch.equal(other.confidence, plain.confidence)
        else:
            assert gap(other.p_draft, plain.p_draft) > 1e-6, f"position {j} is context"


def test_many_cycles_leave_the_cache_as_if_filled_once():
    """40 cycles of propose and extend with random accept counts, in slots 0, 2, 3, 6 of 8, requests leaving on the way.

    After each cycle the context equals a fresh one's, and so do the proposals: no scratch of a block, of this cycle or an
    older one, ever counts. Packed proposals equal solo ones. Slots in between are never written.
    """
    _, drafter = make("rnn", K=40)
    G, slots, ends = 3, [0, 2, 3, 6], [100, 30, 100, 60]
    streams = {s: features_of(110, seed=s) for s in slots}
    cache, rng = drafter.new_cache(8, 110), torch.Generator().manual_seed(0)
    at = dict(zip(slots, [5, 1, 17, 9]))  # anchors; ragged from the start
    for s in slots:
        fill(drafter, cache, s, streams[s][: at[s]])
    accepted_counts = set()
    for cycle in range(40):
        live = [s for s, end in zip(slots, ends) if at[s] < end]
        if not live:
            break
        u = torch.rand(len(live), G, generator=rng, dtype=torch.float64)
        anchors = torch.randint(V, (len(live),), generator=rng)
        gamma = G if cycle % 4 else 2  # an engine may shorten its blocks
        where = torch.tensor([at[s] for s in live])
        draft = drafter.propose(anchors, torch.tensor(live), where, cache, gamma, u[:, :gamma], 1.0)
        for i, s in enumerate(live):
            alone = solo(drafter, streams[s][: at[s]], anchors[i], u[i : i + 1, :gamma])
            assert gap(draft.p_draft[i], alone.p_draft[0]) < EXACT and torch.equal(draft.tokens[i], alone.tokens[0])
            assert gap(draft.confidence[i], alone.confidence[0]) <= F32_STEP
        # the anchor and the accepted draft tokens join the context, packed raggedly in one extend
        n = torch.randint(1, gamma + 2, (len(live),), generator=rng).tolist()
        accepted_counts |= {x - 1 for x in n}
        rows = torch.cat([streams[s][at[s] : at[s] + x] for s, x in zip(live, n)])
        places = torch.cat([torch.arange(at[s], at[s] + x) for s, x in zip(live, n)])
        drafter.extend(torch.zeros(len(places), dtype=torch.long), rows, torch.tensor(live).repeat_interleave(torch.tensor(n)), places, cache)
        for s, x in zip(live, n):
            at[s] += x
    assert accepted_counts == {0, 1, 2, 3} and at[2] < 40 and at[0] > 60
    for s in slots:
        fresh = drafter.new_cache(1, 110)
        fill(drafter, fresh, 0, streams[s][: at[s]])
        for i in range(2):
            assert gap(cache.k[i][s, : at[s]], fresh.k[i][0, : at[s]]) < EXACT
            assert gap(cache.v[i][s, : at[s]], fresh.v[i][0, : at[s]]) < EXACT
    for s in (1, 4, 5, 7):
        assert all(x[s].abs().max() == 0 for x in cache.k + cache.v)


def test_scratch_in_the_context_would_be_noticed():
    """Teeth for the test above: a cycle that forgets to extend leaves block keys where context belongs."""
    _, drafter = make()
    features, cache = features_of(12), drafter.new_cache(1, 20)
    fill(drafter, cache, 0, features[:8])
    drafter.propose(torch.tensor([5]), torch.tensor([0]), torch.tensor([8]), cache, 3, rand(1, 3), 1.0)
    leaked = drafter.propose(torch.tensor([6]), torch.tensor([0]), torch.tensor([10]), cache, 3, rand(1, 3), 1.0)
    assert gap(leaked.p_draft, solo(drafter, features[:10], 6, rand(1, 3)).p_draft) > GAP


def test_extend_in_pieces_equals_extend_at_once():
    _, drafter = make()
    features, whole, pieces = features_of(20), drafter.new_cache(3, 20), drafter.new_cache(3, 20)
    fill(drafter, whole, 1, features)
    for i in range(0, 20, 3):
        fill(drafter, pieces, 1, features[i : i + 3], start=i)
    assert all(gap(a, b) < EXACT for a, b in zip(whole.k + whole.v, pieces.k + pieces.v))


def test_positions_are_the_true_ones_up_to_the_end_of_the_context():
    """The last anchor that fits (the last position of the model) and one near it; off by one must show there too.

    Only the place of the block relative to its context can show: RoPE cancels a shift of both (see the next test).
    """
    max_len = 300
    _, drafter = make(max_len=max_len)
    features = features_of(max_len - 1)
    for n in (max_len - 1, max_len - 7):
        draft = solo(drafter, features[:n], 9, rand(1, 3))
        assert gap(draft.p_draft[0], oracle(drafter, features[:n], 9, draft.tokens[0])[0]) < EXACT
    late = oracle(drafter, features[:n], 9, draft.tokens[0], first=n + 1)[0]
    assert gap(draft.p_draft[0], late) > GAP


def test_a_shift_of_context_and_block_together_changes_nothing():
    """RoPE is relative. The block shifted against its context is another thing, as the broken variants above show."""
    _, drafter = make()
    features, shift = features_of(9), 40
    cache = drafter.new_cache(1, 64)
    fill(drafter, cache, 0, features, start=shift)
    near = solo(drafter, features, 5, rand(1, 3))
    # hide the empty positions below: move the filled part down, as if the model counted from 40
    for kv in cache.k + cache.v:
        kv[0, :9] = kv[0, shift : shift + 9].clone()
    drafter.cos, drafter.sin = drafter.cos[shift:], drafter.sin[shift:]
    far = drafter.propose(torch.tensor([5]), torch.tensor([0]), torch.tensor([9]), cache, 3, rand(1, 3), 1.0)
    assert gap(near.p_draft, far.p_draft) < 1e-6  # the phases are float32


# ---------------------------------------------------------------------------------------------------------------------
# what is drawn, and what confidence may know


@pytest.mark.parametrize("head", HEADS)
def test_confidence_and_p_draft_never_see_their_own_token(head):
    """u_k decides x_k and nothing before or at k: c_1 .. c_k and rows 1 .. k keep their bits, c_{k+1} moves if there is a head."""
    _, drafter = make(head, K=40, gamma=4)
    features, u = features_of(9), rand(1, 4)
    plain = solo(drafter, features, 5, u)
    for k in range(4):
        for value in (0.02, 0.35, 0.71, 0.97):
            changed = u.clone()
            changed[0, k] = value
            other = solo(drafter, features, 5, changed)
            if other.tokens[0, k] == plain.tokens[0, k]:
                continue
            assert torch.equal(other.tokens[0, :k], plain.tokens[0, :k])
            assert torch.equal(other.p_draft[0, : k + 1], plain.p_draft[0, : k + 1])
            assert torch.equal(other.confidence[0, : k + 1], plain.confidence[0, : k + 1])
            if k < 3 and head == "none":
                assert torch.equal(other.p_draft, plain.p_draft) and torch.equal(other.confidence, plain.confidence)
            elif k < 3:
                assert gap(other.confidence[0, k + 1], plain.confidence[0, k + 1]) > 1e-4
                assert gap(other.p_draft[0, k + 1], plain.p_draft[0, k + 1]) > 1e-4
            break
        else:
            pytest.fail(f"no u changed token {k}")


def test_p_draft_is_what_the_tokens_were_drawn_from():
    _, drafter = make("markov", K=40)
    features = features_of(9)
    for settings in (dict(), dict(temperature=0.6), dict(top_k=3), dict(top_p=0.5), dict(temperature=1.7, top_k=9, top_p=0.8)):
        for seed in range(8):
            u = rand(1, 3, seed=seed)
            draft = solo(drafter, features, 5, u, **settings)
            assert draft.p_draft.dtype == torch.float64 and draft.p_draft.shape == (1, 3, 40)
            assert gap(draft.p_draft.sum(-1), torch.ones(1, 3)) < 1e-12
            assert torch.equal(drafter.draft_ids[sample(draft.p_draft, u)], draft.tokens)  # that tensor, these uniforms
            column = torch.searchsorted(drafter.draft_ids, draft.tokens)
            assert torch.equal(drafter.draft_ids[column], draft.tokens)  # only ids that can be drafted
            assert (draft.p_draft.gather(2, column[..., None]) > 0).all()
            if settings.get("top_k"):
                assert ((draft.p_draft > 0).sum(-1) <= settings["top_k"]).all()
            if settings.get("top_p") == 0.5:
                assert ((draft.p_draft > 0).sum(-1) < 40).all()
    p, _ = oracle(drafter, features, 5, draft.tokens[0])
    assert gap(draft.p_draft[0], p) > GAP  # teeth: the last settings do filter


def test_temperature_0_is_one_hot_at_the_argmax():
    _, drafter = make("rnn", K=40)
    features = features_of(9)
    draft = solo(drafter, features, 5, rand(1, 3), 0.0)
    again = solo(drafter, features, 5, rand(1, 3, seed=1), 0.0)
    assert torch.equal(draft.tokens, again.tokens)
    assert torch.equal(draft.p_draft.sum(-1), torch.ones(1, 3).double()) and torch.equal(draft.p_draft.amax(-1), torch.ones(1, 3).double())
    p, _ = oracle(drafter, features, 5, draft.tokens[0])  # along its own greedy tokens
    assert torch.equal(drafter.draft_ids[p.argmax(-1)], draft.tokens[0])


def test_settings_may_differ_per_request():
    _, drafter = make("markov", K=40)
    features, cache, u = [features_of(n, seed=n) for n in (4, 9, 6)], drafter.new_cache(3, 20), rand(3, 3)
    for s, f in enumerate(features):
        fill(drafter, cache, s, f)
    temperature, top_k, top_p = torch.tensor([0.0, 0.7, 1.0]), torch.tensor([0, 5, 0]), torch.tensor([1.0, 1.0, 0.6])
    draft = drafter.propose(torch.tensor([1, 2, 3]), torch.arange(3), torch.tensor([4, 9, 6]), cache, 3, u, temperature, top_k, top_p)
    for i, f in enumerate(features):
        alone = solo(drafter, f, i + 1, u[i : i + 1], temperature[i].item(), top_k=top_k[i].item(), top_p=top_p[i].item())
        assert torch.equal(alone.tokens[0], draft.tokens[i])
        assert gap(alone.p_draft[0], draft.p_draft[i]) < 1e-7  # settings travel as float32 tensors: 0.7 is not the float64 one


def test_w1_is_looked_up_by_target_id():
    """Reduced vocabulary: row i of W1 belongs to draft_ids[i], every other id has the last row. Not by column, not by raw id."""
    target, drafter = make("markov", K=20)
    ids = drafter.draft_ids
    assert torch.equal(ids, ids.sort().values) and torch.equal(drafter.w1_row[ids], torch.arange(20))
    outside = torch.tensor([t for t in range(V) if t not in ids.tolist()])
    assert len(outside) == V - 20 and (drafter.w1_row[outside] == 20).all()
    features = features_of(9)
    i = next(i for i in range(20) if ids[i] != i and ids[i] < 20)  # its raw id is a row too, that of another token
    for anchor, row in ((int(ids[i]), i), (int(outside[0]), 20), (int(outside[-1]), 20)):
        draft = solo(drafter, features, anchor, rand(1, 3), 0.0)
        p, c = oracle(drafter, features, anchor, draft.tokens[0])
        plain = solo(drafter, features, anchor, rand(1, 3)).p_draft[0, 0]
        assert gap(plain, p[0]) < EXACT and gap(draft.confidence[0].double(), c) < F32_STEP
        for other in {row, int(ids[i])}:
            kept = drafter.head.W1.weight[other].clone()
            drafter.head.W1.weight[other] += 1
            moved = gap(solo(drafter, features, anchor, rand(1, 3)).p_draft[0, 0], plain)
            drafter.head.W1.weight[other] = kept
            assert moved > GAP if other == row else moved == 0
    assert torch.equal(drafter.head_rows, target.head.weight[ids])


@pytest.mark.parametrize("head", HEADS)
def test_a_reduced_vocabulary_renormalises_the_full_one(head):
    """The same weights with K = V - 1: the missing token's share is spread over the others, nothing else moves at slot 1."""
    target, full = make(head)
    ids = torch.cat([torch.arange(30), torch.arange(31, V)])
    reduced = Drafter(full.config, target, ids).double().requires_grad_(False)
    state = dict(full.named_parameters())
    state["head.W1.weight"] = torch.cat([full.head.W1.weight[ids], full.head.W1.weight[-1:]])
    state["head.W2.weight"] = full.head.W2.weight[ids]
    reduced.load_state_dict(state)
    features = features_of(9)
    p = solo(full, features, 5, rand(1, 3)).p_draft[0, 0, ids]
    assert gap(solo(reduced, features, 5, rand(1, 3)).p_draft[0, 0], p / p.sum()) < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# block length


def test_longer_blocks_are_refused_and_shorter_ones_are_blocks_with_fewer_masks():
    target, drafter = make("markov", gamma=4)
    features = features_of(9)
    for wrong in (5, 0):
        with pytest.raises(AssertionError, match="trained for blocks of 1 to 4"):
            solo(drafter, features, 5, rand(1, wrong))
    whole = solo(drafter, features, 5, rand(1, 4))
    for G in (1, 2, 3):
        short = solo(drafter, features, 5, rand(1, 4)[:, :G])
        p, c = oracle(drafter, features, 5, short.tokens[0])  # whose block is the anchor and G - 1 masks
        assert gap(short.p_draft[0], p) < EXACT and gap(short.confidence[0].double(), c) < F32_STEP
        config = DrafterConfig(G, n_layers=2, feature_layers=(0, 1), head="markov", rank=RANK)
        trained_short = Drafter(config, target, drafter.draft_ids).double().requires_grad_(False)
        trained_short.load_state_dict(dict(drafter.named_parameters()))
        assert torch.equal(solo(trained_short, features, 5, rand(1, 4)[:, :G]).p_draft, short.p_draft)
        # and not the first G rows of a whole block: its later masks are seen by the earlier ones
        assert gap(short.p_draft[0, 0], whole.p_draft[0, 0]) > 1e-4


# ---------------------------------------------------------------------------------------------------------------------
# making, saving, loading


def test_the_last_target_layer_is_refused_as_a_feature():
    target = tiny_target()
    for layers in ((0, 2), (1, 3), (2,)):
        with pytest.raises(AssertionError, match="never the target's last"):
            Drafter(DrafterConfig(3, 1, layers, "markov", 8), target, torch.arange(V))
    for layers in ((1, 0), (0, 0), (-2, 0), (0, -1), ()):
        with pytest.raises(AssertionError, match="feature layers"):
            Drafter(DrafterConfig(3, 1, layers, "markov", 8), target, torch.arange(V))
    for ids in ([3, 1], [1, 1], [-1, 2], [0, V]):
        with pytest.raises(AssertionError, match="draft_ids"):
            Drafter(DrafterConfig(3, 1, (0, 1), "markov", 8), target, torch.tensor(ids))
    with pytest.raises(AssertionError, match="head must be one of"):
        Drafter(DrafterConfig(3, 1, (0, 1), "mlp", 8), target, torch.arange(V))


@pytest.mark.parametrize("head", HEADS)
def test_from_target_starts_as_the_last_layers_with_no_bias(head):
    target = tiny_target().double()
    drafter = drafting.from_target(DrafterConfig(3, 2, (0, 1), head, 8), target, torch.arange(V)).double()
    for layer, source in zip(drafter.layers, target.layers[1:]):
        assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), source.state_dict().values()))
    features = features_of(5)
    assert gap(drafter.context_proj(features), features[:, D:]) < EXACT  # the deepest feature
    assert (head == "none" or drafter.head.W2.weight.abs().max() == 0 and drafter.head.W1.weight.std() > 0.5)
    draft = solo(drafter, features, 5, rand(1, 3))
    assert gap(draft.p_draft[0], torch.softmax(oracle_block(drafter, features, 5, 3) @ target.head.weight.T, -1)) < EXACT
    assert all(p.requires_grad for p in drafter.parameters())
    assert all(p.untyped_storage().data_ptr() != q.untyped_storage().data_ptr() for p in drafter.parameters() for q in target.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_save_and_load_round_trip(head, tmp_path):
    """What is loaded is what was saved to half a step of int8, in the target's dtype, and proposes alike; vectors are exact."""
    target, drafter = make(head, K=40)
    drafting.save(drafter, tmp_path / "a.safetensors")
    loaded = drafting.load(tmp_path / "a.safetensors", target)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.draft_ids, drafter.draft_ids) and torch.equal(loaded.head_rows, drafter.head_rows)
    for (name, a), (_, b) in zip(loaded.named_parameters(), drafter.named_parameters()):
        step = b.abs().amax(-1, keepdim=True) / 127 if b.ndim == 2 and len(b) > 1 and b.numel() else torch.zeros(1)
        assert a.dtype == torch.float64 and not a.requires_grad and ((a - b).abs() <= 0.5001 * step + 1e-7 * b.abs()).all(), name
    features = features_of(9)
    a, b = solo(loaded, features, 5, rand(1, 3)), solo(drafter, features, 5, rand(1, 3))
    assert gap(a.p_draft[0, 0], b.p_draft[0, 0]) < 0.05 and gap(a.p_draft, torch.zeros(1)) > 0.1
    # a second round trip stays within the first one's error
    drafting.save(loaded, tmp_path / "b.safetensors")
    again = drafting.load(tmp_path / "b.safetensors", target)
    for (name, a), (_, b) in zip(again.named_parameters(), loaded.named_parameters()):
        assert (gap(a, b) if b.numel() else 0) <= 1e-6 * max(1.0, b.abs().max().item() if b.numel() else 0), name
    assert not list(tmp_path.glob("*.part"))
    assert next(drafting.load(tmp_path / "a.safetensors", tiny_target()).parameters()).dtype == torch.float32


def test_frozen_things_are_neither_parameters_nor_stored(tmp_path):
    """Embedding, head rows, rotation and w1_row are the target's or computed: a file holds none of them, under any name."""
    target, drafter = make("rnn", K=40)
    assert not {"embed", "head_rows", "cos", "sin", "w1_row", "draft_ids"} & {n for n, _ in drafter.named_parameters()}
    assert not set(drafter.state_dict()) - {n for n, _ in drafter.named_parameters()}
    drafting.save(drafter, tmp_path / "a")
    with safe_open(tmp_path / "a", "pt") as f:
        stored = {name: f.get_tensor(name) for name in f.keys()}
    assert {n.removesuffix(".scale") for n in stored} == {n for n, _ in drafter.named_parameters()} | {"draft_ids"}
    for name in [n for n in stored if n.endswith(".scale")]:
        stored[name.removesuffix(".scale")] = stored[name.removesuffix(".scale")].float() * stored[name]  # as load() reads it
    frozen = [target.embed.weight, drafter.head_rows]  # (head_rows are rows of the embedding: the tiny target is tied)
    near = lambda a, b: torch.cdist(a.double(), b.double()).min() < 0.02 * b.norm(dim=-1).mean()  # noqa: E731 (int8 is within 0.5 %)
    rows = [t for name, t in stored.items() if not name.endswith(".scale") and t.ndim == 2 and t.shape[1] == D]
    assert not any(near(t, f) for t in rows for f in frozen)
    scale = frozen[0].abs().amax(1, keepdim=True) / 127
    assert near((frozen[0] / scale).round() * scale, frozen[0])  # teeth: stored, it would have been found
    n = sum(p.numel() for p in drafter.parameters())
    assert (tmp_path / "a").stat().st_size < 1.3 * n + 4 * 40 + 4096  # int8 and a scale a row (tiny rows), ids, a header
    assert drafter.embed.untyped_storage().data_ptr() == target.embed.weight.untyped_storage().data_ptr()  # shared, not copied


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    return text


def test_files_that_are_no_drafter_for_this_target_give_one_line(tmp_path):
    target, drafter = make("gated", K=40)
    path = tmp_path / "d.safetensors"
    with pytest.raises(ValueError, match="train.py fit") as error:
        drafting.load(tmp_path / "missing.safetensors", target)
    one_line(error)
    drafting.save(drafter, path)
    good = path.read_bytes()
    header = 8 + struct.unpack("<Q", good[:8])[0]
    bad = {
        "empty": b"", "header cut": good[: header // 2], "data cut": good[: header + 100], "one byte short": good[:-1],
        "random": bytes(randint(256, 5000).tolist()), "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    }
    for name, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match="restore or retrain"):
            drafting.load(path, target)
        with pytest.raises(ValueError) as error:
            drafting.load(path, target)
        assert str(path) in one_line(error), name
    # whole files that are something else
    config = json.dumps(dict(gamma=3, n_layers=2, feature_layers=[0, 1], head="gated", rank=RANK))
    tensors = {n: p.bfloat16() for n, p in drafter.named_parameters()} | {"draft_ids": drafter.draft_ids.int()}
    others = {
        "no metadata": (tensors, None), "no ids": ({k: v for k, v in tensors.items() if k != "draft_ids"}, config),
        "a tensor less": ({k: v for k, v in tensors.items() if k != "mask"}, config),
        "a tensor more": (tensors | {"extra": torch.zeros(1)}, config),
        "ids outside the target's vocabulary": (tensors | {"draft_ids": drafter.draft_ids.int() + V}, config),
        "unknown head": (tensors, config.replace("gated", "mlp")), "unknown field": (tensors, config.replace("rank", "rang")),
        "other head": (tensors, config.replace("gated", "rnn")), "not JSON": (tensors, "{"),
    }
    for name, (contents, text) in others.items():
        save_file(contents, path, metadata=None if text is None else {"config": text})
        with pytest.raises(ValueError, match="restore or retrain") as error:
            drafting.load(path, target)
        one_line(error)
    path.write_bytes(good)
    assert drafting.load(path, target).gamma == 3  # the good file still is


def test_a_target_of_another_shape_is_refused(tmp_path):
    from target import Target, TargetConfig

    _, drafter = make("markov", K=40)
    drafting.save(drafter, tmp_path / "d")
    shape = dict(vocab_size=V, n_layers=3, d_model=D, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_len=128)
    drafting.load(tmp_path / "d", Target(TargetConfig(**shape)))
    for change in (dict(d_model=48), dict(d_ff=96), dict(n_kv_heads=4), dict(n_heads=2), dict(head_dim=16), dict(n_layers=2),
                   dict(vocab_size=32), dict(qk_norm=True)):
        with pytest.raises(ValueError, match="restore or retrain") as error:
            drafting.load(tmp_path / "d", Target(TargetConfig(**shape | change)))
        one_line(error)


def test_tiny_drafter_proposes_for_a_real_forward_of_its_target():
    """The pieces joined as the engine joins them: the target's own features, in ascending layer order, at their positions."""
    target = tiny_target().double()
    drafter, n = tiny_drafter(target, head="markov", K=32), 10
    tokens, zeros, places = randint(V, n), torch.zeros(n, dtype=torch.long), torch.arange(n)
    logits, features = target(tokens, zeros, places, target.new_cache(1, 64), drafter.feature_layers)
    anchor, cache = logits[-1:].argmax(-1), drafter.new_cache(1, 64)
    drafter.extend(zeros, features, zeros, places, cache)
    draft = drafter.propose(anchor, zeros[:1], torch.tensor([n]), cache, 3, rand(1, 3), 1.0)
    p, c = oracle(drafter, features, int(anchor), draft.tokens[0])
    assert gap(draft.p_draft[0], p) < EXACT and gap(draft.confidence[0].double(), c) < F32_STEP
    assert draft.confidence.dtype == torch.float32

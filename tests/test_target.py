"""
Tests of target.py, the packed and cached forward, against a literal one. Run: python -m pytest tests/test_target.py

The oracle. llama() below is the model as one would explain it: float64, one sequence, no cache, no packing, a loop over
heads, RoPE as a rotation of complex numbers. All models here are float64 too, so that equality means 1e-10: the difference
left is rounding, a few hundred operations of 1e-16 on logits of size 1 to 100. A real fault moves some logit by more than 1:
see the section "teeth", where faults are put in on purpose.
"""
import dataclasses
import random

import pytest
import torch

import target
from target import Rows, Target, TargetConfig, rope_table, tiny_target

F64 = torch.float64
EXACT = 1e-10
V, MAX_LEN = 64, 128


# ---------------------------------------------------------------------------------------------------------------------
# the oracle


def half_split(x, phase):
    """Dimension i and i + h/2 are one complex number: x (N, h), phase (N, h/2)."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.complex(left, right) * phase
    return torch.cat([turned.real, turned.imag], dim=-1)


def interleaved(x, phase):
    """Dimension 2i and 2i + 1 are one complex number: the order in which GGUF keeps its rows."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * phase).flatten(-2)


def llama(weights, c, tokens, rotate=half_split, kv_head=lambda head, c: head // (c.n_heads // c.n_kv_heads)):
    """(logits (N, V), [residual stream (N, D) after each layer]) of one sequence. weights: see weights_of()."""
    n, h = len(tokens), c.head_dim

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    angle = torch.arange(n, dtype=F64)[:, None] * c.rope_base ** (-torch.arange(0, h, 2, dtype=F64) / h)
    phase = torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(torch.complex128)  # Target's table is float32
    future = torch.ones(n, n).triu(1).bool()
    x, streams = weights["embed"][tokens], []
    for w in weights["layers"]:
        y, heads = norm(x, w["attn_norm"]), []
        for head in range(c.n_heads):
            at, kv = slice(head * h, (head + 1) * h), kv_head(head, c)
            kv = slice(kv * h, (kv + 1) * h)
            q, k, v = y @ w["q"][at].T, y @ w["k"][kv].T, y @ w["v"][kv].T
            if c.qk_norm:
                q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
            scores = rotate(q, phase) @ rotate(k, phase).T / h**0.5
            heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
        x = x + torch.cat(heads, dim=-1) @ w["out"].T
        y = norm(x, w["mlp_norm"])
        gate = y @ w["gate"].T
        x = x + (gate / (1 + torch.exp(-gate)) * (y @ w["up"].T)) @ w["down"].T
        streams.append(x)
    return norm(x, weights["norm"]) @ weights["head"].T, streams


def weights_of(model):
    """Target's parameters, unpacked and in float64."""
    c, p = model.config, {k: v.double() for k, v in model.state_dict().items()}
    layers = []
    for i in range(c.n_layers):
        q, k, v = p[f"layers.{i}.attn.qkv.weight"].split([n * c.head_dim for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads)])
        gate, up = p[f"layers.{i}.mlp.gate_up.weight"].split(c.d_ff)
        w = dict(q=q, k=k, v=v, gate=gate, up=up, out=p[f"layers.{i}.attn.out.weight"], down=p[f"layers.{i}.mlp.down.weight"])
        for name in ("attn_norm", "mlp_norm"):
            w[name] = p[f"layers.{i}.{name}.weight"]
        for name in ("q_norm", "k_norm") if c.qk_norm else ():
            w[name] = p[f"layers.{i}.attn.{name}.weight"]
        layers.append(w)
    return dict(embed=p["embed.weight"], norm=p["norm.weight"], head=p["head.weight"], layers=layers)


# ---------------------------------------------------------------------------------------------------------------------
# models and helpers


KINDS = {
    "llama": dict(),
    "untied": dict(tied=False),
    "qwen3": dict(tied=False, qk_norm=True, rope_base=1e6, norm_eps=1e-3),
    "all heads their own": dict(n_heads=4, n_kv_heads=4),
    "all heads one": dict(n_heads=4, n_kv_heads=1),
    "smollm2's shape": dict(n_heads=6, n_kv_heads=2),  # three query heads a group; H * h is not D
}


def make(kind="llama", dtype=F64):
    """A tiny model whose norm weights are random too: with ones, a forgotten norm weight would go unseen."""
    model = tiny_target(V, max_len=MAX_LEN)
    if kind != "llama":
        torch.manual_seed(1)
        model = Target(dataclasses.replace(model.config, **KINDS[kind])).eval().requires_grad_(False)
        for p in (p for p in model.parameters() if p.ndim == 2):
            p.mul_(3 if p is model.embed.weight else 2)  # as tiny_target does
    for p in model.parameters():
        if p.ndim == 1:
            p.uniform_(0.5, 1.5)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return make()


def rand_tokens(n, seed=0):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed))


def pack(parts):
    """[(slot, first position, tokens)], any order -> tokens, slots, positions, and for each part the rows it became."""
    order = sorted(range(len(parts)), key=lambda i: parts[i][0])
    tokens = torch.cat([parts[i][2] for i in order])
    slots = torch.cat([torch.full((len(parts[i][2]),), parts[i][0]) for i in order])
    positions = torch.cat([torch.arange(parts[i][1], parts[i][1] + len(parts[i][2])) for i in order])
    places, at = [None] * len(parts), 0
    for i in order:
        places[i] = slice(at, at := at + len(parts[i][2]))
    return tokens, slots, positions, places


def run(model, tokens, cache=None, slot=0, first=0, **kw):
    """One request, consecutive positions: (logits, features)."""
    packed = pack([(slot, first, tokens)])[:3]
    return model(*packed, cache if cache is not None else model.new_cache(slot + 1, MAX_LEN), **kw)


def gap(a, b):
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


def visible(rows):
    """(N, L) bool: what the mask lets each real row see."""
    if rows.mask is None:
        return torch.ones(len(rows.slots), rows.length, dtype=torch.bool)
    assert set(rows.mask.unique().tolist()) <= {0.0, float("-inf")}
    return rows.from_grid(rows.mask) == 0


# ---------------------------------------------------------------------------------------------------------------------
# one sequence


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_literal_forward(kind):
    model, tokens = make(kind), rand_tokens(40)
    expected, streams = llama(weights_of(model), model.config, tokens)
    logits, features = run(model, tokens, feature_layers=(0, 2))
    assert logits.dtype == F64  # a float64 model is a reference: its logits must not pass through float32
    assert (model.head.weight is model.embed.weight) == model.config.tied
    assert gap(logits, expected) < EXACT
    assert gap(features, torch.cat([streams[0], streams[2]], dim=-1)) < EXACT
    assert 1 < expected.std() < 100 and expected.argmax(-1).unique().numel() > 10  # alive: not one answer everywhere


def test_features_are_the_stream_after_each_chosen_layer(model):
    tokens = rand_tokens(20)
    _, streams = llama(weights_of(model), model.config, tokens)
    for layers in ((), (0,), (1,), (2,), (0, 1, 2)):
        features = run(model, tokens, feature_layers=layers)[1]
        assert features.shape == (20, len(layers) * model.config.d_model)
        assert not layers or gap(features, torch.cat([streams[i] for i in layers], dim=-1)) < EXACT
    assert gap(streams[0], streams[1]) > 0.1  # one layer off would be seen


def test_logit_rows_choose_rows_and_nothing_else(model):
    tokens = rand_tokens(15)
    whole, features = run(model, tokens, feature_layers=(1,))
    for chosen in ([14], [0, 14], [3, 4, 9]):
        logits, same = run(model, tokens, feature_layers=(1,), logit_rows=torch.tensor(chosen))
        assert gap(logits, whole[chosen]) < EXACT and torch.equal(same, features)


def test_rope_table_is_exact_at_far_positions():
    cos, sin = rope_table(8192, 64, 1e5)
    at, i = torch.tensor([0, 1, 777, 8191])[:, None], torch.arange(32)
    angle = at.double() * 1e5 ** (-2 * i.double() / 64)
    for table, f in ((cos, torch.cos), (sin, torch.sin)):
        assert gap(table[at[:, 0], :32], f(angle)) <= 2**-24 and torch.equal(table[:, :32], table[:, 32:])
    single = at.float() * 1e5 ** (-2 * i.float() / 64)
    assert gap(single.cos(), angle.cos()) > 1e-5  # teeth: phases computed in float32 are off by far more


# ---------------------------------------------------------------------------------------------------------------------
# the cache


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_cached_equals_uncached_in_random_ragged_chunks(kind):
    """Slots 0 and 3 of 5 (and 4 at times), far apart in position, in chunks of 0 to 5 rows: as the literal forward."""
    model, rng, shapes = make(kind), random.Random(1), set()
    weights = weights_of(model)
    for trial, starts in enumerate([{0: 0, 3: 70}, {0: 90, 3: 0}, {0: 1, 3: 40, 4: 0}]):
        cache = model.new_cache(5, MAX_LEN)
        text = {s: rand_tokens(start + 25, seed=10 * trial + s) for s, start in starts.items()}
        expected = {s: llama(weights, model.config, t) for s, t in text.items()}
        got = {s: [run(model, text[s][:n], cache, s, feature_layers=(1,))] if n else [] for s, n in starts.items()}
        done = dict(starts)
        while any(done[s] < len(text[s]) for s in text):
            n = {s: min(rng.randint(0, 5), len(text[s]) - done[s]) for s in text}
            parts = [(s, done[s], text[s][done[s] : done[s] + n[s]]) for s in text if n[s]]
            if not parts:
                continue
            shapes.add(tuple(n.values()))
            tokens, slots, positions, places = pack(parts)
            logits, features = model(tokens, slots, positions, cache, feature_layers=(1,))
            for (s, _, _), at in zip(parts, places):
                got[s].append((logits[at], features[at]))
                done[s] += n[s]
        for s in text:
            logits, features = (torch.cat(x) for x in zip(*got[s]))
            assert gap(logits, expected[s][0]) < EXACT
            assert gap(features, expected[s][1][1]) < EXACT
    assert {len(s) for s in shapes} == {2, 3} and any(0 in s for s in shapes)  # slots at rest, too
    assert any(len(set(s)) > 1 for s in shapes) and any(len(set(s)) == 1 for s in shapes)  # ragged, and equal


def test_the_whole_cache_can_be_used(model):
    tokens = rand_tokens(20)
    cache = model.new_cache(1, 20)  # not one position more than the text
    logits = torch.cat([run(model, tokens[:17], cache)[0], run(model, tokens[17:], cache, first=17)[0]])
    assert gap(logits, llama(weights_of(model), model.config, tokens)[0]) < EXACT


@pytest.mark.parametrize("seed", range(4))
def test_rollback_is_a_smaller_length(model, seed):
    """Rejected rows stay in the cache and must never be seen: what follows equals a fresh forward, round after round."""
    rng, weights, lengths = random.Random(seed), weights_of(model), []
    slots, n = (1, 2, 4), 90
    text = {s: rand_tokens(n, seed=10 * seed + s) for s in slots}
    expected = {s: llama(weights, model.config, text[s])[0] for s in slots}
    cache, done, overtaken = model.new_cache(5, MAX_LEN), {s: 0 for s in slots}, 0
    reached = dict(done)  # the furthest position ever written: beyond `done` lies junk
    while any(done[s] < n for s in slots):
        parts, accepted = [], []
        for s in slots:
            take = rng.randint(0, min(5, n - done[s]))
            true, junk = text[s][done[s] : done[s] + take], rand_tokens(rng.randint(0, 7), seed=rng.randrange(10**6))
            if len(true) + len(junk):
                parts.append((s, done[s], torch.cat([true, junk])))
                accepted.append(take)
                overtaken += reached[s] > done[s] + len(true) + len(junk)  # junk of an earlier round lies further out
                reached[s] = max(reached[s], done[s] + len(true) + len(junk))
                lengths.append((take, len(junk)))
        if not parts:
            continue
        tokens, slot_rows, positions, places = pack(parts)
        logits, _ = model(tokens, slot_rows, positions, cache)
        for (s, first, _), at, take in zip(parts, places, accepted):
            assert gap(logits[at][:take], expected[s][first : first + take]) < EXACT if take else True
            done[s] += take
    # the inputs did exercise all of it
    assert len(lengths) > 80 and overtaken > 20
    assert any(t == 0 for t, _ in lengths) and any(j == 0 for _, j in lengths) and any(t and j for t, j in lengths)


def test_only_real_rows_are_written(model):
    """A ragged batch is padded for attention. Nothing but each real row's own [slot, position] may change in the cache."""
    cache = model.new_cache(6, 40)
    for t in cache.k + cache.v:  # not zeros, else writing zeros would go unseen
        t.normal_(generator=torch.Generator().manual_seed(0))
    before = [t.clone() for t in cache.k + cache.v]
    for parts in ([(1, 5, 3), (3, 30, 1), (4, 0, 5)], [(0, 38, 2), (5, 0, 7)], [(2, 9, 4)]):
        parts = [(s, first, rand_tokens(n, seed=s)) for s, first, n in parts]
        tokens, slots, positions, _ = pack(parts)
        model(tokens, slots, positions, cache)
        real = torch.zeros(6, 40, dtype=torch.bool)
        real[slots, positions] = True
        for old, new in zip(before, cache.k + cache.v):
            assert torch.equal((old != new).flatten(2).all(-1), real) and torch.equal((old != new).flatten(2).any(-1), real)
            old.copy_(new)


# ---------------------------------------------------------------------------------------------------------------------
# rows


def test_all_three_ways_through_attention_agree(model):
    """The same rows of slot 2 alone (a slice), beside as many of slot 3 (a reshape), in ragged company (an index), and with most slots
    between unused (a copy of the cache)."""
    company = {
        "alone": [],
        "equal": [(3, 10, rand_tokens(4, 5))],
        "shorter": [(3, 0, rand_tokens(1, 6))],
        "longer": [(0, 3, rand_tokens(9, 7)), (4, 25, rand_tokens(2, 8))],
        "far": [(9, 7, rand_tokens(3, 7))],
        "far and equal": [(11, 7, rand_tokens(4, 7))],
    }
    outs, ways = {}, {}
    for name, others in company.items():
        cache, text = model.new_cache(12, MAX_LEN), rand_tokens(20, 4)
        run(model, text[:16], cache, slot=2)
        for s, first, _ in others:
            run(model, rand_tokens(first, 9), cache, slot=s) if first else None
        tokens, slots, positions, places = pack([(2, 16, text[16:]), *others])
        rows = Rows(slots, positions, F64)
        ways[name] = (rows.one_run is not None, rows.full) + (rows.S == 2,) * torch.is_tensor(rows.grid_slots)
        logits, features = model(tokens, slots, positions, cache, feature_layers=(0, 1, 2))
        outs[name] = [logits[places[0]], features[places[0]], cache.k[2][2], cache.v[2][2]]
    assert ways == {"alone": (True, True), "equal": (False, True), "shorter": (False, False), "longer": (False, False),
                    "far": (False, False, True), "far and equal": (False, True, True)}
    for name in company:
        assert all(gap(a, b) < EXACT for a, b in zip(outs["alone"], outs[name])), name


@pytest.mark.parametrize("parts", [
    [(0, [0])],
    [(2, [7, 8, 9])],
    [(2, [3, 5, 9])],  # positions need not be consecutive
    [(0, [4]), (1, [4]), (2, [4])],
    [(1, [0, 1]), (2, [8, 9])],
    [(0, [3, 4, 5]), (3, [20]), (4, [0, 1])],
    [(1, [3, 4, 5]), (7, [20])],  # most slots between are unused
    [(1, [3]), (7, [20])],
])
def test_mask_shows_each_row_the_past_and_itself(parts):
    slots = torch.tensor([s for s, ps in parts for _ in ps])
    positions = torch.tensor([p for _, ps in parts for p in ps])
    rows = Rows(slots, positions, torch.float32)
    ps = parts[0][1]
    assert rows.one_run == ((parts[0][0], ps[0], ps[-1] + 1) if len(parts) == 1 and ps[-1] - ps[0] == len(ps) - 1 else None)
    lines = [s for s, _ in parts] if torch.is_tensor(rows.grid_slots) else list(range(rows.grid_slots.start, rows.grid_slots.stop))
    assert torch.is_tensor(rows.grid_slots) == (2 * len(parts) < parts[-1][0] + 1 - parts[0][0])
    assert (lines[0], rows.hi, rows.length) == (slots[0], slots[-1] + 1, positions.max() + 1)
    assert torch.equal(visible(rows), torch.arange(rows.length) <= positions[:, None])
    if rows.mask is not None:  # a row without any key, real or padded, would be NaN
        assert rows.mask.shape == (len(lines), rows.T, rows.length) and (rows.mask == 0).any(-1).all()
    grid = rows.to_grid(torch.arange(len(slots)) + 1)
    assert grid.shape == (len(lines), rows.T)
    for s, ps in parts:  # each slot's rows stand first in its line of the grid, in order, and zeros after them
        line = (torch.arange(len(slots)) + 1)[slots == s].tolist()
        assert grid[lines.index(s)].tolist() == line + [0] * (rows.T - len(line))
    assert rows.from_grid(grid).tolist() == list(range(1, len(slots) + 1))


def test_a_draft_block_sees_all_of_itself():
    block = Rows(torch.zeros(4, dtype=torch.long), torch.arange(10, 14), F64, sees=torch.full((4,), 13))
    assert block.mask is None and block.length == 14  # one request: no mask at all
    positions = torch.cat([torch.arange(10, 14), torch.arange(3, 7)])
    sees = torch.tensor([13] * 4 + [6] * 4)
    two = Rows(torch.tensor([0] * 4 + [2] * 4), positions, F64, sees)
    assert not two.full and torch.equal(visible(two), torch.arange(14) <= sees[:, None])
    assert visible(two)[4, 6] and not visible(two)[4, 7]  # the block's first row sees its last, and no stale key after it


@pytest.mark.parametrize("slots, positions, message", [
    ([0], [20], "outside the cache"),
    ([0, 0], [19, 20], "outside the cache"),
    ([2], [0], "outside the cache"),
    ([-1], [0], "negative"),
    ([0], [-1], "negative"),
    ([0, 1, 0, 1], [0, 0, 1, 1], "sorted"),
    ([1, 0, 1], [0, 0, 1], "sorted"),
])
def test_rows_outside_the_cache_are_refused(model, slots, positions, message):
    cache = model.new_cache(2, 20)
    with pytest.raises(AssertionError, match=message):
        model(rand_tokens(len(slots)), torch.tensor(slots), torch.tensor(positions), cache)
    assert not any(t.any() for t in cache.k + cache.v)  # and nothing was written


def test_wrong_shapes_and_too_long_a_cache_are_refused(model):
    model.new_cache(1, MAX_LEN)
    with pytest.raises(AssertionError, match="built for 128"):
        model.new_cache(1, MAX_LEN + 1)
    one, two, cache = torch.zeros(1, dtype=torch.long), torch.zeros(2, dtype=torch.long), model.new_cache(1, 4)
    with pytest.raises(AssertionError, match="rows are three"):
        model(two, one, two, cache)
    with pytest.raises(AssertionError, match="rows are three"):
        model(two[None], two[None], two[None], cache)


# ---------------------------------------------------------------------------------------------------------------------
# bf16


def test_bf16_stays_near_fp32():
    """bf16 keeps 8 bits, a rounding of 2^-9 = 0.2 %. Three layers of some ten roundings each: a few per cent at most."""
    exact, half, tokens = make(), make(dtype=torch.bfloat16), rand_tokens(40)
    cache = half.new_cache(1, MAX_LEN)
    logits = torch.cat([run(half, tokens[:37], cache)[0], run(half, tokens[37:], cache, first=37)[0]])
    features = run(half, tokens, feature_layers=(1,))[1]
    assert logits.dtype == torch.float32  # probabilities are never made in bf16
    assert features.dtype == cache.k[0].dtype == torch.bfloat16
    expected = run(exact, tokens)[0]
    assert ((logits - expected).square().mean() / expected.square().mean()).sqrt() < 0.05
    single = run(make(dtype=torch.float32), tokens)[0]
    assert single.dtype == torch.float32 and gap(single, expected) < 1e-3


# ---------------------------------------------------------------------------------------------------------------------
# teeth: faults that the comparisons above would show. All of them move some logit by more than 1, ten orders above EXACT.


def test_teeth_wrong_head_grouping():
    model, tokens = make("smollm2's shape"), rand_tokens(20)
    wrong, _ = llama(weights_of(model), model.config, tokens, kv_head=lambda head, c: head % c.n_kv_heads)
    assert gap(run(model, tokens)[0], wrong) > 1


def test_teeth_wrong_rope_layout(model):
    tokens = rand_tokens(20)
    assert gap(run(model, tokens)[0], llama(weights_of(model), model.config, tokens, rotate=interleaved)[0]) > 1


def test_teeth_position_off_by_one(model):
    """Rows after the prompt at position + 1, as when a draft block starts one too far."""
    tokens = rand_tokens(24)
    expected = run(model, tokens)[0][20:]
    for shift, wrong in ((0, False), (1, True), (-1, True)):
        cache = model.new_cache(1, MAX_LEN)
        run(model, tokens[:20], cache)
        assert (gap(run(model, tokens[20:], cache, first=20 + shift)[0], expected) > (1 if wrong else EXACT)) == wrong


def test_teeth_a_key_leaks_from_beyond(model, monkeypatch):
    """A mask one key too generous: inside a chunk it shows the next token, at its end what a rejected draft left behind."""
    tokens, junk = rand_tokens(24), rand_tokens(4, seed=1)
    expected = run(model, tokens)[0]
    cache = model.new_cache(1, MAX_LEN)
    run(model, torch.cat([tokens[:20], junk]), cache)
    honest = torch.cat([run(model, tokens[i : i + 1], cache, first=i)[0] for i in (20, 21)])
    assert gap(honest, expected[20:22]) < EXACT
    monkeypatch.setattr(target, "Rows", lambda slots, positions, dtype: Rows(slots, positions, dtype, sees=positions + 1))
    assert gap(run(model, tokens, cache, first=0)[0][:23], expected[:23]) > 1
    run(model, torch.cat([tokens[:20], junk]), cache)
    assert gap(run(model, tokens[20:21], cache, first=20)[0], expected[20:21]) > 1


def test_teeth_a_padded_row_that_writes(model, monkeypatch):
    """Padding that is written like a row, at its slot's next position, is caught by test_only_real_rows_are_written."""
    write = target.KVCache.write

    def careless(cache, layer, rows, k, v):
        write(cache, layer, rows, k, v)
        last = rows.positions[-1] + 1
        cache.k[layer][rows.slots[-1], last] = 0

    monkeypatch.setattr(target.KVCache, "write", careless)
    with pytest.raises(AssertionError):
        test_only_real_rows_are_written(model)


# ---------------------------------------------------------------------------------------------------------------------
# packed products


def test_packed_products_give_what_linear_gives():
    """Where the packed operator exists, a packed bf16 model gives the same logits and features to a rounding of bf16, for one row and
    many; anywhere else pack() changes nothing."""
    plain, packed = (tiny_target(tied=False).bfloat16() for _ in range(2))
    target.pack(packed)
    n = 20
    rows = torch.randint(64, (n,), generator=torch.Generator().manual_seed(0)), torch.zeros(n, dtype=torch.long), torch.arange(n)
    a, b = (m(*rows, m.new_cache(1, n), (0, 1)) for m in (plain, packed))
    scale = a[0].abs().max()
    assert (a[0] - b[0]).abs().max() <= 0.01 * scale and (a[1] - b[1]).abs().max() <= 0.01 * a[1].abs().max()
    cache = packed.new_cache(1, n)
    steps = torch.cat([packed(*(r[i : i + 1] for r in rows), cache)[0] for i in range(n)])
    assert (steps - b[0]).abs().max() <= 0.02 * scale  # one row at a time: other matrix code, the same product
    for other in (tiny_target(), tiny_target().double()):
        target.pack(other)
        assert not any("forward" in vars(layer) for layer in other.modules())


def test_a_packed_product_that_is_wrong_or_missing_is_not_used(monkeypatch):
    model = tiny_target().bfloat16()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *rest: torch.zeros(*x.shape[:-1], 1), raising=False)
    target.pack(model)
    assert not any("forward" in vars(layer) for layer in model.modules())

    def refuses(*args):
        raise RuntimeError("no bf16 here")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuses, raising=False)
    target.pack(model)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_a_packed_layer_keeps_its_bias():
    """The confidence head has one, and a confidence without it is wrong by a constant that no test of the law would see."""
    layer = torch.nn.Linear(64, 32).bfloat16().requires_grad_(False)
    layer.bias.fill_(3.0)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    wanted = layer(x)
    target.pack(layer)
    assert (layer(x) - wanted).abs().max() < 0.05 and wanted.mean() > 2

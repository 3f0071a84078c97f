"""The target model: a Llama-family decoder that runs packed rows of many requests (Sec. 5.3 of arXiv 2607.05147).

What     RMSNorm, RoPE (also scaled), grouped-query attention, SwiGLU, tied or untied head, optional q/k norm (Qwen3). One
         forward serves prefill, plain decoding and verification alike: a *row* is one token that knows its request (slot) and position.
In       tokens, slots, positions: three (N,) tensors, sorted by slot, positions rising within a slot.
Out      logits (N, V) in float32 and the features the drafter reads: hidden states of chosen layers, (N, m * D).
State    KVCache, preallocated, indexed [slot, position]. Attention lets a row see cached positions <= its own, so whatever
         lies beyond is invisible: taking tokens back (a rejected draft) needs no copying, it is just a smaller length.
Letters  N rows, S slots, T rows of one slot (padded), L cached positions, D width, H query heads, J key/value heads, d width
         of a head, V vocabulary, m feature layers.
Alone    python target.py    (builds a tiny random model and compares cached with uncached logits)
"""
import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class TargetConfig:
    vocab_size: int
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int          # grouped-query attention: n_heads / n_kv_heads query heads share one key/value head
    head_dim: int
    d_ff: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    max_len: int = 2048      # context: prompt and answer together
    tied: bool = True        # the LM head is the embedding, transposed
    qk_norm: bool = False    # Qwen3 norms q and k per head; Llama does not
    rope_scaling: tuple = ()  # see rope_table(); (): none
    eos: tuple[int, ...] = (2,)  # ids that end an answer


# ---------------------------------------------------------------------------------------------------------------------
# Pieces that the drafter shares


class RMSNorm(nn.Module):
    def __init__(self, d: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)  # .to: training keeps fp32 weights


class SwiGLU(nn.Module):
    def __init__(self, d: int, d_ff: int):
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * d_ff, bias=False)  # one product instead of two: fewer, larger reads
        self.down = nn.Linear(d_ff, d, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rope_table(max_len: int, head_dim: int, base: float, scaling=()):
    """cos and sin, each (max_len, head_dim), for the half-split layout: dimension i turns together with i + head_dim / 2.

    scaling says how a model was made to read further than it was first trained for, by turning slower: ("linear", factor), or
    ("llama3", factor, low, high, first_context): dimensions that turn more than `high` times within the first context keep
    their speed, those that turn less than `low` times are slowed by the factor, those between in proportion.
    """
    freq = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling:
        kind, factor, *more = scaling
        keep = torch.zeros_like(freq)  # 1: as it was, 0: slowed
        if kind == "llama3":
            low, high, first_context = more
            turns = first_context * freq / (2 * torch.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = freq * (keep + (1 - keep) / factor)
    angle = torch.arange(max_len, dtype=torch.float64)[:, None] * freq  # float64: position 8000 still has exact phases
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rope(x, cos, sin):
    """Rotate x (.., heads, d) by its position's cos and sin (.., 1, d)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def attend(q, k, v, mask):
    """Grouped-query attention. q (S, T, H, d), k and v (S, L, J, d), mask (S, T, L) additive or None -> (S, T, H * d).

    The H / J query heads that share a key head are laid side by side as more rows of that head, so each key and value is
    read once, not once per query head.
    """
    S, T, H, d = q.shape
    J = k.shape[2]
    group = H // J
    q = q.view(S, T, J, group, d).permute(0, 2, 3, 1, 4).reshape(S, J, group * T, d)  # from (S, T, H, d)
    if mask is not None:
        mask = mask[:, None, None].expand(S, 1, group, T, mask.shape[-1]).reshape(S, 1, group * T, -1)
    out = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.view(S, J, group, T, d).permute(0, 3, 1, 2, 4).reshape(S, T, H * d)


class Attention(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.c = c
        self.qkv = nn.Linear(c.d_model, (c.n_heads + 2 * c.n_kv_heads) * c.head_dim, bias=False)
        self.out = nn.Linear(c.n_heads * c.head_dim, c.d_model, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def project(self, x, cos, sin):
        """x (.., D) -> q (.., H, d), k (.., J, d), v (.., J, d), with q and k normed and rotated."""
        c = self.c
        heads = self.qkv(x).unflatten(-1, (-1, c.head_dim))
        q, k, v = heads.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], dim=-2)
        if not c.qk_norm:  # q and k share one rotation: half the small operations of the loop below
            q, k = rope(heads[..., : c.n_heads + c.n_kv_heads, :], cos, sin).split([c.n_heads, c.n_kv_heads], dim=-2)
            return q, k, v
        return rope(self.q_norm(q), cos, sin), rope(self.k_norm(k), cos, sin), v


# ---------------------------------------------------------------------------------------------------------------------
# Cache and packing


class KVCache:
    """Keys and values of `slots` requests, each up to `max_len` positions: k[layer] is (slots, max_len, J, d).

    Holds no lengths: who owns the request knows how far it has come, and rows only ever see positions <= their own.
    """

    def __init__(self, n_layers, slots, max_len, n_kv_heads, head_dim, dtype, device):
        self.shape = (slots, max_len)
        self.k = [torch.zeros(slots, max_len, n_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(n_layers)]
        self.v = [torch.zeros_like(k) for k in self.k]

    def write(self, layer, rows, k, v):
        """Store k and v (N, J, d) at each row's [slot, position]."""
        if rows.one_run is not None:  # one request, consecutive positions: a slice is cheaper than an index
            slot, first, last = rows.one_run
            self.k[layer][slot, first:last], self.v[layer][slot, first:last] = k, v
        else:
            self.k[layer][rows.slots, rows.positions] = k
            self.v[layer][rows.slots, rows.positions] = v

    def clear(self, slot, end):
        """Zero a slot's positions before `end`, for its next tenant."""
        for x in self.k + self.v:
            x[slot, :end] = 0

    def read(self, layer, rows):
        """(S, L, J, d) over the slots of the grid and the positions that any row can see; views where the slots are a run."""
        return self.k[layer][rows.grid_slots, : rows.length], self.v[layer][rows.grid_slots, : rows.length]


class Rows:
    """N packed rows of several requests, and the padded (S, T) grid in which attention sees them. Say slot 0 holds 5 tokens and
    runs 3 rows, slot 2 holds 9 and runs 1, slot 1 rests:

        slots      0 0 0 2        grid   r0 r1 r2   slot 0       N = 4 rows, S = 3 lines, T = 3
        positions  5 6 7 9               .  .  .    slot 1       length L = 10; row r0 sees keys 0..5 of slot 0
                                         r3 .  .    slot 2

    slots, positions (N,) int64, sorted by slot. All but attention works on the N real rows, and only those are written, so padding
    costs nothing there and touches nobody.
    sees (N,)   last cached position a row may look at: its own (causal), or for a draft block the block's end
    full        no padding: the grid is a view.   all_seen: no mask either.   one_run: one slot, consecutive: slices, not indices
    grid_slots  a slice, so the cache is read in place; where most lines would be empty (slots 3 and 60) a list, and it is copied
    """

    def __init__(self, slots, positions, dtype, sees=None):
        self.slots, self.positions = slots, positions
        slot_list, position_list = slots.tolist(), positions.tolist()
        assert slot_list == sorted(slot_list), "rows must be sorted by slot"  # else the grid would mix requests, silently
        assert slot_list[0] >= 0 and min(position_list) >= 0, "negative slot or position"
        sees_list = position_list if sees is None else sees.tolist()
        lo, self.hi, self.length = slot_list[0], slot_list[-1] + 1, max(sees_list) + 1
        used = list(dict.fromkeys(slot_list))
        sparse = 2 * len(used) < self.hi - lo
        line = {s: i for i, s in enumerate(used if sparse else range(lo, self.hi))}  # slot -> its line of the grid
        self.grid_slots = torch.tensor(used, device=slots.device) if sparse else slice(lo, self.hi)
        counts, index = [0] * len(line), []
        for s in slot_list:
            index.append((line[s], counts[line[s]]))  # a row's place: its line, and among the rows of its slot
            counts[line[s]] += 1
        self.S, self.T, N = len(line), max(counts), len(slot_list)
        first = position_list[0]
        consecutive = self.S == 1 and position_list == list(range(first, first + N))
        self.one_run = (slot_list[0], first, first + N) if consecutive else None
        self.full = self.S * self.T == N  # every slot has the same number of rows: the grid is a reshape
        if not self.full:
            self.index = torch.tensor([i * self.T + k for i, k in index], device=slots.device)  # (N,) places in the grid
        self.all_seen = self.full and min(sees_list) == self.length - 1
        self.sees, self.dtype = positions if sees is None else sees, dtype

    @cached_property
    def mask(self):
        """Additive (S, T, L), or None where every row sees every key: plain decoding of one request, a draft block.

        Made on first use: rows that are only written to a cache never need it."""
        if self.all_seen:
            return None
        sees = self.sees
        if not self.full:
            sees = sees.new_zeros(self.S * self.T).index_copy(0, self.index, sees)  # a padded row sees key 0
        hidden = torch.arange(self.length, device=sees.device) > sees[:, None]  # (S * T, L)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=sees.device).masked_fill_(hidden, float("-inf"))
        return mask.view(-1, self.T, self.length)

    def to_grid(self, x):
        """(N, ..) -> (S, T, ..)"""
        if self.full:
            return x.view(self.S, self.T, *x.shape[1:])
        return x.new_zeros(self.S * self.T, *x.shape[1:]).index_copy(0, self.index, x).view(self.S, self.T, *x.shape[1:])

    def from_grid(self, x):
        """(S, T, D) -> (N, D)"""
        x = x.flatten(0, 1)
        return x if self.full else x[self.index]


# ---------------------------------------------------------------------------------------------------------------------
# The model


class Layer(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(c.d_model, c.norm_eps), Attention(c)
        self.mlp_norm, self.mlp = RMSNorm(c.d_model, c.norm_eps), SwiGLU(c.d_model, c.d_ff)

    def forward(self, x, index, rows, cache, cos, sin):
        q, k, v = self.attn.project(self.attn_norm(x), cos, sin)  # x (N, D) -> (N, H, d), (N, J, d) twice
        cache.write(index, rows, k, v)  # before reading: a row sees itself and the draft rows before it
        x = x + self.attn.out(rows.from_grid(attend(rows.to_grid(q), *cache.read(index, rows), rows.mask)))
        return x + self.mlp(self.mlp_norm(x))


class Target(nn.Module):
    def __init__(self, c: TargetConfig):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.n_layers)])
        self.norm = RMSNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight
        self.set_rope()

    def set_rope(self):
        c = self.config
        cos, sin = rope_table(c.max_len, c.head_dim, c.rope_base, c.rope_scaling)
        self.register_buffer("cos", cos, persistent=False)  # not weights: computed, never stored
        self.register_buffer("sin", sin, persistent=False)

    @property
    def dtype(self):
        return self.norm.weight.dtype

    @property
    def device(self):
        return self.norm.weight.device

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        c = self.config
        assert max_len <= c.max_len, f"cache of {max_len} positions, but the model was built for {c.max_len}"
        return KVCache(c.n_layers, slots, max_len, c.n_kv_heads, c.head_dim, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens, slots, positions, cache, feature_layers=(), logit_rows=None):
        """tokens, slots, positions (N,) int64 -> (logits (N', V) float32, features (N, m * D)).

        logit_rows   which rows need logits (N' of them; None: all). Prefill needs only the last of each prompt, and the
                     head is a fifth of this model's arithmetic.
        feature_layers  0-based layer numbers; a feature is the residual stream after that layer, and after -1 the embedding.
        """
        x, features = self.hidden(tokens, slots, positions, cache, feature_layers)
        logits = self.head(x if logit_rows is None else x[logit_rows])
        return (logits if logits.dtype == torch.float64 else logits.float()), features  # probabilities are never made in bf16

    def hidden(self, tokens, slots, positions, cache, feature_layers=()):
        """The forward without the head: (normed last hidden state (N, D), features (N, m * D))."""
        assert tokens.shape == slots.shape == positions.shape and tokens.ndim == 1, "rows are three (N,) tensors"
        rows = Rows(slots, positions, self.dtype)
        known = range(-1, self.config.n_layers)
        assert list(feature_layers) == sorted(set(feature_layers) & set(known)), "feature layers: rising, without repeats"
        assert rows.hi <= cache.shape[0] and rows.length <= cache.shape[1], "a row lies outside the cache"
        cos, sin = self.cos[positions][:, None].to(self.dtype), self.sin[positions][:, None].to(self.dtype)  # (N, 1, d)
        x = self.embed(tokens)  # (N, D)
        features = [x] if -1 in feature_layers else []
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rows, cache, cos, sin)
            if i in feature_layers:
                features.append(x)
        return self.norm(x), torch.cat(features, dim=-1) if features else x.new_zeros(len(x), 0)


def packed_product(weight, bias=None):
    """x -> x weight^T + bias (weight (out, in) bf16 on a CPU), with the weight reordered once for the processor's matrix kernels; None
    where that cannot be had.

    F.linear hands oneDNN the plain layout, and for a few rows it then moves 270 MB of weights at a third of the speed that the
    same library reaches from its own blocked one. Same numbers, to the bit, wherever we looked. The operator is the one that
    torch.compile's frozen graphs call: not public, so it is tried, not trusted.
    """
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 8)  # 8: rows to expect, a hint

        def product(x):
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

        probe = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device).view(2, -1).to(weight.dtype)
        return product if torch.allclose(product(probe), F.linear(probe, weight, bias), rtol=0.02, atol=0.02) else None
    except (RuntimeError, AttributeError):  # another PyTorch, another processor
        return None


def pack(module):
    """Give every linear layer of a finished bf16 model on a CPU its packed product. The weights stay where they are, for whoever
    reads them; a model that is moved or cast afterwards would go on using the old ones."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu" and layer.weight.numel():
            if (product := packed_product(layer.weight, layer.bias)) is not None:
                layer.forward = product  # on this instance: __call__ finds it first


def keep_freed_memory():
    """Tell glibc to keep large freed blocks. By default each goes back to the kernel and the next one is paged in anew,
    zeroed, 4 kB at a time: with the tens of MB that a training step or a prompt allocates, that costs more than the products.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**31 - 1)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**28)  # M_TOP_PAD: grow by 256 MB at a time
    except (OSError, AttributeError):
        pass  # another C library: slower, not wrong


def tiny_target(vocab_size=64, seed=0, max_len=128, **kw) -> Target:
    """A small random model for tests and for reading: the same code, none of the weight."""
    torch.manual_seed(seed)
    c = TargetConfig(vocab_size, n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_len=max_len, **kw)
    model = Target(c).eval().requires_grad_(False)
    for p in model.parameters():
        if p.ndim == 2:
            p.mul_(3 if p is model.embed.weight else 2)  # sharper than the default: argmax has margins, sampling has variety
    return model


if __name__ == "__main__":
    model, n = tiny_target().double(), 20
    tokens, zeros, positions = torch.randint(64, (n,)), torch.zeros(n, dtype=torch.long), torch.arange(n)
    whole, _ = model(tokens, zeros, positions, model.new_cache(1, n))
    cache = model.new_cache(1, n)
    steps = torch.cat([model(tokens[i : i + 3], zeros[i : i + 3], positions[i : i + 3], cache)[0] for i in range(0, n, 3)])
    print(f"{n} rows at once and three at a time: largest difference {(whole - steps).abs().max():.2e}")

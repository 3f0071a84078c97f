"""The DSpark drafter: a parallel backbone, a light sequential head, a confidence head (Sec. 2.2, 3.1, 3.2.1; Eq. 2-7).

What     From the anchor x_0 (the newest token, not yet run through the target) and the target's hidden states of all tokens
         before it, propose G draft tokens and say how likely each is to be accepted.
         1. context   H_ctx = RMSNorm(W_c [H(l1); ..; H(lm)])                    once per committed token   (Eq. 2)
         2. backbone  a few layers over the block [x_0, mask, .., mask] whose keys and values are [W H_ctx ; W H_block]:
                      all context, and the block itself in both directions        once per cycle             (Eq. 3)
         3. head      p_k = softmax(U_k + B(x_<k)), sampled left to right         G small steps              (Eq. 4-6)
         4. confidence c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b)                   once per cycle             (Eq. 7)
State    a KVCache of its own. Its invariant: positions before the anchor hold keys and values of committed tokens. The block's
         own are written at the anchor and after it, as scratch that the next extend() overwrites.
Vocabulary  draft tokens come from draft_ids, the K most frequent ids (K = V: all); p_draft is zero elsewhere. Embedding and
         head are the target's, frozen; the K rows of the head are selected once. On a small model they are most of T_draft.
         (A released drafter brings its own; so it may its layers' shape: deepspec.py.)
Letters  R requests, G draft positions, N rows, D width, m feature layers, V vocabulary, K draft vocabulary, r rank.
Alone    python drafter.py    (a tiny random drafter proposes for a tiny random target)
"""
import json
import os
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from target import KVCache, Layer, RMSNorm, Rows, Target, TargetConfig, attend, pack, packed_product, rope, rope_table, tiny_target
from verify import logits_to_probs, sample

HEADS = ("none", "markov", "gated", "rnn")
KINDS = (*HEADS, "eagle")  # eagle is baselines.py's


@dataclass
class DrafterConfig:
    gamma: int = 7                                # trained block length: a longer block is refused, a shorter one works
    n_layers: int = 2
    feature_layers: tuple[int, ...] = (2, 15, 27)  # 0-based target layers, never its last (Sec. 2.2); -1: its embedding
    head: str = "markov"                          # gated and rnn see h_k too; none is DFlash; eagle is in baselines.py
    rank: int = 96                                # r of the sequential head; 0 where there is none

    anchor_state: bool = False                    # ours: the block's inputs also read H_ctx of the newest committed token

    def __post_init__(self):
        self.anchor_state |= self.head == "eagle"  # its chain begins there
        self.feature_layers = tuple(self.feature_layers)  # a list when read from JSON
        if self.head not in ("markov", "gated", "rnn"):
            self.rank = 0  # no W1, no W2: nothing to store, nothing to count


@dataclass
class Draft:
    """What a drafter hands to the engine. p_draft is the very tensor that tokens were sampled from (verify.py needs that)."""

    tokens: torch.Tensor      # (R, G) target ids
    p_draft: torch.Tensor     # (R, G, K), p_draft of draft_ids
    confidence: torch.Tensor  # (R, G) float32, raw c_k; calibration is the scheduler's matter
    draft_ids: torch.Tensor | None  # (K,) ascending target ids of p_draft's columns; None: all of them, K = V


class SequentialHead(nn.Module):
    """B(x_<k) = W2 code_k, where code_k (r wide) depends on the token before and, for gated and rnn, on h_k and the past.

    W1 is looked up by target id. Ids that are never drafted share one row: as anchors they are too rare to learn apart.
    """

    def __init__(self, kind: str, d: int, rank: int, K: int):
        super().__init__()
        self.kind = kind
        self.W1 = nn.Embedding(K + 1, rank)
        self.W2 = nn.Linear(max(rank, 1), K, bias=False)
        if rank == 0:  # no head: the same code, with a bias that is a sum over nothing
            self.W2.weight = nn.Parameter(torch.empty(K, 0))
        if kind == "gated":
            self.gate = nn.Linear(d + rank, rank)
        if kind == "rnn":
            self.joint = nn.Linear(2 * rank + d, 3 * rank)  # W_g, W_c, W_o of Eq. 6 in one product; the paper has no bias

    def step(self, previous, h, state):
        """previous (.., r) = W1[x_{k-1}], h (.., D), state (.., r) -> code (.., r), next state (.., r)."""
        if self.kind == "gated":  # in the authors' code, not in the paper
            return previous * torch.sigmoid(self.gate(torch.cat([h, previous], dim=-1))), state
        if self.kind == "rnn":  # Eq. 6
            g, c, o = self.joint(torch.cat([state, previous, h], dim=-1)).chunk(3, dim=-1)
            g = torch.sigmoid(g)
            return torch.tanh(o), g * state + (1 - g) * torch.tanh(c)
        return previous, state  # Eq. 5; without a head it is 0 wide


class Drafter(nn.Module):
    def __init__(self, config: DrafterConfig, target: Target, draft_ids: torch.Tensor, shape: TargetConfig | None = None):
        """draft_ids (K,) int64 ascending: the ids that can be drafted. Embedding and head rows are the target's; so are the sizes of a
        layer (heads, d_ff, q/k norm, rotation), unless a checkpoint brings its own shape. Width and vocabulary are shared always."""
        super().__init__()
        c, t = config, shape or target.config
        assert c.head in KINDS, f"head must be one of {KINDS}"
        layers = list(c.feature_layers)
        assert layers and layers == sorted(set(layers) & set(range(-1, t.n_layers - 1))), (
            "feature layers: 0-based (-1: the embedding), rising, never the target's last")
        assert isinstance(c.gamma, int) and c.gamma >= 1 and 1 <= c.n_layers <= t.n_layers, "gamma and layers: at least 1"
        assert (draft_ids[1:] > draft_ids[:-1]).all() and draft_ids[0] >= 0 and draft_ids[-1] < t.vocab_size, (
            "draft_ids: ascending ids of the target's vocabulary")
        self.config, self.target_config = config, t  # t: the shape of this drafter's layers
        self.gamma, self.feature_layers = c.gamma, tuple(c.feature_layers)  # what the engine reads
        self.context_proj = nn.Linear(len(c.feature_layers) * t.d_model, t.d_model, bias=False)  # W_c
        self.context_norm = RMSNorm(t.d_model, t.norm_eps)
        self.mask = nn.Parameter(torch.randn(t.d_model) * 0.02)  # the embedding of "a token to be drafted"
        self.layers = nn.ModuleList([Layer(t) for _ in range(c.n_layers)])
        self.norm = RMSNorm(t.d_model, t.norm_eps)
        if c.anchor_state:
            self.token_norm, self.state_norm = RMSNorm(t.d_model, t.norm_eps), RMSNorm(t.d_model, t.norm_eps)
            self.join = nn.Linear(2 * t.d_model, t.d_model, bias=False)
        K = len(draft_ids)
        self.head = SequentialHead(c.head, t.d_model, c.rank, K)
        self.confidence = nn.Linear(t.d_model + c.rank, 1)
        # Buffers, not parameters: frozen, and not stored with the drafter's weights.
        cos, sin = rope_table(t.max_len + c.gamma, t.head_dim, t.rope_base, t.rope_scaling)
        w1_row = torch.full((t.vocab_size,), K)  # target id -> row of W1
        w1_row[draft_ids] = torch.arange(K)
        rows = target.head.weight.detach()
        for name, value in dict(cos=cos, sin=sin, w1_row=w1_row, draft_ids=draft_ids, embed=target.embed.weight.detach(),
                                head_rows=rows if K == t.vocab_size else rows[draft_ids]).items():
            self.register_buffer(name, value, persistent=False)

    @property
    def dtype(self):
        return self.norm.weight.dtype

    # ----- what the engine calls ---------------------------------------------------------------------------------------

    def new_cache(self, slots: int, max_len: int) -> KVCache:
        t = self.target_config
        # a block may reach up to gamma positions past the last token
        cache = KVCache(len(self.layers), slots, max_len + self.gamma, t.n_kv_heads, t.head_dim, self.dtype, self.norm.weight.device)
        cache.state = torch.zeros(slots, t.d_model, dtype=self.dtype, device=self.norm.weight.device)  # H_ctx before each slot's anchor
        return cache

    @torch.inference_mode()
    def extend(self, tokens, features, slots, positions, cache):
        """Add committed tokens (N,) at slots, positions (N,) to the context, by the target's features (N, m * D). Never rejected ones.

        (The features say all that this drafter reads; those of baselines.py look at the tokens too.)"""
        rows = Rows(slots, positions, features.dtype)
        context = self.context(features)
        ends = torch.cat([slots[1:] != slots[:-1], slots.new_ones(1, dtype=torch.bool)])  # a slot's last row
        cache.state[slots[ends]] = context[ends]
        cos, sin = self.rotation(positions)
        for i, layer in enumerate(self.layers):
            cache.write(i, rows, *self.context_kv(layer, context, cos, sin))

    @torch.inference_mode()
    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0) -> Draft:
        """Draft one block per request.

        anchors, slots, positions (R,): x_0, its slot (rising) and its true position; the context is what lies before it.
        u (R, gamma) uniforms that draw the tokens; temperature, top_k, top_p: numbers or (R,) tensors. The draft is filtered
        as the target is: the output law does not depend on it, but tau does.
        """
        R, G = len(anchors), gamma
        assert 1 <= G <= self.gamma, f"the drafter was trained for blocks of 1 to {self.gamma}, not {G}"
        h = self.block(anchors, slots, positions, cache, G)  # (R, G, D)
        U = self.unembed(h)  # (R, G, K)
        token, state = anchors, h.new_zeros(R, self.config.rank)
        tokens, probs, previous = [], [], []
        for k in range(G):  # the sequential part: one lookup, one r x K product and one draw per position
            previous.append(self.head.W1(self.w1_row[token]))
            code, state = self.head.step(previous[k], h[:, k], state)
            # Eq. 4: p_k = softmax(U_k + B(x_<k)), then temperature and filters
            probs.append(logits_to_probs(U[:, k] + self.head.W2(code), temperature, top_k, top_p))
            token = self.draft_ids[sample(probs[k], u[:, k])]
            tokens.append(token)
        confidence = self.confidence_logit(h, torch.stack(previous, 1)).float().sigmoid()
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1), confidence, self.draft_ids)

    def unembed(self, h):
        """h (.., D) -> logits of the draft ids (.., K), by their rows of the target's head."""
        return F.linear(h, self.head_rows)

    def pack(self):
        """See target.pack(): for a finished drafter, on a CPU in bf16."""
        pack(self)
        if self.dtype == torch.bfloat16 and self.head_rows.device.type == "cpu":
            self.unembed = packed_product(self.head_rows) or self.unembed
        return self

    # ----- the pieces, shared with training ----------------------------------------------------------------------------

    def rotation(self, positions):
        """cos and sin (.., 1, d of a head) in the drafter's dtype."""
        return (table[positions].unsqueeze(-2).to(self.dtype) for table in (self.cos, self.sin))

    def context(self, features):
        """features (.., m * D) -> H_ctx (.., D), Eq. 2."""
        return self.context_norm(self.context_proj(features))

    def context_kv(self, layer, context, cos, sin):
        """H_ctx (.., D) -> the layer's keys and values (.., J, d) of the context, by the same W_k and W_v as the block's (Eq. 3).

        H_ctx is normed already (Eq. 2); the layer's own norm is for the block's hidden states."""
        attn, t = layer.attn, self.target_config
        kv = F.linear(context, attn.qkv.weight[t.n_heads * t.head_dim :]).unflatten(-1, (-1, t.head_dim))
        k, v = kv.chunk(2, dim=-2)
        return rope(attn.k_norm(k), cos, sin), v

    def enter(self, x, state):
        """Input x (.., D) joined with the state (.., D) of the position before: (.., D). Only where anchor_state is set."""
        return self.join(torch.cat([self.token_norm(x), self.state_norm(state)], dim=-1))

    def block_input(self, anchors, G, state):
        """Embedding of the anchor, then G - 1 masks: (.., G, D). Input j (from 0) already predicts x_{j+1}: the anchor's own drafts x_1.

        state (.., D): H_ctx of the token before the anchor. The paper's block sees it through attention alone; with anchor_state
        it is also joined to every input, as an autoregressive drafter's first step has it."""
        masks = self.mask.expand(*anchors.shape, G - 1, -1)
        x = torch.cat([F.embedding(anchors, self.embed).to(masks.dtype).unsqueeze(-2), masks], dim=-2)
        return self.enter(x, state.unsqueeze(-2).expand_as(x)) if self.config.anchor_state else x

    def block(self, anchors, slots, positions, cache, G):
        """The parallel backbone with a cache: hidden states (R, G, D). Input j stands at its true position, anchor + j."""
        places = positions[:, None] + torch.arange(G, device=anchors.device)  # (R, G)
        sees = (positions + G - 1).repeat_interleave(G)  # every row sees the context and the whole block
        rows = Rows(slots.repeat_interleave(G), places.flatten(), self.dtype, sees)
        cos, sin = self.rotation(rows.positions)
        x = self.block_input(anchors, G, cache.state[slots]).flatten(0, 1)  # (R * G, D)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rows, cache, cos, sin)
        return self.norm(x).view(len(anchors), G, -1)

    def confidence_logit(self, h, previous):
        """h (.., D), previous (.., r) = W1[x_{k-1}] -> (..). It never sees x_k itself: that is what keeps Sec. 3.2 lossless."""
        if self.confidence is None:  # a checkpoint without this head says nothing: certainty, so that whole blocks are verified
            return h.new_full(h.shape[:-1], float("inf"))
        return self.confidence(torch.cat([h, previous], dim=-1)).squeeze(-1)

    # ----- training form: many anchors per sequence, teacher forced ----------------------------------------------------

    def forward(self, features, tokens, anchors):
        """features (B, L, m * D), tokens (B, L), anchors (B, A) positions -> h (B, A, G, D), code and previous (B, A, G, r).

        Every anchor's block sees the context before that anchor and itself, as in block(); its previous tokens are the
        true ones. Logits are h head_rows^T + code W2: left to the caller, which may need only some of the rows.
        Anchors must satisfy anchor + G <= L - 1 or have their labels masked by the caller.
        """
        (B, L), A, G = tokens.shape, anchors.shape[1], self.gamma
        dtype, device = self.dtype, tokens.device
        context = self.context(features.to(dtype))
        cos, sin = self.rotation(torch.arange(L, device=device))
        places = (anchors[:, :, None] + torch.arange(G, device=device)).flatten(1)  # (B, A * G) true positions
        block_cos, block_sin = self.rotation(places)
        # keys: L of the context, then A * G of all blocks; a block sees keys before its anchor, and its own
        owner = torch.arange(A, device=device).repeat_interleave(G)
        before = torch.arange(L, device=device) < anchors.repeat_interleave(G, 1)[:, :, None]  # (B, A * G, L)
        own = (owner[:, None] == owner).expand(B, -1, -1)  # (B, A * G, A * G)
        visible = torch.cat([before, own], dim=-1)
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        # H_ctx of the position before; an anchor that begins the text has none
        state = F.pad(context, (0, 0, 1, -1)).gather(1, anchors[..., None].expand(-1, -1, context.shape[-1]))  # (B, A, D)
        x = self.block_input(tokens.gather(1, anchors), G, state).flatten(1, 2)  # (B, A * G, D)
        for layer in self.layers:
            k_ctx, v_ctx = self.context_kv(layer, context, cos, sin)
            q, k, v = layer.attn.project(layer.attn_norm(x), block_cos, block_sin)
            x = x + layer.attn.out(attend(q, torch.cat([k_ctx, k], 1), torch.cat([v_ctx, v], 1), mask))
            x = x + layer.mlp(layer.mlp_norm(x))
        h = self.norm(x).unflatten(1, (A, G))
        given = tokens.gather(1, places.clamp(max=L - 1)).view(B, A, G)  # x_{k-1}: position anchor + k - 1
        previous = self.head.W1(self.w1_row[given])  # (B, A, G, r)
        if self.config.head != "rnn":
            return h, self.head.step(previous, h, None)[0], previous
        codes, state = [], previous.new_zeros(B, A, self.config.rank)
        for k in range(G):  # the only head with memory: position by position
            code, state = self.head.step(previous[:, :, k], h[:, :, k], state)
            codes.append(code)
        return h, torch.stack(codes, 2), previous


# ---------------------------------------------------------------------------------------------------------------------
# Making, saving, loading


def model_class(config: DrafterConfig):
    """Drafter, or the baseline that this configuration names."""
    if config.head == "eagle":
        from baselines import Eagle  # it is built from this file's parts
        return Eagle
    return Drafter


def from_target(config: DrafterConfig, target: Target, draft_ids) -> Drafter:
    """A fresh drafter that starts as the target's last layers: their weights already read such hidden states."""
    drafter = model_class(config)(config, target, draft_ids)
    n, D = config.n_layers, target.config.d_model
    for layer, source in zip(drafter.layers, target.layers[-n:]):
        layer.load_state_dict(source.state_dict())
    drafter.norm.load_state_dict(target.norm.state_dict())
    with torch.no_grad():
        # H_ctx starts as the deepest feature, scaled as the first of those layers expects its input
        drafter.context_proj.weight.zero_()
        drafter.context_proj.weight[:, -D:] = torch.eye(D)
        drafter.context_norm.weight.copy_(target.layers[-n].attn_norm.weight)
        nn.init.zeros_(drafter.head.W2.weight)  # the bias B starts at nothing and the backbone's logits alone decide
        nn.init.zeros_(drafter.confidence.weight)
        if config.anchor_state:  # likewise: starts as the state of the position before; a block's inputs must also differ from the start
            drafter.join.weight.zero_()
            drafter.join.weight[:, D:] = torch.eye(D)
            if config.head != "eagle":
                drafter.join.weight[:, :D] = torch.eye(D)
        if config.head != "eagle":
            drafter.mask.copy_(target.embed.weight.float().mean(0))
    return drafter


def save(drafter: Drafter, path):
    """One safetensors file is one drafter: weights, configuration, draft_ids. Matrices as int8 with a scale per row: half the size, an
    error of at most 0.4 % of the row's largest weight; and whatever a drafter is, the output keeps its law. The rest in float32."""
    tensors = {"draft_ids": drafter.draft_ids.to(torch.int32).cpu()}
    for name, p in drafter.named_parameters():
        w = p.detach().float().cpu().contiguous()
        if w.ndim == 2 and w.shape[0] > 1 and w.shape[1] > 0:
            scale = w.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127  # (rows, 1)
            tensors[f"{name}.scale"], w = scale, (w / scale).round().to(torch.int8)
        tensors[name] = w
    part = f"{path}.part"
    save_file(tensors, part, metadata={"config": json.dumps(asdict(drafter.config))})
    os.replace(part, path)  # whole or not at all


def load(path, target: Target, packed=True) -> Drafter:
    """Read a drafter and put it beside its target: same dtype, same device; packed (target.pack) unless it is to be trained or
    cast. A folder is a checkpoint in the DeepSpec format (deepspec.py). Raises ValueError with a remedy."""
    if os.path.isdir(path):
        from deepspec import load_drafter  # it is built from this file's parts
        return load_drafter(path, target, packed)
    try:
        with safe_open(path, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}
            config = DrafterConfig(**json.loads(f.metadata()["config"]))
        drafter = model_class(config)(config, target, tensors.pop("draft_ids").long().to(target.device))
        for name in [n for n in tensors if n.endswith(".scale")]:  # int8 rows; files without scales hold plain weights
            scale = tensors.pop(name)
            tensors[name.removesuffix(".scale")] = tensors[name.removesuffix(".scale")].float() * scale
        drafter.load_state_dict({name: t.to(target.dtype) for name, t in tensors.items()}, assign=True)
    except FileNotFoundError:
        raise ValueError(f"no drafter at {path}: train one with 'python train.py fit', or pass --drafter none")
    except Exception as error:  # truncated file, other shapes, other keys: the remedy is the same
        raise ValueError(f"{path} is not a drafter for this target ({' '.join(str(error).split())[:200]}): restore or retrain it")
    drafter = drafter.to(target.device).eval().requires_grad_(False)
    return drafter.pack() if packed else drafter


def shift_confidence(path, by: float):
    """Add to the confidence head's bias in a drafter's file; nothing else in it moves."""
    with safe_open(path, framework="pt") as f:
        tensors, metadata = {name: f.get_tensor(name) for name in f.keys()}, f.metadata()
    tensors["confidence.bias"] = tensors["confidence.bias"].float() + by
    save_file(tensors, f"{path}.part", metadata=metadata)
    os.replace(f"{path}.part", path)


def tiny_drafter(target: Target, gamma=3, head="markov", K=None, seed=1) -> Drafter:
    """A random drafter for tests: its proposals are bad, which is what a proof that quality does not matter needs."""
    torch.manual_seed(seed)
    V = target.config.vocab_size
    ids = torch.randperm(V)[:K].sort().values if K else torch.arange(V)
    config = DrafterConfig(gamma, n_layers=1, feature_layers=(0, 1), head=head, rank=8)
    drafter = model_class(config)(config, target, ids)
    return drafter.to(target.dtype).eval().requires_grad_(False)


if __name__ == "__main__":
    target = tiny_target()
    drafter, cache, n = tiny_drafter(target, K=32), target.new_cache(1, 64), 10
    tokens, slots, positions = torch.randint(64, (n,)), torch.zeros(n, dtype=torch.long), torch.arange(n)
    logits, features = target(tokens, slots, positions, cache, drafter.feature_layers)
    draft_cache = drafter.new_cache(1, 64)
    drafter.extend(tokens, features, slots, positions, draft_cache)
    draft = drafter.propose(logits[-1:].argmax(-1), slots[:1], positions[-1:] + 1, draft_cache, 3, torch.rand(1, 3), 1.0)
    print(f"after {n} tokens: draft tokens {draft.tokens.tolist()}, confidence {draft.confidence.tolist()}")

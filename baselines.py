"""What DSpark is compared with: other drafters behind the same interface, so that engine, scheduler and bench take any.

    DFlash          drafter.py with head "none": the parallel backbone alone                             (Sec. 2.2)
    gated, rnn      drafter.py with those heads                                                          (Eq. 6)
    Eagle           autoregressive: one layer runs once per draft token, over its own states, in the style of Eagle-3. Verified
                    to length 1 it is MTP-1, the baseline of Fig. 7
    Eagle3          the same chain with the layer of released Eagle-3 drafters, which checkpoints.py reads
    PromptLookup    no network: copies what followed the last occurrence of the newest tokens. The free baseline

Interface  gamma, feature_layers, dtype; new_cache(slots, max_len); extend(tokens, features, slots, positions, cache) with what was
           committed; propose(..) -> Draft; and to be trained: forward(features, tokens, anchors) -> h, code, previous.
Letters    R requests, G draft positions, N rows, D width, m feature layers, B dialogues, L tokens, A anchors, K draft vocabulary.
Alone      python baselines.py    (PromptLookup on a text that repeats itself)
"""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from drafter import Draft, Drafter
from target import Layer, RMSNorm, Rows, attend
from verify import logits_to_probs, sample


class Eagle(Drafter):
    """One decoder layer that drafts token by token. The row of token x_t reads x_t and the *state* of the position before:

        row t     = W_join [norm(embedding of x_t) ; norm(state of t - 1)]       -> layer -> state of t -> head: p_draft of x_{t+1}
        state     of a committed token: the target's features there, fused (Eq. 2). Of a drafted one: the layer's own output.

    Training runs the same chain for G steps over its own states (teacher-forced tokens), so that it meets its own errors
    (Eagle-3's training-time test). Weights shared with Drafter: fusion, layer, final norm, confidence; mask and head are not used.
    """

    def __init__(self, config, target, draft_ids, shape=None):
        assert config.n_layers == 1, "this drafter has one layer: more would have to run over the whole context"
        super().__init__(config, target, draft_ids, shape)
        del self.mask

    def row(self, tokens, state):
        """tokens (..), state (.., D) of the position before -> input of the layer (.., D)."""
        return self.enter(F.embedding(tokens, self.embed).to(state.dtype), state)

    @torch.inference_mode()
    def extend(self, tokens, features, slots, positions, cache):
        fused = self.context(features)  # (N, D)
        # the state before a row is the row before it; before a slot's first row, what its last extend() left, or a text's beginning
        before = torch.cat([fused[:1], fused[:-1]])
        begins = torch.cat([slots.new_ones(1, dtype=torch.bool), slots[1:] != slots[:-1]])
        before[begins] = cache.state[slots[begins]]
        before[positions == 0] = 0
        ends = begins.roll(-1)  # begins[0] is True: so is the last row's end
        cache.state[slots[ends]] = fused[ends]
        self.write(tokens, before, slots, positions, cache)

    def write(self, tokens, before, slots, positions, cache):
        """Keys and values of committed rows are all that later rows read, and they need neither attention nor MLP."""
        layer, (cos, sin) = self.layers[0], self.rotation(positions)
        x = layer.attn_norm(self.row(tokens, before))
        cache.write(0, Rows(slots, positions, self.dtype), *self.context_kv(layer, x, cos, sin))

    @torch.inference_mode()
    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        assert 1 <= gamma <= self.gamma, f"the drafter was trained for blocks of 1 to {self.gamma}, not {gamma}"
        token, state = anchors, cache.state[slots]
        tokens, probs, hidden = [], [], []
        for k in range(gamma):  # a whole pass of the layer per position: what the parallel backbone does once
            rows = Rows(slots, positions + k, self.dtype)
            # (R, D); the row's keys and values are scratch that the next extend() overwrites
            state = self.layers[0](self.row(token, state), 0, rows, cache, *self.rotation(rows.positions))
            hidden.append(self.norm(state))
            probs.append(logits_to_probs(self.unembed(hidden[k]), temperature, top_k, top_p))
            token = self.draft_ids[sample(probs[k], u[:, k])]
            tokens.append(token)
        h = torch.stack(hidden, 1)  # (R, G, D)
        confidence = self.confidence_logit(h, h[..., :0]).float().sigmoid()
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1), confidence, self.draft_ids)

    def forward(self, features, tokens, anchors):
        """As Drafter.forward: features (B, L, m * D), tokens (B, L), anchors (B, A) -> h (B, A, G, D), code and previous (.., 0)."""
        (B, L), A, layer = tokens.shape, anchors.shape[1], self.layers[0]
        before = F.pad(self.context(features.to(self.dtype)), (0, 0, 1, -1))  # (B, L, D): of the position before; zero at the beginning
        cos, sin = self.rotation(torch.arange(L, device=tokens.device))
        k_ctx, v_ctx = self.context_kv(layer, layer.attn_norm(self.row(tokens, before)), cos, sin)
        # keys: L of the context, of which an anchor sees those before it, then A of each step so far, of which it sees its own
        seen = torch.arange(L, device=tokens.device) < anchors[:, :, None]  # (B, A, L)
        own = torch.eye(A, dtype=torch.bool, device=tokens.device).expand(B, A, A)
        state = before.gather(1, anchors[..., None].expand(-1, -1, before.shape[-1]))  # (B, A, D)
        keys, values, hidden = [k_ctx], [v_ctx], []
        for k in range(self.gamma):
            x = self.row(tokens.gather(1, (anchors + k).clamp(max=L - 1)), state)
            q, key, value = layer.attn.project(layer.attn_norm(x), *self.rotation(anchors + k))
            keys.append(key), values.append(value)
            visible = torch.cat([seen] + [own] * (k + 1), dim=-1)  # (B, A, L + A * (k + 1))
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
            x = x + layer.attn.out(attend(q, torch.cat(keys, 1), torch.cat(values, 1), mask))
            state = x + layer.mlp(layer.mlp_norm(x))
            hidden.append(self.norm(state))
        h = torch.stack(hidden, 2)
        return h, h[..., :0], h[..., :0]


class PairNorm(nn.Module):
    """[embedding ; state] (.., 2 D) -> each half normed by itself."""

    def __init__(self, d, eps):
        super().__init__()
        self.token, self.state = RMSNorm(d, eps), RMSNorm(d, eps)

    def forward(self, row):
        token, state = row.chunk(2, dim=-1)
        return torch.cat([self.token(token), self.state(state)], dim=-1)


class Eagle3Layer(Layer):
    """Attention over [norm(embedding) ; norm(state)], 2 D wide, added to the state; the MLP as ever. A row (.., 2 D) in, a state out."""

    def __init__(self, t):
        super().__init__(t)
        self.attn.qkv = nn.Linear(2 * t.d_model, self.attn.qkv.out_features, bias=False)
        self.attn_norm = PairNorm(t.d_model, t.norm_eps)

    def forward(self, row, index, rows, cache, cos, sin):
        q, k, v = self.attn.project(self.attn_norm(row), cos, sin)
        cache.write(index, rows, k, v)
        state = row.chunk(2, dim=-1)[1]
        x = state + self.attn.out(rows.from_grid(attend(rows.to_grid(q), *cache.read(index, rows), rows.mask)))
        return x + self.mlp(self.mlp_norm(x))


class Eagle3(Eagle):
    """Eagle with the layer of released drafters: W_join is part of q, k and v there, fused features are not normed, and the first
    token, which no state precedes, has no row: x_t's stands at t - 1. To draft with, not to be trained here."""

    def __init__(self, config, target, draft_ids, shape=None):
        super().__init__(config, target, draft_ids, shape)
        self.layers = nn.ModuleList([Eagle3Layer(self.target_config)])
        self.context_norm = nn.Identity()
        del self.join, self.token_norm, self.state_norm

    def enter(self, x, state):
        return torch.cat([x, state], dim=-1)

    def write(self, tokens, before, slots, positions, cache):
        has = positions > 0
        if has.any():
            super().write(tokens[has], before[has], slots[has], positions[has] - 1, cache)

    def propose(self, anchors, slots, positions, *args, **kw):
        return super().propose(anchors, slots, positions - 1, *args, **kw)


class PromptLookup:
    """Drafts by copying: find the latest earlier place where the newest n tokens stand (longest n first), propose what followed.

    Wins where a text repeats itself or its prompt, and costs next to nothing. p_draft is one-hot, which the acceptance test
    takes like any other (a copied token passes with probability p_target). Where nothing matches, confidence is 0: a scheduler
    then verifies nothing, while fixed lengths verify a guess (the anchor, repeated).
    """

    longest = 3  # n-grams; a longer match says little more
    # a copied token's chance after a match of 1, 2, 3 tokens: rough, from the first answers looked at; a scheduler's estimate, not the law
    chance = (0.0, 0.3, 0.5, 0.7)

    def __init__(self, gamma: int, dtype=torch.float32, device="cpu"):
        self.gamma, self.feature_layers, self.dtype, self.device = gamma, (), dtype, device

    def new_cache(self, slots, max_len):
        text = [[] for _ in range(slots)]  # committed ids by slot, without the anchor
        return SimpleNamespace(text=text, clear=lambda slot, end: text[slot].clear())

    def extend(self, tokens, features, slots, positions, cache):
        for token, slot, position in zip(tokens.tolist(), slots.tolist(), positions.tolist()):
            text = cache.text[slot]
            del text[position:]  # a slot that begins anew
            text.append(token)

    def follow(self, text, G):
        """Ids of a text that ends with the anchor -> (n matched, the G ids that followed the latest match)."""
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            newest = text[-n:]
            for i in range(len(text) - n - 1, -1, -1):
                if text[i : i + n] == newest:
                    copied = text[i + n :][:G]
                    while len(copied) < G:  # the match overlaps the end: what repeats goes on repeating
                        copied.append(copied[len(copied) - (len(text) - i - n)])
                    return n, copied
        return 0, [text[-1]] * G

    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        found = [self.follow(cache.text[s] + [a], gamma) for s, a in zip(slots.tolist(), anchors.tolist())]
        tokens = torch.tensor([copied for _, copied in found], device=self.device)  # (R, G)
        # the draft vocabulary of this cycle: what was copied, so that K is small
        draft_ids, column = tokens.unique(return_inverse=True)
        p_draft = F.one_hot(column, len(draft_ids)).float()  # (R, G, K)
        confidence = torch.tensor([[self.chance[n]] * gamma for n, _ in found], device=self.device)
        return Draft(tokens, p_draft, confidence, draft_ids)


if __name__ == "__main__":
    text = "to be or not to be that is the question whether to be".split()
    ids = {word: i for i, word in enumerate(dict.fromkeys(text))}
    matched, copied = PromptLookup(4).follow([ids[word] for word in text], 4)
    print(f"after '{' '.join(text)}', {matched} words match: {' '.join(list(ids)[i] for i in copied)}")

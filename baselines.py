"""What DSpark is compared with: other drafters behind the same interface, so that engine, scheduler and bench take any.

    DFlash          drafter.py with head "none": the parallel backbone alone                             (Sec. 2.2)
    gated, rnn      drafter.py with those heads                                                          (Eq. 6)
    Eagle           autoregressive: one layer runs once per draft token, over its own states, in the style of Eagle-3. Verified
                    to length 1 it is MTP-1, the baseline of Fig. 7
    Eagle3          the same chain with the layer of released Eagle-3 drafters, which deepspec.py reads
    PromptLookup    no network: copies what followed the last occurrence of the newest tokens. The free baseline
    CopyFirst       a network drafter, except where a long enough run of tokens repeats: there PromptLookup (ours)

Interface  gamma, feature_layers, dtype; new_cache(slots, max_len); extend(tokens, features, slots, positions, cache) with what was
           committed; propose(..) -> Draft; and to be trained: forward(features, tokens, anchors) -> h, code, previous.
           To be profiled (Algorithm 1) also draft_ids, config, target_config, which PromptLookup lacks: the study takes it, dspark.py not.
Letters    R requests, G draft positions, N rows, D width, m feature layers, B dialogues, L tokens, A anchors, K draft vocabulary.
Alone      python baselines.py    (PromptLookup on a text that repeats itself; with a folder of training data: count its chances)
"""
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from drafter import Draft, Drafter
from scheduler import as_float64, temper
from target import Layer, RMSNorm, Rows, attend
from verify import logits_to_probs, sample


class Eagle(Drafter):
    """One decoder layer that drafts token by token. The row of token x_t reads x_t and the *state* of the position before:

        row t     = W_join [norm(embedding of x_t) ; norm(state of t - 1)]       -> layer -> state of t -> head: p_draft of x_{t+1}
        state     of a committed token: the target's features there, fused (Eq. 2). Of a drafted one: the layer's own output.

    Training runs the same chain for G steps over its own states (teacher-forced tokens), so that it meets its own errors
    (Eagle-3's training-time test). Inherited from Drafter: fusion, layer, final norm, confidence. There is no mask, and the head is 0 wide.
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
    """Eagle with the layer of released drafters. Three differences: W_join is part of q, k, v (a row is 2 D wide); fused features are
    not normed; the row of x_t stands at position t - 1, so the first token, which no state precedes, has none. To draft with: fit cannot
    train it, and save() would call it Eagle."""

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

    longest = 12  # tokens compared; a longer match says little more
    # How often the token after a match of 0, 1, .. 12 tokens was copied rightly, in answers that the target wrote at temperature 0 and
    # at 1: 'python baselines.py DATA' counts it. After k tokens that passed, a match of n has become one of n + k.
    chance = np.array([[0.00, 0.25, 0.53, 0.58, 0.67, 0.75, 0.78, 0.80, 0.83, 0.85, 0.85, 0.87, 0.96],
                       [0.00, 0.14, 0.37, 0.45, 0.56, 0.62, 0.65, 0.68, 0.72, 0.71, 0.76, 0.77, 0.84]])

    def __init__(self, gamma: int, dtype=torch.float32, device="cpu"):
        self.gamma, self.feature_layers, self.dtype, self.device = gamma, (), dtype, device

    def new_cache(self, slots, max_len):
        text, after = [[] for _ in range(slots)], [{} for _ in range(slots)]
        # by slot: committed ids, without the anchor; and where the text went on after each run of 1 to `longest` of them
        return SimpleNamespace(text=text, after=after, clear=lambda slot, end: (text[slot].clear(), after[slot].clear()))

    def extend(self, tokens, features, slots, positions, cache):
        for token, slot, position in zip(tokens.tolist(), slots.tolist(), positions.tolist()):
            if position == 0:  # a slot that begins anew
                cache.clear(slot, 0)
            text = cache.text[slot]
            text.append(token)
            for n in range(1, min(self.longest, len(text)) + 1):
                cache.after[slot][tuple(text[-n:])] = len(text)  # the latest place stays

    def follow(self, cache, slot, anchor, G):
        """-> (n matched, the G ids that followed the latest match of the newest n)."""
        text = cache.text[slot] + [anchor]
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            begin = cache.after[slot].get(tuple(text[-n:]))
            if begin is not None:
                copied = text[begin:][:G]
                while len(copied) < G:  # the match overlaps the end: what repeats goes on repeating
                    copied.append(copied[len(copied) - (len(text) - begin)])
                return n, copied
        return 0, [anchor] * G

    def chances(self, matched, temperature, G):
        """matched (R,) tokens, temperature a number or (R,) -> c_k (R, G), float32."""
        t = np.minimum(as_float64(temperature).reshape(-1, 1), 1)  # (R or 1, 1)
        grown = np.minimum(np.add.outer(matched, np.arange(G)), self.longest)  # (R, G)
        c = (1 - t) * self.chance[0][grown] + t * self.chance[1][grown]
        return torch.from_numpy((c * (np.array(matched)[:, None] > 0)).astype(np.float32))

    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        matched, copied = zip(*[self.follow(cache, s, a, gamma) for s, a in zip(slots.tolist(), anchors.tolist())])
        tokens = torch.tensor(copied, device=self.device)  # (R, G)
        # the draft vocabulary of this cycle: what was copied, so that K is small
        draft_ids, column = tokens.unique(return_inverse=True)
        p_draft = F.one_hot(column, len(draft_ids)).float()  # (R, G, K)
        return Draft(tokens, p_draft, self.chances(matched, temperature, gamma).to(self.device), draft_ids)


class CopyFirst:
    """A drafter that copies where the text repeats itself, and asks its network elsewhere (ours; lossless, as any drafter is).

    The block backbone is weak exactly there: to go on copying, input k would have to look k tokens past a match that it does not
    know yet. A cycle in which every request copies runs no network at all, though the network's context is kept complete.
    Which of the two drafts follows from committed text alone.

    sts: {sampling temperature: STS temperatures (G,)} of the network. Applied here, and not by the policy as elsewhere:
    PromptLookup.chance was counted on real text and needs no calibration.
    """

    least = 0.55  # chance of the first token from which on to copy: a match of 3 tokens at temperature 0, of 4 at 1; about what the
    # network reaches at its first position

    def __init__(self, network, sts=None):
        self.network, self.sts, self.lookup = network, sts or {}, PromptLookup(network.gamma, device=network.draft_ids.device)
        self.gamma, self.feature_layers, self.dtype, self.config = network.gamma, network.feature_layers, network.dtype, network.config
        self.draft_ids = network.draft_ids

    def new_cache(self, slots, max_len):
        network, lookup = self.network.new_cache(slots, max_len), self.lookup.new_cache(slots, max_len)
        return SimpleNamespace(network=network, lookup=lookup, clear=lambda *a: (network.clear(*a), lookup.clear(*a)))

    def extend(self, tokens, features, slots, positions, cache):
        self.network.extend(tokens, features, slots, positions, cache.network)
        self.lookup.extend(tokens, features, slots, positions, cache.lookup)

    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        matched, copied = zip(*[self.lookup.follow(cache.lookup, s, a, gamma) for s, a in zip(slots.tolist(), anchors.tolist())])
        confidence = self.lookup.chances(matched, temperature, gamma).to(anchors.device)  # (R, G)
        copies = confidence[:, 0] >= self.least  # (R,)
        if not copies.any():  # nearly always, in a text that repeats nothing
            draft = self.network.propose(anchors, slots, positions, cache.network, gamma, u, temperature, top_k, top_p)
            return replace(draft, confidence=self.calibrated(draft.confidence, temperature))
        tokens = torch.tensor(copied, device=anchors.device)  # (R, G); rows that do not copy are replaced below
        ids, asked = tokens[copies], ~copies  # (copies, G), (R,)
        if asked.any():
            of = lambda setting: setting[asked] if torch.is_tensor(setting) and setting.dim() else setting  # noqa: E731
            draft = self.network.propose(anchors[asked], slots[asked], positions[asked], cache.network, gamma, u[asked],
                                         of(temperature), of(top_k), of(top_p))
            tokens[asked], confidence[asked] = draft.tokens, self.calibrated(draft.confidence, of(temperature))
            ids = torch.cat([ids.flatten(), draft.draft_ids])
        # the draft vocabulary of this cycle: what was copied, and the network's where it was asked
        ids = ids.unique()  # (K,) ascending
        p_draft = torch.zeros(*tokens.shape, len(ids), device=tokens.device)  # (R, G, K)
        p_draft[copies] = F.one_hot(torch.searchsorted(ids, tokens[copies]), len(ids)).float()
        if asked.any():
            wide = torch.zeros(*draft.p_draft.shape[:2], len(ids), device=tokens.device)  # (asked, G, K): its columns among the joint ids
            wide[:, :, torch.searchsorted(ids, draft.draft_ids)] = draft.p_draft.float()
            p_draft[asked] = wide
        return Draft(tokens, p_draft, confidence, ids)

    def calibrated(self, confidence, temperature):
        """STS (R, G), for each request by the temperature nearest to its own."""
        if not self.sts:
            return confidence
        known = np.array(sorted(self.sts))
        nearest = np.abs(as_float64(temperature).reshape(-1, 1) - known).argmin(1)  # (R or 1,)
        table = np.stack([self.sts[t] for t in known])[nearest][:, : confidence.shape[1]]  # (R or 1, G)
        return torch.from_numpy(temper(as_float64(confidence), table)).to(confidence)


def count_chances(dialogues, temperature, most=700):
    """Of each match length 0..longest: how often the copied token was the next one, in answers drawn at a temperature."""
    right, all_of, lookup = [0] * (PromptLookup.longest + 1), [0] * (PromptLookup.longest + 1), PromptLookup(1)
    for d in [d for d in dialogues if abs(d.temperature - temperature) < 1e-4][:most]:
        ids, cache = d.ids.tolist(), lookup.new_cache(1, 0)
        for place, (token, following) in enumerate(zip(ids, ids[1:])):
            if place >= d.answer:
                n, [copied] = lookup.follow(cache, 0, token, 1)
                all_of[n] += 1
                right[n] += n > 0 and copied == following
            lookup.extend(torch.tensor([token]), None, torch.tensor([0]), torch.tensor([place]), cache)
    return [a / max(1, b) for a, b in zip(right, all_of)]


if __name__ == "__main__":
    if sys.argv[1:]:
        import corpus  # needed for this alone

        training, _ = corpus.read(Path(sys.argv[1]))
        for temperature in (0.0, 1.0):
            print(f"temperature {temperature}: " + " ".join(f"{c:.2f}" for c in count_chances(training, temperature)))
        sys.exit()
    text = "to be or not to be that is the question whether to be".split()
    ids, lookup = {word: i for i, word in enumerate(dict.fromkeys(text))}, PromptLookup(4)
    cache, *rows = lookup.new_cache(1, len(text)), torch.tensor([ids[word] for word in text[:-1]]), torch.arange(len(text) - 1)
    lookup.extend(rows[0], None, torch.zeros_like(rows[0]), rows[1], cache)
    matched, copied = lookup.follow(cache, 0, ids[text[-1]], 4)
    print(f"after '{' '.join(text)}', {matched} words match: {' '.join(list(ids)[i] for i in copied)}")

"""DSpark: confidence-scheduled speculative decoding, the engine that runs the cycle (arXiv 2607.05147, Fig. 1, Eq. 1).

    python dspark.py --prompt "Why is the sky blue?"         stream an answer, then what it cost and what it saved
    python dspark.py --prompt "..." --trace                  one line a cycle: draft, confidence, cut, verdict     (cli.py)

Glossary, used in every file
  anchor         x_0: the newest token. It is committed, but the target has not run on it yet
  draft tokens   x_1 .. x_G, a block proposed by the drafter in one go; G is the paper's gamma
  cycle          draft a block, decide how much of it to verify, verify that, commit what was won
  p_target, p_draft   the two models' distributions over the next token, after temperature, top-k and top-p
  confidence     c_k: chance that x_k is accepted if all before it were. survival a_k = c_1 c_2 .. c_k
  verify length  l: how many draft tokens the scheduler sends to the target, 0 (plain decoding) to G
  accepted       draft tokens that passed the test of verify.py
  correction     the target's token in place of the first rejected draft token
  bonus          the target's token after all scheduled draft tokens passed, be they all of the block or none
  committed      part of the output for good
  tau            tokens gained per cycle, the target's own token (correction or bonus) included
  row, slot      a row is one token in a target pass; a slot is a request's place in the caches, taken and given back
  features       hidden states of a few target layers, which the drafter reads as its context
  SPS(N)         target steps per second when a step runs N rows: what the scheduler weighs survival against
  Theta          tau * SPS(N), expected tokens per second of a cycle: what Algorithm 1 raises
  STS            Sequential Temperature Scaling: one number per position that makes survival true (no sampling temperature)
  law            the distribution of the output. Lossless: it is the target's own, whatever was drafted
  ledger         seconds spent in each phase
Latency per token is (T_draft + T_verify) / tau (Eq. 1): everything here either shortens a cycle or lengthens its harvest.

State    per request: its tokens. Both caches hold exactly the tokens before the anchor, so cached = len(tokens) - 1: asserted
         every cycle, restored by moving a length. Whatever a rejected draft wrote lies beyond it and is never seen.
         A request waits, then joins (has a slot, its prompt runs piece by piece between cycles), then is active until its
         end, when its slot is zeroed and goes to the next. Who shares a cycle changes from one to the next; no request's
         tokens depend on it, unless the policy lets the load decide.
Letters  R requests, G draft positions, N = sum(1 + l) packed rows, V vocabulary.
"""
import heapq
import time
from bisect import insort
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

import scheduler
from drafter import Draft
from verify import logits_to_probs, sample, verify_logits

PREFILL_ROWS = 512  # a long prompt goes through the target in pieces of at most this many rows


@dataclass
class Sampling:
    """How one request wants its tokens drawn, and where it wants to end."""

    temperature: float = 0.0
    top_k: int = 0          # 0: off
    top_p: float = 1.0      # 1: off
    seed: int = 0           # of this request's own random stream: neighbours in the batch cannot move it
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    eos: int | None = None  # None: whatever ends the target's answers, which may be several ids; -1: nothing does


@dataclass
class Result:
    """One request's answer and its account. tau and accepted_at count delivered tokens only."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    origins: list[str] = field(default_factory=list)  # per id: first (drawn at prefill), accepted, correction, bonus
    finish: str = ""                                  # eos, stop, length, cancelled
    cycles: int = 0
    verified_at: list[int] = field(default_factory=list)  # [k]: cycles in which x_{k+1} was verified
    ledger: dict[str, float] = field(default_factory=dict)  # seconds: prefill, draft, schedule, verify, commit (the batch's)

    @property
    def gained(self) -> int:
        """Tokens that cycles brought: the one drawn at prefill belongs to none. (A stop string may take back even that.)"""
        return max(0, len(self.ids) - 1)

    @property
    def tau(self) -> float:
        """Tokens per cycle, bonus and correction included."""
        return self.gained / self.cycles if self.cycles else 0.0

    @property
    def accepted_at(self) -> list[int]:
        """[k]: cycles in which x_{k+1} was accepted and delivered. Read off the origins: each cycle's own token ends a run
        of accepted ones, so an id's place in its run is its k. A stop string that takes ids back thus needs no second account."""
        counts, k = [0] * len(self.verified_at), 0
        for origin in self.origins:
            if origin == "accepted":
                counts[k] += 1
            k = k + 1 if origin == "accepted" else 0
        return counts


@dataclass(eq=False)  # a request is itself, not its fields: active.remove() need not compare them
class Request:
    prompt: list[int]
    sampling: Sampling
    slot: int | None          # its place in both caches, from joining to its end; None: still waiting
    random: torch.Generator   # its own stream: token draws, verdicts and nothing else
    result: Result
    ends: tuple[int, ...]     # ids that end its answer

    @property
    def tokens(self):
        return self.prompt + self.result.ids

    @property
    def anchor(self):
        return self.result.ids[-1]

    @property
    def room(self):
        return self.sampling.max_new_tokens - len(self.result.ids)


@dataclass
class Cycle:
    """What happened to one request in one cycle, for --trace and for tests."""

    anchor: int
    draft: list[int]           # (G,)
    confidence: list[float]    # (G,) raw c_k
    verify_len: int
    n_accepted: int            # as judged; the answer may have ended before the last of them
    next_token: int            # correction or bonus
    delivered: list[int]       # what of it became part of the answer
    origins: list[str]         # of the delivered ones


class Engine:
    """Requests, two caches and one cycle. drafter=None is plain decoding: a block of no draft tokens through the same code.

    slots         requests that can be under way at once, each with max_len positions in both caches
    policy        confidence (R, G) -> verify lengths (R,). One that learns also has begin(R, G) -> block length, called before
                  anything of the cycle exists, and observe(confidence, verify_len, n_accepted), called when all of it is past
    prefill_rows  rows of prompts run between two cycles, at most, so that a long one stalls nobody; None: all there are
    clock         seconds; serve.py simulates with one that only the models' costs move
    """

    def __init__(self, target, drafter, slots, max_len, gamma, policy=None, encoding=None, on_cycle=None, prefill_rows=None,
                 clock=time.perf_counter):
        self.target, self.drafter, self.encoding, self.on_cycle = target, drafter, encoding, on_cycle
        self.gamma, self.max_len, self.prefill_rows, self.clock = gamma, max_len, prefill_rows, clock
        self.policy = policy or (lambda confidence: scheduler.fixed(confidence, gamma))
        self.waiting = deque()           # submitted, without a slot
        self.joining = deque()           # with a slot, their prompts not yet run to the end
        self.active = []                 # in every cycle; ordered by slot, as packed rows must be
        self.free = list(range(slots))   # a heap: the lowest is taken first, which keeps the batch close together
        self.cached = [0] * slots        # positions in both caches
        self.cache = target.new_cache(slots, max_len)
        self.draft_cache = drafter.new_cache(slots, max_len) if drafter else None
        self.ledger = dict(prefill=0.0, draft=0.0, schedule=0.0, verify=0.0, commit=0.0)

    # ----- one cycle ----------------------------------------------------------------------------------------------------

    def step(self):
        """Newcomers join; then draft, schedule, verify, commit: one cycle of every active request."""
        self.join()
        self.assert_sound()
        if not self.active:
            return
        G = self.timed("schedule", self.block_length)                                 # from finished cycles alone
        draft, u = self.timed("draft", self.draft, G)                                 # tokens, p_draft, confidence (R, G)
        verify_len = self.timed("schedule", self.schedule, draft)                     # (R,)
        verdict, features = self.timed("verify", self.verify, draft, verify_len, u)   # N = sum(1 + l) rows of the target
        cycles = self.timed("commit", self.commit, draft, verify_len, verdict, features)
        self.timed("schedule", self.observe, draft, verify_len, verdict)
        for request, cycle in cycles:
            if self.on_cycle:
                self.on_cycle(request, cycle)

    def timed(self, name, phase, *args):
        begin = self.clock()
        result = phase(*args)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()  # else the work would be booked on whoever waits for it
        self.ledger[name] += self.clock() - begin
        return result

    def assert_sound(self):
        """What must hold before every cycle, whoever came and went."""
        assert all(self.cached[r.slot] == len(r.tokens) - 1 for r in self.active), "caches hold all but the anchor"
        assert not any(r.result.finish for r in [*self.active, *self.joining, *self.waiting]), "who has finished has left"
        held = [r.slot for r in self.active]
        assert held == sorted(held), "active requests are ordered by slot"
        held += [r.slot for r in self.joining]
        assert sorted(held + self.free) == list(range(len(self.cached))), "every slot has one owner, or is free"
        assert not any(self.cached[slot] for slot in self.free), "a free slot is empty"

    def block_length(self):
        """G of this cycle, 0 (nothing is drafted) to gamma: decided before anything of this cycle exists."""
        if self.gamma == 0 or not hasattr(self.policy, "begin"):
            return self.gamma
        G = self.policy.begin(len(self.active), self.gamma)
        if not 0 <= G <= self.gamma:
            raise ValueError(f"the policy asked for a block of {G}: not in 0..{self.gamma}")
        return int(G)

    def draft(self, G):
        """G draft tokens for every request, and the uniforms that will judge them. No number serves both: a token and its
        judge must be independent."""
        R = len(self.active)
        # (R, 2 G + 1): G to draw the draft tokens, G to judge them, one for the token after. Each from the request's own stream,
        # so that a batch draws for it what it would have drawn alone.
        u = torch.stack([torch.rand(2 * G + 1, generator=r.random, dtype=torch.float64) for r in self.active])
        u = u.to(self.target.device)
        if G == 0:  # plain decoding: a block of no draft tokens, over the whole vocabulary
            V, device = self.target.config.vocab_size, u.device
            return Draft(torch.zeros(R, 0, dtype=torch.long, device=device), torch.zeros(R, 0, V, device=device),
                         torch.zeros(R, 0, device=device), None), u
        anchors, slots, positions = self.rows([[r.anchor] for r in self.active])  # (R,) each
        draft = self.drafter.propose(anchors, slots, positions, self.draft_cache, G, u[:, :G], *self.settings([1] * R))
        return draft, u[:, G:]

    def schedule(self, draft):
        """Verify lengths (R,) from the confidences alone, and never more than a request may still deliver."""
        R, G = draft.tokens.shape
        if G == 0:
            return [0] * R
        wanted = np.asarray(self.policy(draft.confidence))
        if wanted.shape != (R,) or wanted.dtype.kind not in "iu" or not ((wanted >= 0) & (wanted <= G)).all():
            raise ValueError(f"the policy returned {wanted!r}: not {R} integers in 0..{G}")
        room = np.array([r.room - 1 for r in self.active])  # the target's own token takes one place
        return np.minimum(wanted, room).tolist()

    def verify(self, draft, verify_len, u):
        """Run the target on anchor and scheduled draft tokens of all requests, N = sum(1 + l) rows, and judge them."""
        rows = self.rows([[r.anchor, *x[:l]] for r, x, l in zip(self.active, draft.tokens.tolist(), verify_len)])
        # (N, V) and (N, m * D). Rows that the scheduler cut are not run: that is all that scheduling saves
        logits, features = self.target(*rows, self.cache, self.drafter.feature_layers if self.drafter else ())
        settings, lengths = self.settings([1] * len(self.active)), torch.tensor(verify_len, device=u.device)
        return verify_logits(logits, *settings, draft.p_draft, draft.tokens, lengths, u, draft.draft_ids), features

    def commit(self, draft, verify_len, verdict, features):
        """Append what was won, extend the drafter's context by it, let go of finished requests; one (request, Cycle) each."""
        n_accepted, next_token = verdict.n_accepted.tolist(), verdict.next_token.tolist()
        tokens, confidence, cycles = draft.tokens.tolist(), draft.confidence.tolist(), []
        keep, first = [], 0  # rows of the target pass that are now committed: the anchor and the accepted tokens
        for l, n in zip(verify_len, n_accepted):
            keep += range(first, first + 1 + n)
            first += 1 + l
        if self.drafter:
            # features of rejected tokens are dropped here: the drafter's context is committed text, nothing else. And all of
            # it: cycles without a draft come here too, or the next block would look back on a gap
            committed = self.rows([[r.anchor, *x[:n]] for r, x, n in zip(self.active, tokens, n_accepted)])
            features = features if len(keep) == len(features) else features[keep]
            self.drafter.extend(committed[0], features, *committed[1:], self.draft_cache)
        for i, r in enumerate(list(self.active)):
            self.cached[r.slot] += 1 + n_accepted[i]  # this is the rollback: rows beyond it are never seen again
            new = tokens[i][: n_accepted[i]] + [next_token[i]]
            own = "bonus" if n_accepted[i] == verify_len[i] else "correction"
            anchor = r.anchor
            delivered = self.deliver(r, new, ["accepted"] * n_accepted[i] + [own])
            res = r.result
            res.cycles += 1
            for k in range(verify_len[i]):
                res.verified_at[k] += 1
            cycles.append((r, Cycle(anchor, tokens[i], confidence[i], verify_len[i], n_accepted[i], next_token[i],
                                    res.ids[len(res.ids) - delivered :], res.origins[len(res.ids) - delivered :])))
            if res.finish:
                self.active.remove(r)
                self.release(r)
        return cycles

    def observe(self, draft, verify_len, verdict):
        """Tell a policy that learns what came of the cycle: the only way in which it hears of tokens."""
        if self.gamma and hasattr(self.policy, "observe"):
            self.policy.observe(draft.confidence, np.array(verify_len), np.array(verdict.n_accepted.tolist()))

    # ----- beginning and end of a request -------------------------------------------------------------------------------

    @property
    def busy(self):
        return bool(self.waiting or self.joining or self.active)

    def submit(self, prompt, sampling) -> Request:
        """Queue a request; the steps from here on run it. ValueError for what cannot be run."""
        check(self.target, self.drafter, [prompt], [sampling], None, self.encoding)
        if len(prompt) + sampling.max_new_tokens > self.max_len:
            raise ValueError(f"prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones exceed a slot of {self.max_len}")
        random = torch.Generator().manual_seed(sampling.seed)
        ends = self.target.config.eos if sampling.eos is None else (sampling.eos,)
        self.waiting.append(Request([int(t) for t in prompt], sampling, None, random, Result(verified_at=[0] * self.gamma), ends))
        return self.waiting[-1]

    def cancel(self, request):
        """End a request wherever it is; what it has said stays. Between two steps, or from on_cycle."""
        if request.result.finish:
            return
        request.result.finish = "cancelled"
        request.result.text = self.encoding.decode(request.result.ids) if self.encoding else ""
        for group in (self.waiting, self.joining, self.active):
            if request in group:
                group.remove(request)
                if request.slot is not None:
                    self.release(request)

    def join(self):
        """Give free slots to those who wait, then run prompts, first come first served: one pass of prefill_rows rows at most,
        in which several prompts may share, and a long one takes part in several cycles; or without a limit all there is."""
        while self.waiting and self.free:
            self.waiting[0].slot = heapq.heappop(self.free)
            self.joining.append(self.waiting.popleft())
        passes = 0
        while self.joining and (self.prefill_rows is None or passes == 0):
            pieces, left = [], self.prefill_rows or PREFILL_ROWS
            for request in self.joining:
                rows = min(left, len(request.prompt) - self.cached[request.slot])
                if rows:
                    pieces.append((request, rows))
                left -= rows
                if self.prefill_rows is None:
                    break  # generate() runs each prompt by itself: the same arithmetic whoever shares the batch, also in bf16
            self.timed("prefill", self.prefill, pieces)
            passes += 1
            if self.on_cycle:
                for request, _ in pieces:
                    if request not in self.joining and request.result.finish != "cancelled":
                        self.on_cycle(request, None)  # it has spoken

    def prefill(self, pieces):
        """Run the next so many rows of these prompts, fill the drafter's context, and draw the first token of those whose prompt is
        through. pieces: (request, rows)."""
        pieces = sorted(pieces, key=lambda piece: piece[0].slot)  # as packed rows must be
        tokens, slots, places, last = [], [], [], []
        for r, n in pieces:
            begin = self.cached[r.slot]
            tokens += r.prompt[begin : begin + n]
            slots += [r.slot] * n
            places += range(begin, begin + n)
            last.append(len(tokens) - 1)
            self.cached[r.slot] += n
        rows = torch.tensor([tokens, slots, places], device=self.target.device)
        layers = self.drafter.feature_layers if self.drafter else ()
        logits, features = self.target(*rows, self.cache, layers, logit_rows=last)  # (pieces, V): the newest row of each
        if self.drafter:
            self.drafter.extend(rows[0], features, *rows[1:], self.draft_cache)
        for (r, _), row in zip(pieces, logits.split(1)):
            if self.cached[r.slot] < len(r.prompt):
                continue
            u = torch.rand(1, generator=r.random, dtype=torch.float64).to(logits.device)
            first = sample(logits_to_probs(row, r.sampling.temperature, r.sampling.top_k, r.sampling.top_p), u).tolist()
            self.joining.remove(r)
            self.deliver(r, first, ["first"])  # it may already be the end
            if r.result.finish:
                self.release(r)
            else:
                insort(self.active, r, key=lambda r: r.slot)

    def release(self, request):
        """Give the slot back, zeroed as far as it was written. Masked keys are not harmless whatever they hold: a NaN plus minus
        infinity is NaN, and a weight of 0 times NaN is too. So the next tenant must find numbers, not what the last one left."""
        end = self.cached[request.slot] + 1 + self.gamma  # the last cycle wrote no further, rejected tokens included
        self.cache.clear(request.slot, end)
        if self.drafter:
            self.draft_cache.clear(request.slot, end)
        self.cached[request.slot] = 0
        heapq.heappush(self.free, request.slot)

    def deliver(self, request, tokens, origins):
        """Append tokens up to the request's end, wherever in the block that falls; returns how many were delivered."""
        result, s = request.result, request.sampling
        before = len(result.ids)
        for token, origin in zip(tokens, origins):
            result.ids.append(token)
            result.origins.append(origin)
            if token in request.ends:  # only here: an end that was drafted and then rejected never comes this far
                result.finish = "eos"
            elif s.stop and (cut := self.find_stop(result.ids, s.stop)) is not None:
                result.finish = "stop"
                # ids end with the token in which the stop string begins, or before it if nothing of it is wanted
                keep = len(result.ids)
                while keep and len(self.encoding.decode_bytes(result.ids[: keep - 1])) >= cut:
                    keep -= 1
                del result.ids[keep:], result.origins[keep:]
                result.text = self.encoding.decode_bytes(result.ids)[:cut].decode("utf-8", "replace")
            elif len(result.ids) == s.max_new_tokens:
                result.finish = "length"
            if result.finish:
                break
        if self.encoding and result.finish and result.finish != "stop":
            result.text = self.encoding.decode([t for t in result.ids if t not in request.ends])
        return max(0, len(result.ids) - before)

    def find_stop(self, ids, stop):
        """Byte offset at which the earliest stop string begins in the text of ids, or None. It may span cycles."""
        text = self.encoding.decode_bytes(ids)
        found = [at for at in (text.find(s.encode()) for s in stop) if at >= 0]
        return min(found) if found else None

    # ----- packing ------------------------------------------------------------------------------------------------------

    def rows(self, per_request):
        """Token lists, one per active request, that start at its anchor -> packed (tokens, slots, positions), each (N,)."""
        tokens, slots, positions = [], [], []
        for r, row in zip(self.active, per_request):
            tokens += row
            slots += [r.slot] * len(row)
            positions += range(self.cached[r.slot], self.cached[r.slot] + len(row))
        return tuple(torch.tensor([tokens, slots, positions], device=self.target.device))

    def settings(self, counts):
        """temperature, top_k, top_p of every request, repeated counts[r] times: three numbers if all agree, else tensors."""
        wanted = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in self.active]
        if len(set(wanted)) == 1:  # numbers are the fast path of logits_to_probs
            return wanted[0]
        counts = torch.tensor(counts, device=self.target.device)
        # float64, as the numbers are: 0.7 in float32 is another top_p, and a neighbour's settings would move this request's
        return tuple(torch.tensor(x, dtype=torch.float64, device=counts.device).repeat_interleave(counts) for x in zip(*wanted))


def generate(
    target, drafter, prompts, *, sampling=None, gamma=None, policy=None, encoding=None, on_cycle=None, **settings
) -> list[Result]:
    """Answer prompts (lists of token ids) together, in one batch.

    drafter    None: plain decoding.      gamma   draft tokens a cycle (default: the drafter's trained block; 0: none).
    sampling   one Sampling, or one per prompt; or give its fields by name, for all prompts alike: temperature=0.7, max_new_tokens=64
               (then prompt i draws with seed + i, so that the same prompt twice gets two answers).
    encoding   a tiktoken.Encoding, for text and stop strings.
    policy     confidence (R, G) -> verify lengths (R,), scheduler.py; default: verify whole blocks. Algorithm 1 and what is
               built on it let the load decide, so at temperature > 0 the draws, though not their law, then depend on who
               shares the batch.
    on_cycle   called as on_cycle(request, Cycle), and with None after its prefill. KeyboardInterrupt ends the run: what was
               produced is returned, with finish "cancelled".
    Raises ValueError for what cannot be run.
    """
    if sampling is None:
        settings = Sampling(**settings)
        sampling = [replace(settings, seed=settings.seed + i) for i in range(len(prompts))]
    elif settings:
        raise ValueError(f"give sampling or {', '.join(settings)}, not both")
    elif isinstance(sampling, Sampling):
        sampling = [sampling] * len(prompts)
    check(target, drafter, prompts, sampling, gamma, encoding)
    G = block_length(drafter, gamma)
    max_len = max((len(p) + s.max_new_tokens for p, s in zip(prompts, sampling)), default=1)
    # a slot each, and prompts run whole: every request's first token comes before the first cycle, and from then on all move
    # together until the last is done
    engine = Engine(target, drafter if G else None, len(prompts), max_len, G, policy, encoding, on_cycle)
    requests = [engine.submit(prompt, s) for prompt, s in zip(prompts, sampling)]
    try:
        while engine.busy:
            engine.step()
    except KeyboardInterrupt:
        for request in requests:
            engine.cancel(request)
    for request in requests:
        request.result.ledger = dict(engine.ledger)  # shared: a cycle's time cannot be divided among those who shared it
    return [request.result for request in requests]


def block_length(drafter, gamma) -> int:
    """Draft tokens a cycle: none without a drafter, the trained block unless told otherwise."""
    return 0 if drafter is None else drafter.gamma if gamma is None else gamma


def check(target, drafter, prompts, sampling, gamma, encoding):
    """One line per thing that cannot be run, before anything runs."""
    V, context = target.config.vocab_size, target.config.max_len
    if len(sampling) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(sampling)} samplings: give one for all, or one each")
    if drafter is None and gamma:
        raise ValueError(f"gamma {gamma} needs a drafter")
    if drafter is not None and gamma is not None and not 0 <= gamma <= drafter.gamma:
        raise ValueError(f"gamma {gamma}: this drafter was trained for blocks of up to {drafter.gamma}; choose 0 to {drafter.gamma}")
    for prompt, s in zip(prompts, sampling):
        if len(prompt) == 0:
            raise ValueError("an empty prompt: give at least one token")
        if not all(0 <= t < V for t in prompt):
            raise ValueError(f"a prompt holds ids outside 0..{V - 1}: was it made by another tokenizer?")
        if s.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {s.max_new_tokens}: must be at least 1")
        if len(prompt) + s.max_new_tokens > context:
            raise ValueError(f"prompt of {len(prompt)} tokens and {s.max_new_tokens} new ones exceed the context of {context}: "
                             "shorten one of them, or load the target with a larger max_len")
        if not 0 <= s.temperature <= 1e6:  # more is infinite in float32; NaN compares false
            raise ValueError(f"temperature {s.temperature}: must be 0 (greedy) or positive, at most 1e6")
        if not 0 <= s.top_k < 2**31 or not 0 < s.top_p <= 1:
            raise ValueError(f"top_k {s.top_k}, top_p {s.top_p}: top_k must be 0 (off) or positive, top_p in (0, 1]")
        if not -(2**63) <= s.seed < 2**63:
            raise ValueError(f"seed {s.seed}: must fit 64 bits")
        if isinstance(s.stop, str):
            raise ValueError(f"stop must be a tuple of strings: ({s.stop!r},)")
        if s.stop and encoding is None:
            raise ValueError("stop strings need an encoding")
        if any(not text for text in s.stop):
            raise ValueError("an empty stop string would end every answer at once: leave it out")


if __name__ == "__main__":
    from cli import main

    main()

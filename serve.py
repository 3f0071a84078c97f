"""Many requests at once: what each policy is worth under load, measured and simulated (Sec. 5, Fig. 7 and 8).

    python bench.py serve                    closed loop at concurrency 1, 2, 4 .. 64, every policy in turn, medians of repeats
    python bench.py serve --rates 0.5 1 2    and an open loop: requests arrive at random times, so many a second on average
    python bench.py serve --quick            a small set, about a minute on two cores
    python bench.py simulate --record        once, with the model: confidence and acceptance at every place of every answer
    python bench.py simulate                 the same engine without a model, up to 1,000 requests on an H200-like cost curve
    python bench.py simulate --curve here --check      this machine's curve, and beside it real runs of the same settings

Closed    `concurrency` users, each of whom sends the next request when the last is answered. Measured from a few cycles after
          all had their first token until enough requests have ended; those then under way are cancelled.
Open      Poisson arrivals at a given rate into a fixed number of slots; measured from the first arrival to the last answer.
Workload  prompts.jsonl, its domains in turn, each request with its own length limit and seed: the same list for every policy.
Policies  plain (no drafter), mtp1 (one draft token, always verified), fixed, threshold, scheduled (Algorithm 1), async (Sec. 5.2),
          adaptive (ours). The engine is one and the same.
Output    tables, Fig. 7 (throughput over per-user speed) and Fig. 8 (throughput and verify budget over concurrency), and
          serve.json {"rows": [..], "machine": {..}}; the same for simulate.
"""
import argparse
import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import bench
import cli
import dspark
import scheduler
import smollm2
from drafter import Draft
from target import keep_freed_memory

HERE = Path(__file__).parent
RECORD = HERE / "docs" / "results" / "acceptance.json"
POLICIES = ["plain", "mtp1", "fixed", "threshold", "scheduled", "async", "adaptive"]
WARM = 10  # cycles: what is wanted is a server's steady state, not how it starts, with policies that know nothing yet
PHASES = ("prefill", "draft", "schedule", "verify", "commit")


@dataclass
class Parts:
    """What an engine is made of: models, or their stand-ins, and the clock that goes with them."""

    target: object
    drafter: object
    clock: object = time.perf_counter
    wait: object = time.sleep


# ---------------------------------------------------------------------------------------------------------------------
# Load


class Log:
    """An engine's on_cycle: when requests came, spoke and ended, and what their cycles won. restart() begins the measurement."""

    def __init__(self, clock):
        self.clock, self.came, self.first, self.ended = clock, {}, {}, []
        self.engine = None  # set when there is one: the log is one of its parts
        self.restart()

    def restart(self):
        self.begin, self.tokens, self.won, self.cycles = self.clock(), 0, 0, 0
        self.drafted, self.verified, self.accepted, self.passes = 0, 0, 0, 0
        self.waits, self.speeds = [], []  # s from arrival to first token; tokens/s from first token to last, of who has ended
        self.ledger = dict(self.engine.ledger) if self.engine else dict.fromkeys(PHASES, 0.0)

    def __call__(self, request, cycle):
        now = self.clock()
        if cycle is None:  # its prompt is through, and its first token drawn
            self.first[request] = now
            self.waits.append(now - self.came[request])
            self.tokens += len(request.result.ids)
        else:
            self.tokens += len(cycle.delivered)
            self.won += len(cycle.delivered)  # without the tokens that prefill draws
            self.cycles += 1  # of one request; those of the engine are passes
            self.drafted += len(cycle.draft)
            self.verified += cycle.verify_len
            self.accepted += cycle.n_accepted
        if request.result.finish:
            self.ended.append(request)
            if len(request.result.ids) > 1:
                self.speeds.append((len(request.result.ids) - 1) / max(now - self.first[request], 1e-9))

    # whoever runs the engine does so through these two

    def submit(self, job, came=None):
        request = self.engine.submit(*job)
        self.came[request] = self.clock() if came is None else came
        return request

    def step(self):
        before = self.cycles
        self.engine.step()
        self.passes += self.cycles > before  # not in a step that only ran prompts

    def row(self):
        """The measurement so far. The 5 % of users who were served worst are below user_tokens_per_s_p5."""
        seconds = max(self.clock() - self.begin, 1e-9)
        # a mean over users, each counting once: tokens_per_s is what the machine gives, this is what one of them sees
        speeds, waits = np.array(self.speeds or [0.0]), np.array(self.waits or [0.0])
        ms = {f"{p}_ms": (self.engine.ledger[p] - self.ledger[p]) / max(1, self.passes) * 1e3 for p in PHASES}
        return dict(
            tokens_per_s=self.tokens / seconds, user_tokens_per_s_mean=speeds.mean(),
            **{f"user_tokens_per_s_p{q}": np.percentile(speeds, q) for q in (5, 50, 95)},
            **{f"ttft_s_p{q}": np.percentile(waits, q) for q in (50, 95)},
            tau=self.won / max(1, self.cycles), drafted=self.drafted / max(1, self.cycles),
            verify_budget=self.verified / max(1, self.cycles),                     # draft tokens verified, per request and cycle
            waste=(self.verified - self.accepted) / max(1, self.verified),         # share of them rejected
            requests=len(self.speeds), seconds=seconds, **ms)


def closed_loop(log, jobs, concurrency, completions):
    """Keep `concurrency` requests under way; measure from WARM cycles after all had spoken until so many have ended."""
    under_way = [log.submit(next(jobs)) for _ in range(concurrency)]

    def step():
        ended = len(log.ended)
        log.step()
        under_way.extend(log.submit(next(jobs)) for _ in range(len(log.ended) - ended))

    while len(log.first) < concurrency:
        step()
    spoken = log.passes
    while log.passes < spoken + WARM:
        step()
    log.restart()
    already = len(log.ended)
    while len(log.ended) < already + completions:
        step()
    row = log.row()  # before the cancelling, which is no part of it
    for request in under_way:
        log.engine.cancel(request)
    return row


def open_loop(log, jobs, arrivals, wait):
    """Submit a job at each of the times `arrivals` (rising, seconds from now), until all are answered."""
    arrivals, begin = deque(arrivals), log.clock()
    while arrivals or log.engine.busy:
        while arrivals and begin + arrivals[0] <= log.clock():
            log.submit(next(jobs), begin + arrivals.popleft())  # it came when it came, not when the last cycle ended
        if log.engine.busy:
            log.step()
        else:
            wait(max(0.0, begin + arrivals[0] - log.clock()))
    return log.row()


def workload(jobs, max_new_tokens, temperature, seed):
    """An endless list of (prompt, Sampling): the jobs (ids, longest answer) in turn, with random length limits and a seed each."""
    rng = np.random.default_rng(seed)
    for i in count():
        ids, longest = jobs[i % len(jobs)]
        # answers of one length would end together, and prompts come in waves
        n = int(rng.integers(max(2, max_new_tokens // 4), max_new_tokens + 1))
        yield ids, dspark.Sampling(temperature, seed=seed + i, max_new_tokens=max(1, min(n, longest)))


def in_turn(prompts):
    """[(domain, x)] -> the x, one of each domain in turn."""
    by_domain = {}
    for domain, x in prompts:
        by_domain.setdefault(domain, []).append(x)
    lists, out = list(by_domain.values()), []
    for i in range(max(map(len, lists))):
        out += [x[i] for x in lists if i < len(x)]
    return out


def make_policies(costs, sts, gamma, threshold):
    """name -> (uses the drafter, draft tokens a cycle, function that makes the policy): some remember, so each run has its own."""
    return {
        "plain": (False, 0, lambda: None),
        "mtp1": (True, 1, lambda: None),
        "fixed": (True, gamma, lambda: None),
        "threshold": (True, gamma, lambda: lambda c: scheduler.threshold(scheduler.calibrated(c, sts), threshold)),
        "scheduled": (True, gamma, lambda: scheduler.scheduled(costs, sts)),
        "async": (True, gamma, lambda: scheduler.Async(costs, sts)),
        "adaptive": (True, gamma, lambda: scheduler.Adaptive(costs, sts)),
    }


def run_one(parts, policy, jobs, args, slots, max_len, concurrency=None, rate=None, seed=0):
    """One measurement of one policy: a row."""
    uses_drafter, gamma, make = policy
    log = Log(parts.clock)
    # a new engine and a new policy for each run: nothing is learnt in one and used in another
    log.engine = dspark.Engine(parts.target, parts.drafter if uses_drafter else None, slots, max_len, gamma, make(), None, log,
                               args.prefill_rows, parts.clock)
    if concurrency:
        return closed_loop(log, jobs, concurrency, max(args.completions, concurrency))
    gaps = np.random.default_rng(seed).exponential(1 / rate, max(args.completions, slots))
    return open_loop(log, jobs, np.cumsum(gaps), parts.wait)


def measure(parts_of, policies, jobs, args, label):
    """Every setting, every repeat, every policy in turn -> rows, medians over repeats with [least, most] of the throughput.

    parts_of(): fresh Parts for a run. Repeats are outermost, policies innermost: what the machine does, it does to all alike.
    """
    settings = [("concurrency", c) for c in args.concurrency] + [("rate", r) for r in args.rates]
    longest = max(len(ids) for ids, _ in jobs) + args.max_new_tokens
    runs_to_do = [(repeat, kind, x, name) for repeat in range(args.repeats) for kind, x in settings for name in policies]
    runs = {}
    # the load depends on the repeat and on nothing else: every policy gets the same requests in the same order
    for repeat, kind, x, name in track(runs_to_do, label, console=Console(stderr=True)):
        load = workload(jobs, args.max_new_tokens, args.temperature, 10_000 * repeat)
        slots = x if kind == "concurrency" else args.slots
        row = run_one(parts_of(), policies[name], load, args, slots, longest, **{kind: x}, seed=repeat)
        runs.setdefault((name, kind, x), []).append(row)
    rows = []
    for (name, kind, x), repeats in runs.items():
        row = dict(policy=name, loop="closed" if kind == "concurrency" else "open", temperature=args.temperature, repeats=len(repeats))
        row[kind] = x
        for key in repeats[0]:
            row[key] = round(float(median(r[key] for r in repeats)), 5)
        row["tokens_per_s_range"] = [round(float(f(r["tokens_per_s"] for r in repeats)), 3) for f in (min, max)]
        rows.append(row)
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# A stand-in for the models: the same engine loop on recorded acceptance and a virtual clock


class VirtualClock:
    """Seconds that pass only when somebody says so; with `own`, also while the engine itself works, for that work is real here too."""

    def __init__(self, own=False):
        self.now, self.begin = 0.0, time.perf_counter() if own else None

    def __call__(self):
        return self.now + (time.perf_counter() - self.begin if self.begin else 0.0)

    def wait(self, seconds):
        self.now += seconds


class Replay:
    """Target and drafter in one. Every answer is the token 1 over and over; a draft token is a 1 where the record says that the
    real one was accepted and a 0, which the target rejects, where not. A prompt is a token that names its record, repeated.

    What it replays is exact for greedy decoding: what is drafted at a place of an answer, and how much of it passes, depends on
    the text alone, not on which cycle came there. Each call moves the clock by what the models would have taken.
    """

    device, feature_layers = torch.device("cpu"), ()

    def __init__(self, answers, gamma, costs, clock):
        self.answers, self.gamma, self.costs, self.clock = answers, gamma, costs, clock
        self.config = SimpleNamespace(vocab_size=2 + len(answers), max_len=2**31, eos=())
        self.answer, self.start = {}, {}  # slot -> which answer; where it starts
        S, G = np.array(costs.verify.shape) - 1
        self.rows, self.seconds = np.arange(1, S + 1) * (1 + G), costs.verify[1:, G]  # for prompts: a pass over so many rows

    def new_cache(self, slots, max_len):
        return self

    def clear(self, slot, end):
        pass

    def extend(self, tokens, features, slots, positions, cache):
        pass  # in the costs of verifying

    def __call__(self, tokens, slots, positions, cache, feature_layers=(), logit_rows=None):
        N = len(tokens)
        # a pass is either over pieces of prompts or over anchors and draft tokens, never both: the engine keeps them apart
        if tokens[0] > 1:
            for slot, token, place in zip(slots.tolist(), tokens.tolist(), positions.tolist()):
                self.answer[slot], self.start[slot] = token - 2, place + 1
            # prompts may be longer than any batch that was profiled: beyond, in proportion
            beyond = max(1.0, N / self.rows[-1])
            self.clock.wait(beyond * float(np.interp(N, self.rows, self.seconds)))
        else:
            R = len(torch.unique_consecutive(slots))
            l = (N - R) / R
            self.clock.wait(float(np.interp(l, np.arange(self.costs.verify.shape[1]), self.costs.verify[R])))
        rows = N if logit_rows is None else len(logit_rows)
        # greedy: any logits whose argmax is 1
        logits = torch.full((rows, self.config.vocab_size), -1e4)
        logits[:, 1] = 0.0
        return logits, torch.zeros(N, 0)

    def propose(self, anchors, slots, positions, cache, gamma, u, temperature, top_k=0, top_p=1.0):
        R = len(anchors)
        self.clock.wait(float(self.costs.draft[R, gamma]))
        confidence, accepted = np.empty((R, gamma)), np.empty((R, 1), dtype=np.int64)
        for i, (slot, place) in enumerate(zip(slots.tolist(), positions.tolist())):
            answer = self.answers[self.answer[slot]]
            # the anchor's place in the answer; the last record also serves the answer's very end
            at = min(place - self.start[slot], len(answer["accepted"]) - 1)
            confidence[i], accepted[i] = answer["confidence"][at][:gamma], answer["accepted"][at]
        tokens = torch.from_numpy((np.arange(gamma) < accepted).astype(np.int64))  # (R, G)
        p_draft = torch.nn.functional.one_hot(tokens, self.config.vocab_size).float()
        return Draft(tokens, p_draft, torch.from_numpy(confidence), None)


def record(setup, prompts, gamma, max_new_tokens):
    """Confidence and acceptance at every place of the greedy answers: a block is drafted at each token, none is verified, and
    how much of it would have passed is read off the answer afterwards."""
    encoded = [smollm2.chat(setup.encoding, text) for _, text in prompts]
    seen = [[] for _ in prompts]

    def note(request, cycle):
        if cycle is not None:
            seen[request.slot].append((cycle.draft, cycle.confidence))

    sampling = dspark.Sampling(max_new_tokens=max_new_tokens)
    results = dspark.generate(setup.target, setup.drafter, encoded, sampling=sampling, gamma=gamma, on_cycle=note,
                              policy=lambda c: scheduler.fixed(c, 0))
    answers = []
    for (domain, _), ids, result, blocks in zip(prompts, encoded, results, seen):
        accepted = []
        # block i was drafted after id i. Greedy verification accepts exactly what agrees with what the target went on to say
        for i, (draft, _) in enumerate(blocks):
            n = 0
            while n < gamma and draft[n : n + 1] == result.ids[i + 1 + n : i + 2 + n]:
                n += 1
            accepted.append(n)
        if blocks:
            answers.append(dict(domain=domain, prompt=len(ids), accepted=accepted,
                                confidence=[[round(x, 4) for x in c] for _, c in blocks]))
    sts = cli.nearest_sts(setup, 0.0)
    return dict(gamma=gamma, temperature=0.0, sts=None if sts is None else list(sts), answers=answers)


def h200_like(slots, gamma):
    """A made-up but plausible curve, for what it teaches and not for what it predicts: an 8-billion-parameter target in bf16 on a
    GPU of 4.8 TB/s and some 600 useful TFLOP/s, and a drafter of 5 of its 36 layers. Contexts of a thousand tokens."""
    R, l = np.mgrid[0 : slots + 1, 0 : gamma + 1]
    N = R * (1 + l)
    tiles = 64 * np.ceil(N / 64)              # matrix products come in tiles of 64 rows: a staircase
    reading, computing = 16e9 / 4.8e12, tiles * 2 * 8e9 / 600e12  # s: the weights once; 2 FLOP per weight and row
    caches = R * 1000 * 147e3 / 4.8e12        # keys and values: 147 kB a token, read once per request
    verify = 1e-3 + np.maximum(reading, computing) + caches
    # the sequential head is a launch or so per position; the rest is 5/36 of a pass, and the head of the vocabulary
    draft = 0.3e-3 + 0.05e-3 * l + 0.2 * np.maximum(reading, 64 * np.ceil(R * l / 64) * 2 * 8e9 / 600e12) + caches / 7
    return scheduler.Costs(verify, np.where(l > 0, draft, 0.0))


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def show(console, rows, title):
    """One table per load; bars of throughput; then what ours is against the best of the others, and against MTP-1."""
    # both loops have a load: users, or requests a second
    load = lambda r: r.get("concurrency", r.get("rate"))  # noqa: E731
    for loop in ("closed", "open"):
        part = [r for r in rows if r["loop"] == loop]
        if not part:
            continue
        t = Table("load", "policy", "tokens/s", "least, most", "user p5", "p50", "p95", "first token", "tau", "drafted", "verified", "waste",
                  *PHASES, title=f"{title}, {loop} loop (last five: ms a cycle)", title_justify="left")
        for i, r in enumerate(part):
            last = i + 1 == len(part) or load(part[i + 1]) != load(r)
            t.add_row(f"{load(r):g}", r["policy"], f"{r['tokens_per_s']:.1f}", "{:.1f}, {:.1f}".format(*r["tokens_per_s_range"]),
                      *(f"{r[f'user_tokens_per_s_p{q}']:.1f}" for q in (5, 50, 95)), f"{r['ttft_s_p50']:.2f} s", f"{r['tau']:.2f}",
                      f"{r['drafted']:.1f}", f"{r['verify_budget']:.2f}", f"{r['waste']:.0%}", *(f"{r[p + '_ms']:.1f}" for p in PHASES),
                      end_section=last)
        console.print(t)
        for x in dict.fromkeys(load(r) for r in part):
            at = [r for r in part if load(r) == x]
            most = max(r["tokens_per_s"] for r in at)
            for r in at:
                bar = "\u2588" * round(40 * r["tokens_per_s"] / most)
                console.print(f"{x:6g} {r['policy']:10s} {bar:40s} {r['tokens_per_s']:.1f}", highlight=False, soft_wrap=True)
    for x, ratio, best, over_plain in against_the_best(rows):
        console.print(f"concurrency {x:4d}: adaptive is {ratio:.3f} of the best of the others ({best}), {over_plain:.2f} of plain")
    for x, gain in at_matched_throughput(rows):
        console.print(f"at the throughput of adaptive at concurrency {x}, its users are {gain:+.0%} faster than those of mtp1")


def closed(rows, policy):
    return {r["concurrency"]: r for r in rows if r["loop"] == "closed" and r["policy"] == policy}


def against_the_best(rows):
    """(concurrency, adaptive / best of plain, fixed, threshold and scheduled, which, adaptive / plain) where all were run."""
    ours, out = closed(rows, "adaptive"), []
    others = {name: closed(rows, name) for name in ("plain", "fixed", "threshold", "scheduled")}
    for x, r in ours.items():
        here = {name: o[x]["tokens_per_s"] for name, o in others.items() if x in o}
        if "plain" in here:
            best = max(here, key=here.get)
            out.append((x, r["tokens_per_s"] / max(here[best], 1e-9), best, r["tokens_per_s"] / max(here["plain"], 1e-9)))
    return out


def at_matched_throughput(rows):
    """(concurrency of adaptive, its users' speed over mtp1's at the same throughput - 1), where mtp1's curve reaches it (Fig. 7)."""
    # mtp1's curve as points (throughput, speed): more users, more throughput, slower each
    points = sorted((r["tokens_per_s"], r["user_tokens_per_s_p50"]) for r in closed(rows, "mtp1").values())
    out = []
    for x, r in closed(rows, "adaptive").items():
        if points and points[0][0] <= r["tokens_per_s"] <= points[-1][0]:
            theirs = np.interp(r["tokens_per_s"], *zip(*points))
            out.append((x, r["user_tokens_per_s_p50"] / theirs - 1))
    return out


def draw(rows, folder, name):
    """Fig. 7 and Fig. 8 as PNG; returns the files, none where matplotlib is missing (it is not needed for anything else)."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {p: sorted(closed(rows, p).items()) for p in dict.fromkeys(r["policy"] for r in rows)}
    curves = {p: c for p, c in curves.items() if c}
    # a policy is better the further its curve lies to the upper right
    fig, ax = plt.subplots(figsize=(7, 5))
    for p, c in curves.items():
        ax.plot([r["user_tokens_per_s_p50"] for _, r in c], [r["tokens_per_s"] for _, r in c], marker="o", label=p)
    ax.set(xlabel="tokens/s of the median user", ylabel="tokens/s of all users", title="Throughput against per-user speed (as Fig. 7)")
    ax.legend(), ax.grid(alpha=0.3)
    fig8, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    for p, c in curves.items():
        left.plot([x for x, _ in c], [r["tokens_per_s"] for _, r in c], marker="o", label=p)
        right.plot([x for x, _ in c], [r["verify_budget"] for _, r in c], marker="o", label=p)
    left.set(xlabel="concurrency", ylabel="tokens/s of all users", xscale="log", title="Throughput (as Fig. 8)")
    right.set(xlabel="concurrency", ylabel="draft tokens verified, per request and cycle", xscale="log", title="Verify budget (as Fig. 8)")
    for ax in (left, right):
        ax.legend(), ax.grid(alpha=0.3)
    files = [folder / f"{name}_fig7.png", folder / f"{name}_fig8.png"]
    for figure, path in zip((fig, fig8), files):
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        plt.close(figure)
    return files


def keep(console, rows, info, folder, name):
    """Write the rows and draw the figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(dict(rows=rows, machine=info), indent=1))
    files = draw(rows, folder, name)
    console.print(f"written: {path}" + "".join(f", {f.name}" for f in files) + ("" if files else " (no figures: pip install matplotlib)"))


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def parse(argv):
    p = argparse.ArgumentParser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    for name in ("serve", "simulate"):
        c = commands.add_parser(name)
        c.add_argument("--prompts", default=bench.PROMPTS, help="JSONL file (default: prompts.jsonl)")
        c.add_argument("--concurrency", type=int, nargs="*", help="of the closed loop (default: 1 2 4 .. 64; simulate: up to 1000)")
        c.add_argument("--rates", type=float, nargs="*", default=[], help="of the open loop: requests a second (default: none)")
        c.add_argument("--slots", type=int, default=64, help="of the open loop: requests at once (default: 64)")
        c.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
        c.add_argument("--repeats", type=int, help="(default: 3; simulate, which has no noise: 1)")
        c.add_argument("--completions", type=int, default=12, help="requests that must end in a run, or as many as there are users")
        c.add_argument("--max-new-tokens", type=int, default=128, help="longest answer; limits are random from a quarter of it")
        c.add_argument("--temperature", type=float, default=0.0)
        c.add_argument("--gamma", type=int, help="longest block (default: the drafter's trained one)")
        c.add_argument("--threshold", type=float, default=0.4)
        c.add_argument("--prefill-rows", type=int, help="rows of prompts run between two cycles, at most (default: 128; curve h200: 4096)")
        c.add_argument("--out", type=Path, help="folder for the JSON and the figures (default: docs/results; --quick: nowhere)")
        c.add_argument("--quick", action="store_true", help="fewer and shorter runs")
        c.add_argument("--target"), c.add_argument("--drafter"), c.add_argument("--device", default="auto")
        c.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto")
    c = commands.choices["simulate"]  # the rest is simulate's alone
    c.add_argument("--curve", choices=["h200", "here"], default="h200", help="what cycles cost: made up, or profiled on this machine")
    c.add_argument("--acceptance", type=Path, default=RECORD, help="file of recorded acceptance (default: docs/results/acceptance.json)")
    c.add_argument("--record", action="store_true", help="make that file first, with the model")
    c.add_argument("--check", action="store_true", help="with --curve here: also run the models, and compare")
    args = p.parse_args(argv)
    simulated = args.command == "simulate"
    if args.concurrency is None:
        args.concurrency = [1, 4, 16] if args.quick else [1, 4, 16, 64, 256, 1000] if simulated and args.curve == "h200" else [1, 2, 4, 8, 16, 32, 64]
    if args.prefill_rows is None:
        # enough to keep all users busy, or prompts are what is measured; few enough that a cycle does not wait long for them
        args.prefill_rows = 4096 if simulated and args.curve == "h200" else 128
    if args.repeats is None:
        args.repeats = 1 if simulated or args.quick else 3
    if args.quick:
        args.completions, args.max_new_tokens = min(args.completions, 4), min(args.max_new_tokens, 24)
        args.slots = min(args.slots, 16)
    if min([*args.concurrency, args.repeats, args.completions, args.prefill_rows, args.slots, 1]) < 1 or args.max_new_tokens < 2:
        raise ValueError("concurrency, repeats, completions, slots and prefill rows must be at least 1, --max-new-tokens at least 2")
    if not args.concurrency and not args.rates or any(r <= 0 for r in args.rates):
        raise ValueError("give a --concurrency, or --rates above 0")
    if not 0 <= args.threshold <= 1:
        raise ValueError(f"--threshold {args.threshold}: must be in [0, 1]")
    return args


def models(args):
    """Setup, prompts as (domain, text), block length: whatever cannot be run is refused here."""
    setup = cli.load(args.target, args.drafter, args.device, args.dtype)
    if setup.drafter is None:
        raise ValueError("--drafter none: there is nothing to compare with plain decoding")
    gamma = setup.drafter.gamma if args.gamma is None else args.gamma
    if not 1 <= gamma <= setup.drafter.gamma:
        raise ValueError(f"--gamma {gamma}: this drafter was trained for blocks of 1 to {setup.drafter.gamma}")
    prompts = bench.read_prompts(args.prompts)
    cli.check_size(setup.target, [text for _, text in prompts])
    encoded = [smollm2.chat(setup.encoding, text) for _, text in prompts]
    wanted = dspark.Sampling(args.temperature, max_new_tokens=args.max_new_tokens)
    dspark.check(setup.target, setup.drafter, encoded, [wanted] * len(encoded), gamma, setup.encoding)
    return setup, prompts, gamma


def costs_here(setup, prompts, gamma, args):
    """This machine's costs, for as many requests as there will be, and contexts about as long as the longest among them: attention pads
    all to that."""
    most = max([*args.concurrency, args.slots if args.rates else 1])
    longest = max(len(smollm2.chat(setup.encoding, text)) for _, text in prompts)
    # limits average 5/8 of the longest answer; rounded, so that the profile is found again
    context = 32 * max(1, round((longest + args.max_new_tokens * 5 / 8) / 32))
    return cli.cached_costs(setup.target, setup.drafter, most, gamma, smollm2.cache_dir() / "sps.json", context=context)


def serve(args, console):
    setup, prompts, gamma = models(args)
    costs = costs_here(setup, prompts, gamma, args)
    policies = make_policies(costs, cli.nearest_sts(setup, args.temperature), gamma, args.threshold)
    policies = {name: policies[name] for name in args.policies}
    jobs = [(ids, args.max_new_tokens) for ids in in_turn([(d, smollm2.chat(setup.encoding, text)) for d, text in prompts])]
    parts = Parts(setup.target, setup.drafter)
    warm = [ids for ids, _ in jobs[: min(4, len(jobs))]]  # first calls of a shape build kernels: not part of any figure
    for drafter in (None, setup.drafter):
        dspark.generate(setup.target, drafter, warm, sampling=dspark.Sampling(max_new_tokens=8))
    rows = measure(lambda: parts, policies, jobs, args, "serve")
    info = bench.machine(setup) | dict(gamma=gamma, prefill_rows=args.prefill_rows, max_new_tokens=args.max_new_tokens)
    show(console, rows, f"{info['processor']}, {info['threads']} threads, {info['dtype']}, temperature {args.temperature:g}, block {gamma}")
    return rows, info


def simulate(args, console):
    if args.temperature:
        raise ValueError("simulate replays greedy answers: --temperature 0")
    setup = None
    if args.record or args.curve == "here" or args.check:
        setup, prompts, gamma = models(args)
    if args.record:
        args.acceptance.parent.mkdir(parents=True, exist_ok=True)
        args.acceptance.write_text(json.dumps(record(setup, prompts, setup.drafter.gamma, args.max_new_tokens)))
        console.print(f"written: {args.acceptance}")
    try:
        known = json.loads(args.acceptance.read_text())
        answers, trained, sts = known["answers"], int(known["gamma"]), known["sts"]
        assert answers and all(len(a["accepted"]) == len(a["confidence"]) > 0 for a in answers)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"no recorded acceptance in {args.acceptance}: make it with 'python bench.py simulate --record'")
    gamma = trained if args.gamma is None else args.gamma
    if not 1 <= gamma <= trained:
        raise ValueError(f"--gamma {gamma}: the record has blocks of {trained}")
    most = max([*args.concurrency, args.slots if args.rates else 1])
    costs = costs_here(setup, prompts, gamma, args) if args.curve == "here" else h200_like(most, gamma)
    policies = make_policies(costs, sts, gamma, args.threshold)
    policies = {name: policies[name] for name in args.policies}

    def parts():
        clock = VirtualClock(own=args.curve == "here")  # a GPU's host is another machine: there the models alone count
        replay = Replay(answers, gamma, costs, clock)
        return Parts(replay, replay, clock, clock.wait)

    order = in_turn([(a["domain"], i) for i, a in enumerate(answers)])
    # a record of n places is an answer of n + 1 tokens, its first drawn at prefill
    jobs = [([2 + i] * answers[i]["prompt"], len(answers[i]["accepted"]) + 1) for i in order]
    rows = measure(parts, policies, jobs, args, "simulate")
    show(console, rows, f"simulated, curve {args.curve}, block {gamma}")
    info = dict(curve=args.curve, gamma=gamma, prefill_rows=args.prefill_rows, max_new_tokens=args.max_new_tokens)
    if args.check:
        if args.curve != "here":
            raise ValueError("--check compares with this machine: add --curve here")
        texts = [(d, smollm2.chat(setup.encoding, text)) for d, text in prompts]
        if [len(ids) for _, ids in texts] != [a["prompt"] for a in answers]:
            raise ValueError(f"{args.acceptance} was recorded with other prompts: make it anew with --record")
        # the same jobs, with the real prompts, the real models and the real clock
        real_jobs = [(texts[i][1], longest) for i, (_, longest) in zip(order, jobs)]
        real = measure(lambda: Parts(setup.target, setup.drafter), policies, real_jobs, args, "the same, really")
        t = Table("load", "policy", "tokens/s simulated", "real", "simulated / real", "tau simulated", "real", title="check", title_justify="left")
        for a, b in zip(rows, real):
            a["real_tokens_per_s"], a["real_tau"] = b["tokens_per_s"], b["tau"]
            t.add_row(f"{a.get('concurrency', a.get('rate')):g}", a["policy"], f"{a['tokens_per_s']:.1f}", f"{b['tokens_per_s']:.1f}",
                      f"{a['tokens_per_s'] / max(b['tokens_per_s'], 1e-9):.3f}", f"{a['tau']:.2f}", f"{b['tau']:.2f}")
        console.print(t)
    return rows, info


def main(argv):
    try:
        args = parse(argv)
        keep_freed_memory()
        console = Console(width=None if sys.stdout and sys.stdout.isatty() else 190, highlight=False)
        rows, info = {"serve": serve, "simulate": simulate}[args.command](args, console)
        folder = args.out or (None if args.quick else HERE / "docs" / "results")
        if folder:
            keep(console, rows, info, folder, args.command)
        print(json.dumps(dict(rows=rows, machine=info)))  # last, and on one line: for whoever reads it by machine
    except (ValueError, smollm2.SetupError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])

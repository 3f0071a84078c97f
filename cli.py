"""The command line of dspark.py: read options, stream the answer coloured by origin, account for it.

Output   the answer; then a table: tokens, cycles, tau, acceptance by position, ms per cycle, tokens/s, speed-up over plain
         decoding of the same prompt, measured in the same run. --json: one line per prompt instead.
Errors   one line on stderr and exit code 2. Ctrl-C keeps what was produced (exit code 130).
"""
import argparse
import codecs
import hashlib
import json
import os
import platform
import sys
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

import checkpoints
import drafter as drafting
import dspark
import scheduler
import smollm2
from baselines import CopyFirst
from target import keep_freed_memory
from verify import logits_to_probs, verify_tokens

STYLES = {"first": "dim", "accepted": "green", "correction": "yellow", "bonus": "cyan"}
POLICIES = ["plain", "fixed", "threshold", "scheduled", "async", "adaptive"]
NOISY = 0.1  # a profile whose repeats differ by more is not kept
GAMMA = 4  # the fastest block on two CPU cores, by bench.py; a GPU, or a better drafter, will want the whole one
COPY = "+copy"  # after a drafter's name: CopyFirst
DRAFTER = Path(__file__).parent / "weights" / "dspark.safetensors"


def parse(argv):
    p = argparse.ArgumentParser(prog="dspark.py", description="Decode with DSpark speculative decoding (default target: SmolLM2-135M-Instruct).")
    p.add_argument("--prompt", action="append", help="the user's message; several share one batch; none: read standard input")
    p.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    p.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass; 1: all (default)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--stop", action="append", default=[], help="end the answer before this text; may be given several times")
    # everything below is about how the answer is found, not about what it says
    p.add_argument("--gamma", type=int, help=f"draft tokens a cycle, up to the drafter's trained block (default: {GAMMA}; 0: plain decoding)")
    p.add_argument("--policy", choices=POLICIES, default="scheduled",
                   help="how much to verify: nothing, the whole block, up to the first doubtful token, Algorithm 1, its asynchronous "
                        "form (Sec. 5.2), ours with T_draft in it")
    p.add_argument("--threshold", type=float, default=0.4, help="of --policy threshold: least confidence that is verified")
    p.add_argument("--target", help="GGUF file, folder as Hugging Face writes them (Llama, Qwen3), or hub name (default: "
                   f"{smollm2.FILE} in the user's cache, fetched on first use)")
    p.add_argument("--drafter", help="safetensors file, its name in weights/ (default: dspark), a checkpoint folder, or none; with +copy "
                   "after it: copy where the text repeats itself")
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument("--dtype", choices=["auto", "bf16", "fp32"], default="auto", help="auto: bf16 where the hardware has it")
    p.add_argument("--trace", action="store_true", help="one line a cycle instead of the stream")
    p.add_argument("--json", action="store_true", help="one line of JSON per prompt")
    p.add_argument("--no-compare", action="store_true", help="do not run plain decoding for comparison")
    p.add_argument("--profile", action="store_true",
                   help="measure anew what target and drafter cost at every batch, and show it; with no prompt, only that")
    p.add_argument("--slots", type=int, default=8, help="of --profile without a prompt: requests at once, up to so many (default: 8)")
    return p.parse_args(argv)


# ---------------------------------------------------------------------------------------------------------------------
# Setting up


@dataclass
class Setup:
    target: object
    drafter: object  # or None
    encoding: object
    calibration: dict  # sampling temperature -> STS temperatures (G,)


def best_dtype(device: str):
    """bf16 where products in it are fast: GPUs, and processors that say so. Elsewhere it is emulated and slower than fp32."""
    if device == "cuda":
        return torch.bfloat16
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def find_drafter(name) -> Path:
    """A file or a checkpoint folder, or the name of one in weights/; None: the default. What follows a + is not part of it."""
    if name is None:
        return DRAFTER
    name = str(name).removesuffix(COPY)
    if "." in name or "/" in name:
        return Path(name)
    named = DRAFTER.with_name(f"{name}.safetensors")
    return Path(name) if Path(name).is_dir() and not named.exists() else named


def load(target=None, drafter=None, device="auto", dtype="auto", max_len=2048) -> Setup:
    """Target, drafter and its calibration, as dspark.py and bench.py use them. ValueError or SetupError with a remedy."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: choose auto, cpu or cuda")
    # target, drafter and caches share it; probabilities are fp32 in any case
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": best_dtype(device)}[dtype]
    path = None if drafter == "none" else find_drafter(drafter)
    model, encoding = checkpoints.load_target(target, dtype, device, max_len, path)
    if path is None:
        return Setup(model, None, encoding, {})
    drafter, calibration = load_drafter(drafter, model)
    return Setup(model, drafter, encoding, calibration)


def load_drafter(name, target):
    """What --drafter names -> (drafter, its calibration). NAME+copy copies first, and calibrates its network itself."""
    path = find_drafter(name)
    drafter = drafting.load(path, target)
    calibration = read_calibration(path, drafter.gamma)
    return (CopyFirst(drafter, calibration), {}) if str(name).endswith(COPY) else (drafter, calibration)


def read_calibration(path: Path, gamma: int) -> dict:
    """STS temperatures (G,) by sampling temperature, from the record that train.py wrote beside the weights, or into the folder; {}
    without one: confidences are then taken as they are."""
    record = path / "record.json" if path.is_dir() else path.with_suffix(".json")
    try:
        known = json.loads(record.read_text()).get("calibration", {}) if record.is_file() else {}
        calibration = {float(t): np.array(v, dtype=np.float64) for t, v in known.items()}
        if not all(v.ndim == 1 and len(v) == gamma and (v > 0).all() for v in calibration.values()):
            raise ValueError("not positive numbers, one per position")
    except (ValueError, TypeError, AttributeError):
        raise ValueError(f"{record} is not this drafter's record: restore it, or run 'python train.py calibrate'")
    return calibration


# ---------------------------------------------------------------------------------------------------------------------
# What a cycle costs on this machine


def grid(slots, gamma):
    """(R, l) at which costs are measured: R in powers of two up to the slots, l closely for one request, else coarsely."""
    Rs = sorted({2**i for i in range(slots.bit_length()) if 2**i <= slots} | {slots})
    return [(R, l) for R in Rs for l in range(gamma + 1) if R <= 2 or l in (0, 1, 2, 4, gamma)]


def spread(R, l, longest):
    """R verify lengths in 0..longest that add up to R l, as a scheduler chooses them: some 0, many short, a few long.

    >>> spread(8, 1, 3), spread(3, 2, 2)
    ([0, 0, 0, 1, 1, 1, 2, 3], [2, 2, 2])
    """
    if R == 1 or l in (0, longest):
        return [l] * R
    k, low, high = np.arange(longest + 1), -5.0, 5.0
    for _ in range(50):  # the geometric law on 0..longest whose mean is l
        middle = (low + high) / 2
        p = np.exp(middle * k) / np.exp(middle * k).sum()
        low, high = (middle, high) if p @ k < l else (low, middle)
    lengths = np.searchsorted(p.cumsum(), (np.arange(R) + 0.5) / R).clip(max=longest)
    while (missing := R * l - lengths.sum()) != 0:  # rounding
        lengths[lengths.argmin() if missing > 0 else lengths.argmax()] += np.sign(missing)
    return lengths.tolist()


@torch.inference_mode()
def measure_costs(target, drafter, slots, gamma, context=256):
    """Really run a cycle's parts -> ({(R, l): seconds of verifying}, {(R, l): seconds of drafting}, noise) (Sec. 3.2.2).

    R requests that hold `context` tokens each: on a processor with little bandwidth, reading those is a good part of a pass over
    many. Verifying is the target's pass over R (1 + l) rows, p_target, the acceptance test
    and the drafter's extension by the anchors; drafting is a block of l tokens. Where a scheduler cuts, lengths differ, and attention
    pads all requests to the longest: so l is a mean, of lengths up to 2 l + 1. Measured with equal ones, 64 requests looked 40 % cheaper.
    """
    device, K = target.device, len(drafter.draft_ids)
    context = min(context, target.config.max_len - gamma - 1)
    cache, draft_cache = target.new_cache(slots, context + gamma + 1), drafter.new_cache(slots, context + gamma + 1)
    u = torch.full((slots, gamma + 1), 0.5, dtype=torch.float64, device=device)
    p_draft = torch.full((slots, gamma, K), 1 / K, device=device)

    def verifying(R, l):
        slot = torch.arange(R, device=device)
        each = spread(R, l, min(gamma, 2 * l + 1))
        lengths = torch.tensor(each, device=device)
        rows, places = slot.repeat_interleave(1 + lengths), context + torch.cat([torch.arange(1 + n) for n in each]).to(device)
        first = (1 + lengths).cumsum(0) - 1 - lengths  # (R,) the anchors' rows
        logits, features = target(torch.ones_like(rows), rows, places, cache, drafter.feature_layers)
        G = max(each)
        tokens = torch.ones(R, G, dtype=torch.long, device=device)
        verify_tokens(logits_to_probs(logits, 1.0), p_draft[:R, :G], tokens, lengths, u[:R, : G + 1], drafter.draft_ids)
        drafter.extend(torch.ones_like(slot), features[first], slot, torch.full_like(slot, context), draft_cache)

    def drafting(R, l):
        slot = torch.arange(R, device=device)
        drafter.propose(torch.ones_like(slot), slot, torch.full_like(slot, context), draft_cache, l, u[:R, :l], 1.0)

    def step(part, R, l):
        part(R, l)
        if device.type == "cuda":
            torch.cuda.synchronize()

    points = [(verifying, *point) for point in grid(slots, gamma)] + [(drafting, R, l) for R, l in grid(slots, gamma) if l]
    seconds, noise = scheduler.profile(step, points)
    verify, draft = ({(R, l): float(t) for (p, R, l), t in zip(points, seconds) if p is part} for part in (verifying, drafting))
    return verify, draft, noise


def cached_costs(target, drafter, slots, gamma, path: Path, again=False, show=None, context=256):
    """measure_costs as scheduler.Costs, kept in a JSON file by all it depends on: machine, models, dtype, device, threads, slots,
    block, context. A noisy measurement is used, having nothing better, but not kept. show(verify, draft, noise) is called with the points.
    """
    # what the arithmetic depends on is the shapes, not the values of the weights
    drafter = getattr(drafter, "network", drafter)  # of CopyFirst: copying costs next to nothing
    shapes = (target.config, drafter.config, len(drafter.draft_ids))
    if drafter.target_config != target.config:  # a checkpoint's own layers
        shapes += (drafter.target_config,)
    models = hashlib.sha1(repr(shapes).encode()).hexdigest()[:12]
    key = (f"{platform.node()} torch {torch.__version__} models {models} {target.dtype} {target.device} threads "
           f"{torch.get_num_threads()} slots {slots} G {gamma} context {context} spread")
    try:
        known = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or not ours: measure
        known = {}
    wanted = grid(slots, gamma)
    try:
        kept = known.get(key, {})
        verify, draft = ({(int(R), int(l)): float(t) for R, l, t in kept[name]} for name in ("verify", "draft"))
        noise = float(kept["noise"])
        usable = list(verify) == wanted and list(draft) == [x for x in wanted if x[1]] and min(*verify.values(), *draft.values()) > 0
    except (KeyError, ValueError, TypeError):
        usable = False
    if again or not usable:
        verify, draft, noise = measure_costs(target, drafter, slots, gamma, context)
        if noise > NOISY:
            print(f"the machine is too busy for a good profile: repeats of a point differ by {noise:.0%}; it is used, but not kept",
                  file=sys.stderr)
        else:
            points = dict(verify=[[*x, t] for x, t in verify.items()], draft=[[*x, t] for x, t in draft.items()], noise=noise)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps(known | {key: points}))
                part.replace(path)  # whole or not at all
            except OSError:
                pass  # nowhere to keep it: measured again next time
    if show:
        show(verify, draft, noise)
    return scheduler.costs_from(verify, draft, slots, gamma)


def show_costs(console, verify, draft, noise):
    """The measured points as a table, T over N as a plot of blocks, and how well a + b N describes them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a, b, error = scheduler.fit(verify)
    Rs, ls = sorted({R for R, _ in verify}), sorted({l for _, l in verify})
    t = Table("R", *(f"verify {l}" for l in ls), *(f"draft {l}" for l in ls if l), title="ms for R requests with so many draft tokens each",
              title_justify="left", box=None)
    for R in Rs:
        cells = [verify.get((R, l)) for l in ls] + [draft.get((R, l)) for l in ls if l]
        t.add_row(str(R), *("" if x is None else f"{x * 1e3:.1f}" for x in cells))
    console.print(t)
    console.print("\nverify, ms over rows N = R (1 + l); | is the fit")
    worst = max(verify.values())
    # by N, then R: where one N was measured in several shapes, the difference is what SPS(N) alone cannot say
    for (R, l), seconds in sorted(verify.items(), key=lambda point: (point[0][0] * (1 + point[0][1]), point[0])):
        N = R * (1 + l)
        bar, at = "\u2588" * round(50 * seconds / worst), min(55, max(0, round(50 * (a + b * N) / worst)))
        bar = bar.ljust(56)
        console.print(f"{N:5d} R {R:3d} {bar[:at]}|{bar[at + 1 :]} {seconds * 1e3:7.1f}", soft_wrap=True, highlight=False)
    console.print(f"T = {a * 1e3:.1f} + {b * 1e3:.3f} N ms, mean error {error:.1%}; repeats of a point differ by {noise:.1%}")
    for w in caught:
        console.print(f"warning: {w.message}", style="yellow")


def check_size(target, prompts):
    """Refuse what cannot fit before it is tokenized: no token is longer than 256 bytes (SmolLM2's: 81, Qwen3's: 128), and the tokenizer
    gives up at a megabyte."""
    most = 256 * target.config.max_len
    for p in prompts:
        if (size := len(p.encode("utf-8", "replace"))) > most:
            raise ValueError(f"a prompt of {size} bytes cannot fit the context of {target.config.max_len} tokens: shorten it")


def make_policy(name, setup, gamma, n_requests, temperature, threshold=0.4, again=False, show=None):
    """The policy that a name stands for, for up to n_requests at once; None: generate()'s own default, whole blocks.

    "async" and "adaptive" remember past cycles: make a new one for another workload.
    """
    if name == "plain":
        return lambda confidence: scheduler.fixed(confidence, 0)
    sts = nearest_sts(setup, temperature)
    if name == "threshold":
        return lambda c: scheduler.threshold(scheduler.calibrated(c, sts), threshold)
    if name == "fixed" or not gamma:  # nothing to schedule
        return None
    costs = cached_costs(setup.target, setup.drafter, n_requests, gamma, smollm2.cache_dir() / "sps.json", again, show)
    kinds = {"scheduled": scheduler.scheduled, "async": scheduler.Async, "adaptive": scheduler.Adaptive}
    return kinds[name](costs, sts)


def nearest_sts(setup, temperature):
    """STS temperatures (G,) of the sampling temperature nearest to this one among those fitted; None: never calibrated."""
    nearest = min(setup.calibration, key=lambda t: abs(t - temperature), default=None)
    return setup.calibration.get(nearest)


# ---------------------------------------------------------------------------------------------------------------------
# Showing


class Streamer:
    """Prints tokens as they are delivered, each in the colour of its origin; together they are exactly Result.text.

    A character may take several tokens, and what may yet turn out to be the beginning of a stop string has to wait.
    """

    def __init__(self, console, encoding, trace, sts=None):
        self.console, self.encoding, self.trace, self.sts = console, encoding, trace, sts
        self.n, self.length = 0, 0  # tokens and characters shown so far
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, request, cycle):
        result = request.result
        if self.trace:
            self.console.print(self.line(cycle, result), soft_wrap=True, highlight=False)
            return
        # the beginning of a stop string is at most all its bytes but one, and may have a token for each
        hold = 0 if result.finish else max((len(s.encode()) - 1 for s in request.sampling.stop), default=0)
        for token, origin in list(zip(result.ids, result.origins))[self.n : max(self.n, len(result.ids) - hold)]:
            self.n += 1
            if token not in request.ends:
                self.show(self.decoder.decode(self.encoding.decode_bytes([token])), STYLES[origin], result)
        if result.finish:
            self.show(self.decoder.decode(b"", final=True), "dim", result)  # a character that was never completed

    def show(self, text, style, result):
        if result.finish == "stop":  # the stop string may begin within the last token
            text = text[: len(result.text) - self.length]
        self.length += len(text)
        # a Segment, not Text or a string: those turn tabs into spaces
        self.console.print(Segments([Segment(text, Style.parse(style))]), end="", soft_wrap=True)

    def line(self, cycle, result):
        show = lambda t: repr(self.encoding.decode([t]))  # noqa: E731
        if cycle is None:
            return Text(f"prefill draws {show(result.ids[0]) if result.ids else 'a stop string'}", "dim")
        text = Text(f"{result.cycles:3d} {show(cycle.anchor)} ->")
        c = np.array([cycle.confidence])  # (1, G), calibrated as the scheduler sees it
        c = scheduler.apply_sts(c, self.sts) if self.sts is not None and c.size else c
        for k, (token, c_k, a_k) in enumerate(zip(cycle.draft, c[0], c[0].cumprod())):
            # green: accepted; red and struck out: rejected, or behind a rejection; dim: the scheduler left it out
            if k == cycle.verify_len:
                text.append(" |", "bold")  # the scheduler cut here
            style = "green" if k < cycle.n_accepted else "red strike" if k < cycle.verify_len else "dim"
            text.append(" ").append(show(token), style).append(f" c={c_k:.2f} a={a_k:.2f}", "dim")
        kind = "bonus" if cycle.n_accepted == cycle.verify_len else "correction"
        return text.append(f"  accepted {cycle.n_accepted}/{cycle.verify_len}, {kind} ").append(show(cycle.next_token), STYLES[kind])


def tokens_per_s(results):
    """Delivered tokens per second of decoding; prefill and the token it draws are left out, for every policy alike."""
    ledger = results[0].ledger
    seconds = sum(v for k, v in ledger.items() if k != "prefill")
    return sum(r.gained for r in results) / seconds if seconds else 0.0


def cancelled(results):
    """generate() ends at Ctrl-C and returns what it has: did it?"""
    return any(r.finish == "cancelled" for r in results)


def first_difference(target, prompt, ids, plain):
    """None if equal, else (index, margin): where the ids part, and the target's top-2 logit margin there.

    In fp32 they must not part. In bf16 rows of one and of several tokens go through different matrix code; where the margin
    is within its rounding, the argmax may flip, after which the texts differ.
    """
    at = next((i for i, (a, b) in enumerate(zip_longest(ids, plain)) if a != b), None)  # one may also end before the other
    if at is None:
        return None
    tokens = torch.tensor(prompt + plain[:at], device=target.device)
    slots, places = torch.zeros_like(tokens), torch.arange(len(tokens), device=tokens.device)
    logits, _ = target(tokens, slots, places, target.new_cache(1, len(tokens)), logit_rows=[-1])
    top = logits[0].topk(2).values
    return at, (top[0] - top[1]).item()


def table(results, plain, difference):
    """The account of a run, from its own counts."""
    # requests of a batch share its cycles: the longest one was in all of them
    ledger, cycles = results[0].ledger, max(r.cycles for r in results)
    total_cycles, tokens = sum(r.cycles for r in results), sum(len(r.ids) for r in results)
    t = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    t.add_row("tokens", f"{tokens} in {total_cycles} cycles, finish: {', '.join(r.finish for r in results)}")
    if total_cycles:
        tau = sum(r.gained for r in results) / total_cycles
        t.add_row("tau", f"{tau:.2f} tokens a cycle, correction or bonus included")
        accepted = [sum(r.accepted_at[k] for r in results) for k in range(len(results[0].accepted_at))]
        verified = [sum(r.verified_at[k] for r in results) for k in range(len(accepted))]
        if accepted:
            t.add_row("accepted", "  ".join(f"{a / total_cycles:.2f}" for a in accepted) + "  of all cycles, by position")
            t.add_row("verified", "  ".join(f"{v / total_cycles:.2f}" for v in verified) + "  of all cycles, by position")
        parts = "  ".join(f"{k} {v / cycles * 1e3:.1f}" for k, v in ledger.items() if k != "prefill")
        t.add_row("ms a cycle", f"{parts}  (prefill, once: {ledger['prefill'] * 1e3:.0f})")
        t.add_row("tokens/s", f"{tokens_per_s(results):.1f}")
    if plain:
        if tokens_per_s(plain):  # none if every answer was the one token that prefill draws
            t.add_row("plain", f"{tokens_per_s(plain):.1f} tokens/s  ->  speed-up {tokens_per_s(results) / tokens_per_s(plain):.2f}x")
        if difference is not None:
            same = "the same tokens as plain decoding" if not difference else "; ".join(
                f"parts from plain decoding at token {at}, top-2 logit margin there {margin:.3g}" for at, margin in difference)
            t.add_row("check", same)
    return t


def main(argv=None):
    args = parse(argv)
    try:
        sys.exit(run(args))
    except (ValueError, smollm2.SetupError) as error:
        print(f"dspark.py: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader went away: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk behind the redirection, say
        print(f"dspark.py: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered must not fail again at exit
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def profile(args):
    """--profile by itself: measure, keep, show."""
    setup = load(args.target, args.drafter, args.device, args.dtype)
    if setup.drafter is None:
        raise ValueError("--profile measures the drafter too: leave out --drafter none")
    gamma = setup.drafter.gamma if args.gamma is None else args.gamma
    if not 1 <= gamma <= setup.drafter.gamma or not 1 <= args.slots <= 1024:
        raise ValueError(f"--gamma {gamma}, --slots {args.slots}: blocks of 1 to {setup.drafter.gamma}, 1 to 1024 slots")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    show = lambda *points: show_costs(console, *points)  # noqa: E731
    cached_costs(setup.target, setup.drafter, args.slots, gamma, smollm2.cache_dir() / "sps.json", True, show)
    return 0


def run(args):
    if args.profile and not args.prompt:
        keep_freed_memory()
        return profile(args)
    prompts = args.prompt or ([] if sys.stdin is None or sys.stdin.isatty() else [sys.stdin.read()])
    prompts = [p.encode("utf-8", "replace").decode() for p in prompts]  # bytes that were no text came in as lone surrogates
    if not prompts or not all(p.strip() for p in prompts):
        raise ValueError('an empty prompt: use --prompt "your question", or pipe it in')
    if not 0 <= args.threshold <= 1:
        raise ValueError(f"--threshold {args.threshold}: must be in [0, 1]")
    if args.trace and (args.json or len(prompts) > 1):
        raise ValueError("--trace shows one prompt, and no JSON: leave out the rest")
    keep_freed_memory()
    setup = load(args.target, "none" if args.policy == "plain" else args.drafter, args.device, args.dtype)
    target, drafter, encoding = setup.target, setup.drafter, setup.encoding
    check_size(target, prompts)
    ids = [smollm2.chat(encoding, p) for p in prompts]
    sampling = [dspark.Sampling(args.temperature, args.top_k, args.top_p, args.seed + i, args.max_new_tokens, tuple(args.stop))
                for i in range(len(ids))]
    gamma = min(GAMMA, dspark.block_length(drafter, None)) if args.gamma is None else args.gamma
    dspark.check(target, drafter, ids, sampling, gamma, encoding)
    show = (lambda *points: show_costs(Console(stderr=True, highlight=False), *points)) if args.profile else None
    policy = make_policy(args.policy, setup, gamma, len(ids), args.temperature, args.threshold, args.profile, show)
    # first calls of every shape build kernels: not part of any figure
    warm = dspark.Sampling(max_new_tokens=min(12, args.max_new_tokens))
    if cancelled(dspark.generate(target, drafter, ids, sampling=warm, gamma=gamma)):
        return 130

    # streaming is for one answer; several would interleave, so they are shown when all are done
    # wide where it is piped, so that no line of the account breaks; colours only where the output is a terminal and NO_COLOR is not set
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    alone = len(ids) == 1 and not args.json
    streamer = Streamer(console, encoding, args.trace, nearest_sts(setup, args.temperature)) if alone else None
    results = dspark.generate(target, drafter, ids, sampling=sampling, gamma=gamma, policy=policy, encoding=encoding,
                              on_cycle=streamer)
    stopped = cancelled(results)
    if not args.json:
        for prompt, r in zip(prompts, results) if not alone or args.trace else ():
            console.print(Text(f"\n> {prompt}" if len(ids) > 1 else ""), Text(r.text), sep="\n", soft_wrap=True)
        console.print("\n")
    plain, difference = None, None
    # the same prompts through the same engine with no drafter: a few seconds, and the only honest yardstick
    if gamma and not args.no_compare and not stopped:
        plain = dspark.generate(target, None, ids, sampling=warm)
        if not cancelled(plain):
            plain = dspark.generate(target, None, ids, sampling=sampling, encoding=encoding)
        if stopped := cancelled(plain):
            plain = None
        elif args.temperature == 0:
            found = [first_difference(target, i, r.ids, p.ids) for i, r, p in zip(ids, results, plain)]
            difference = [d for d in found if d is not None]
    if args.json:
        for i, r in enumerate(results):
            same = None if difference is None else r.ids == plain[i].ids
            print(json.dumps(dict(text=r.text, ids=r.ids, tau=r.tau, cycles=r.cycles, tokens_per_s=tokens_per_s(results),
                                  plain_tokens_per_s=tokens_per_s(plain) if plain else None, identical_to_plain=same,
                                  finish=r.finish, ledger_ms={k: v * 1e3 for k, v in r.ledger.items()})))
    else:
        if streamer and not args.trace:
            legend = Text("colours: ").append("accepted draft ", "green").append("correction ", "yellow").append("bonus", "cyan")
            console.print(legend)
        console.print(table(results, plain, difference))
    return 130 if stopped else 0

"""Training: the target writes its own data, a drafter is fitted to it, its confidence is calibrated (Sec. 3.3, 5.1; Eq. 8-12).

    python train.py generate     dialogues that the target writes itself, into data/*.npz
    python train.py fit          a drafter from random anchors in those dialogues, into weights/NAME.safetensors
    python train.py calibrate    Sequential Temperature Scaling per sampling temperature, on held-out dialogues

Each resumes after an interruption, shows its progress, and leaves a record beside the weights (weights/NAME.json).
Data     shard files of numpy arrays: ids uint16 (all dialogues end to end), starts int64 (n + 1), answer int32 (index within
         the dialogue of the first answer token), temperature float32 (at which the answer was drawn).
Held out every 50th dialogue, by its place in the data: never trained on, used for the reported tau and for calibration.
Letters  B dialogues, L their padded length, A anchors each, G block length, M valid label rows, D width, K draft vocabulary.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import drafter as drafting
import scheduler
import smollm2
from drafter import DrafterConfig

HELD_OUT = 50  # every 50th dialogue

# ---------------------------------------------------------------------------------------------------------------------
# generate

# The model writes its questions itself, after its own user header. Openings steer it towards the domains that people use
# speculative decoding for; an empty opening lets it ask what it likes.
OPENINGS = {
    "math": ["A store sells", "If a train travels", "What is the sum of", "Solve for x", "How many", "Calculate the", "Tom has",
             "Sarah bought", "A rectangle has", "What is the probability", "Find the", "A farmer", "Explain how to solve",
             "What is the value of", "There are", "Convert", "John earns", "The price of a", "What percent of", "Simplify"],
    "code": ["Write a Python function", "Write a function that", "How do I", "Implement a", "Write a Python program to",
             "Explain what this code does:", "Write a SQL query", "Create a class", "Fix the bug in", "Write a script that",
             "Write a JavaScript function", "How can I sort", "Write code to", "What does the", "Given a list of",
             "Write a program that reads", "Define a Python class", "In Python, how do you", "Write a recursive function",
             "Write a unit test for"],
    "chat": ["", "", "", "", "Why", "What is", "How does", "Can you", "Tell me about", "Write a short story", "Give me tips",
             "Explain", "What are the benefits of", "Describe", "Who was", "Write an email", "Summarize", "I am planning",
             "What should I", "Compare", "Write a poem", "List", "How can I", "Please help me", "What is the difference between",
             "Suggest", "Recommend", "I have a"],
}
# Answers at the temperatures that people decode with; half greedy or nearly, since there the drafter has most to win.
TEMPERATURES, SHARES = (0.0, 0.3, 0.7, 1.0), (0.35, 0.15, 0.2, 0.3)



def sample_rows(logits, temperature, generator):
    """logits (S, V), temperature (S,) -> ids (S,). Inverse CDF; a row at temperature 0 takes its argmax."""
    ids = logits.argmax(-1)
    hot = (temperature > 0).nonzero()[:, 0]
    if len(hot):
        cdf = torch.softmax(logits[hot] / temperature[hot, None], dim=-1).cumsum(-1)
        u = torch.rand(len(hot), 1, generator=generator) * cdf[:, -1:]
        ids[hot] = torch.searchsorted(cdf, u, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return ids


@torch.inference_mode()
def generate_shard(target, encoding, n_sequences, slots, max_question, max_answer, seed):
    """Let the target write n_sequences dialogues; yields each finished one as (ids, answer start, answer temperature).

    Every slot holds one dialogue and moves one token a step: a forced token (opening, assistant header) or a sampled one.
    The system prompt is the same for all: its keys and values are computed once and copied into a slot that starts anew.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    dialogue = smollm2.chat(encoding, "")  # <system turn> <user header> <|im_end|> \n <assistant header>
    cut = len(dialogue) - 1 - dialogue[::-1].index(smollm2.EOS)
    prefix, header = dialogue[:cut], dialogue[cut:]
    max_len = len(prefix) + max_question + len(header) + max_answer + 8
    cache = target.new_cache(slots, max_len)
    P = len(prefix) - 1  # the last prefix token is the first to be fed
    target(*(torch.tensor(x) for x in (prefix[:P], [0] * P, range(P))), cache, logit_rows=[0])
    system = [(k[0, :P].clone(), v[0, :P].clone()) for k, v in zip(cache.k, cache.v)]
    dialogues, forced, answer, temperature = [None] * slots, [[] for _ in range(slots)], [0] * slots, torch.ones(slots)
    goal_temperature, started = [0.0] * slots, 0

    def start(s):
        nonlocal started
        for (k, v), ck, cv in zip(system, cache.k, cache.v):
            ck[s, :P], cv[s, :P] = k, v
        domain = OPENINGS[("math", "code", "chat")[rng.integers(3)]]
        opening = domain[rng.integers(len(domain))]
        dialogues[s], forced[s], answer[s] = list(prefix), smollm2.encode(encoding, opening), 0
        temperature[s], goal_temperature[s] = 0.8, float(rng.choice(TEMPERATURES, p=SHARES))
        started += 1

    for s in range(slots):
        start(s)
    live = list(range(slots))
    while live:
        newest = torch.tensor([dialogues[s][-1] for s in live])
        place = torch.tensor([len(dialogues[s]) - 1 for s in live])
        logits, _ = target(newest, torch.tensor(live), place, cache)
        ids = sample_rows(logits, temperature[live], generator).tolist()
        for s, token in zip(list(live), ids):
            token = forced[s].pop(0) if forced[s] else token
            dialogues[s].append(token)
            if forced[s]:
                continue
            if not answer[s]:
                if token == smollm2.EOS or len(dialogues[s]) - len(prefix) >= max_question:  # the question is asked
                    forced[s] = header[token == smollm2.EOS :]
                    answer[s] = len(dialogues[s]) + len(forced[s])
                    temperature[s] = goal_temperature[s]
            elif len(dialogues[s]) > answer[s] and (token == smollm2.EOS or len(dialogues[s]) - answer[s] >= max_answer):
                yield dialogues[s], answer[s], goal_temperature[s]
                if started < n_sequences:
                    start(s)
                else:
                    live.remove(s)


def generate(args):
    """Write args.sequences dialogues in shards of args.shard; finished shards are skipped, so a second run resumes."""
    target, encoding = smollm2.load(args.target, dtype=torch.bfloat16)
    args.data.mkdir(parents=True, exist_ok=True)
    n_shards, begin, done_tokens = -(-args.sequences // args.shard), time.time(), 0
    for number in range(n_shards):
        path = args.data / f"shard-{args.seed}-{number:04d}.npz"
        if path.exists():
            continue
        ids, starts, answers, temperatures = [], [0], [], []
        for dialogue, answer, t in generate_shard(target, encoding, args.shard, args.slots, args.max_question, args.max_answer,
                                                  seed=args.seed * 10000 + number):
            ids += dialogue
            starts.append(len(ids)), answers.append(answer), temperatures.append(t)
            done_tokens += len(dialogue) - answer
            rate = done_tokens / (time.time() - begin)
            print(f"\rshard {number + 1}/{n_shards}: {len(answers)}/{args.shard} dialogues, {done_tokens} answer tokens, {rate:.0f}/s ", end="", file=sys.stderr)
        part = path.with_suffix(".part.npz")
        np.savez_compressed(part, ids=np.array(ids, np.uint16), starts=np.array(starts), answer=np.array(answers, np.int32),
                            temperature=np.array(temperatures, np.float32))
        part.rename(path)  # whole or not at all


# ---------------------------------------------------------------------------------------------------------------------
# Data and features


def read_data(folder: Path):
    """All shards as a list of (ids int64 (L,), answer start, temperature), split into (training, held out)."""
    dialogues = []
    for path in sorted(folder.glob("*.npz")):
        shard = np.load(path)
        ids, starts = shard["ids"].astype(np.int64), shard["starts"]
        dialogues += [(torch.from_numpy(ids[starts[i] : starts[i + 1]]), int(a), float(t))
                      for i, (a, t) in enumerate(zip(shard["answer"], shard["temperature"]))]
    if not dialogues:
        raise smollm2.SetupError(f"no data in {folder}: run 'python train.py generate' first")
    held_out = dialogues[::HELD_OUT]
    return [d for i, d in enumerate(dialogues) if i % HELD_OUT], held_out


class Features:
    """What the target says about a dialogue, computed once and kept: the drafter's inputs and labels.

    Per token: hidden states of the feature layers (m * D), the last normed hidden state (D) and the log of its softmax's
    normaliser. With these, p_target of any token of any position costs one dot product, not a pass through the model:
    Sec. 5.1's "send hidden states, apply the head at sampled positions only". 4.6 kB a token in bf16.
    """

    def __init__(self, target, feature_layers, keep_gb):
        self.target, self.layers, self.kept, self.room = target, feature_layers, {}, keep_gb * 1e9

    @torch.inference_mode()
    def get(self, keys, dialogues):
        """-> one (features (L, m * D), last (L, D), log normaliser (L,)) per dialogue."""
        missing = [(k, d[0]) for k, d in zip(keys, dialogues) if k not in self.kept]
        fresh = {}
        if missing:
            lengths = [len(ids) for _, ids in missing]
            slots = torch.repeat_interleave(torch.arange(len(missing)), torch.tensor(lengths))
            places = torch.cat([torch.arange(n) for n in lengths])
            cache = self.target.new_cache(len(missing), max(lengths))
            last, features = self.target.hidden(torch.cat([ids for _, ids in missing]), slots, places, cache, self.layers)
            norm = torch.cat([self.target.head(part).float().logsumexp(-1) for part in last.split(256)])
            fresh = dict(zip([k for k, _ in missing], zip(features.split(lengths), last.split(lengths), norm.split(lengths))))
        out = [self.kept.get(k) or fresh[k] for k in keys]
        for k, tensors in fresh.items():
            size = sum(t.numel() * t.element_size() for t in tensors)
            if size <= self.room:
                self.kept[k], self.room = tuple(t.clone() for t in tensors), self.room - size
        return out


def make_batch(dialogues, features, n_anchors, G, rng):
    """Pad dialogues to (B, L), choose A anchors in each answer and mark the labels that exist.

    Slot k of anchor a predicts token a + k, whose target distribution stands at row a + k - 1. Labels past the end of a
    dialogue are masked: always a suffix of the block. Anchors start at the answer's first token, as in decoding.
    """
    B, L = len(dialogues), max(len(d[0]) for d in dialogues)
    tokens, anchors = torch.zeros(B, L, dtype=torch.long), torch.zeros(B, n_anchors, dtype=torch.long)
    stacked = torch.zeros(B, L, features[0][0].shape[1], dtype=features[0][0].dtype)
    valid = torch.zeros(B, n_anchors, G, dtype=torch.bool)
    for b, ((ids, answer, _), (f, _, _)) in enumerate(zip(dialogues, features)):
        tokens[b, : len(ids)], stacked[b, : len(ids)] = ids, f
        room = np.arange(answer, len(ids) - 1)
        chosen = torch.from_numpy(np.sort(rng.permutation(room)[:n_anchors]))
        anchors[b, : len(chosen)] = chosen
        valid[b, : len(chosen)] = chosen[:, None] + torch.arange(1, G + 1) < len(ids)
    b, a, k = valid.nonzero(as_tuple=True)  # (M,) each
    row = anchors[b, a] + k
    last = torch.nn.utils.rnn.pad_sequence([f[1] for f in features], batch_first=True)[b, row]
    normaliser = torch.nn.utils.rnn.pad_sequence([f[2] for f in features], batch_first=True)[b, row]
    return tokens, stacked, anchors, valid, dict(k=k, label=tokens[b, row + 1], last=last, normaliser=normaliser)


# ---------------------------------------------------------------------------------------------------------------------
# fit


class DraftLoss(torch.autograd.Function):
    """Sum over label rows of w (kl KL(p_target | p_draft) + ce CE + tv |p_draft - p_target|_1), and c* of Eq. 8 per row.

    x (M, D + r) = [h ; code], weight (K, D + r) = [head rows ; W2]: logits = x weight^T. The K-wide rows are what a step
    spends its memory traffic on, so a few hundred rows at a time go from logits to gradient while they are in cache, and
    nothing K wide is kept. Derivatives by hand, by the draft logits, with p the draft's and t the target's probabilities:
    KL: (sum t) p - t.   CE: p - onehot.   TV: p (s - sum s p), s = sign(p - t).
    """

    @staticmethod
    def forward(ctx, x, W2, head_rows, last, normaliser, column, w, mix, chunk=256):
        kl, ce, tv = mix
        weight = torch.cat([head_rows, W2.to(head_rows.dtype)], dim=1)
        r = W2.shape[1]
        grad_x, grad_W2 = torch.empty_like(x), torch.zeros_like(W2)
        total, accept = x.new_zeros((), dtype=torch.float32), torch.empty(len(x))
        agree = torch.empty(len(x), dtype=torch.bool)
        for i in range(0, len(x), chunk):
            s = slice(i, i + chunk)
            logits, target_logits = F.linear(x[s], weight).float(), F.linear(last[s], head_rows).float()
            agree[s] = logits.argmax(-1) == column[s]
            log_p = logits.log_softmax(-1)
            p, t = log_p.exp(), target_logits.sub_(normaliser[s, None]).exp_()
            mass = t.sum(-1, keepdim=True)  # of the target inside the draft vocabulary
            accept[s] = torch.minimum(p, t).sum(-1)  # 1 - 0.5 |p - t|_1, the mass outside included
            known = (column[s] >= 0).float()[:, None]  # a label outside the draft vocabulary cannot be drafted: no CE
            col = column[s].clamp(min=0)[:, None]
            total += (w[s] * (tv * 2 * (1 - accept[s]) - ce * (known * log_p.gather(1, col))[:, 0]
                              - kl * (t * log_p).sum(-1))).sum()
            sign = torch.sign(p - t)
            g = p * (tv * (sign - (sign * p).sum(-1, keepdim=True)) + kl * mass + ce * known) - kl * t
            g.scatter_add_(1, col, -ce * known)
            g = (g * w[s, None]).to(x.dtype)
            grad_x[s] = g @ weight
            grad_W2 += (g.T @ x[s, -r:]).to(grad_W2.dtype)
        ctx.save_for_backward(grad_x, grad_W2)
        ctx.mark_non_differentiable(accept, agree)
        return total, accept, agree

    @staticmethod
    def backward(ctx, g, *_):
        grad_x, grad_W2 = ctx.saved_tensors
        return g * grad_x, g * grad_W2, *[None] * 7


def losses(drafter, batch, mix, decay, through):
    """Eq. 9-12 over one batch -> (loss, per-row acceptance c*, per-row greedy agreement, per-row confidence)."""
    tokens, features, anchors, valid, rows = batch
    with torch.autocast("cpu", torch.bfloat16):
        h, code, previous = drafter(features, tokens, anchors)
        x = torch.cat([h, code], dim=-1)[valid].to(drafter.head_rows.dtype)  # (M, D + r)
        w = torch.exp(-rows["k"] / decay)  # k counts from 0 here
        w = w / w.sum()
        column = drafter.w1_row[rows["label"]]
        column = torch.where(column < len(drafter.draft_ids), column, -1)
        loss, accept, agree = DraftLoss.apply(x, drafter.head.W2.weight, drafter.head_rows, rows["last"], rows["normaliser"],
                                              column, w, mix)
        # Stop-gradient unless asked otherwise: the confidence loss would bend the backbone away from drafting well
        h, previous = (h, previous) if through else (h.detach(), previous.detach())
        confidence = drafter.confidence_logit(h[valid], previous[valid]).float()
    conf_loss = (w * F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")).sum()
    return loss + conf_loss, accept, agree, confidence.detach()


def tau_by_position(value, valid):
    """value (M,) conditional acceptance of the valid label rows -> unconditional acceptance by position (G,) over blocks.

    Expected tau is 1 + its sum: the target's own token, then each draft token if all before it survive. Only whole blocks
    count, so that every position is averaged over the same ones.
    """
    grid = torch.zeros(valid.shape)
    grid[valid] = value.float()
    return grid[valid.all(-1)].cumprod(-1).mean(0)


@torch.no_grad()
def evaluate(drafter, features, dialogues, decay):
    """Held-out tau: at temperature 1 from c*, over all dialogues; greedy from argmax agreement, over the greedy ones."""
    rng, at_one, greedy, conf_error = np.random.default_rng(0), [], [], []
    for i in range(0, len(dialogues), 8):
        part = dialogues[i : i + 8]
        batch = make_batch(part, features.get([("held out", i + j) for j in range(len(part))], part), 32, drafter.gamma, rng)
        _, accept, agree, confidence = losses(drafter, batch, (1.0, 0.0, 0.0), decay, False)
        at_one.append(tau_by_position(accept, batch[3]))
        conf_error.append((confidence.sigmoid() - accept).abs().mean())
        cold = torch.tensor([d[2] == 0 for d in part])
        if cold.any():
            rows = cold[batch[3].nonzero()[:, 0]]
            greedy.append(tau_by_position(agree[rows], batch[3][cold]))
    one, zero = torch.stack(at_one).nanmean(0), torch.stack(greedy).nanmean(0)
    return dict(tau_t1=1 + one.sum().item(), tau_t0=1 + zero.sum().item(), accept_t1=[round(v, 4) for v in one.tolist()],
                accept_t0=[round(v, 4) for v in zero.tolist()], confidence_error=torch.stack(conf_error).mean().item())


def make_optimizers(drafter, lr):
    """Muon for the matrices between hidden states, AdamW for embeddings, W2, norms and the confidence head."""
    named = dict(drafter.named_parameters())
    matrices = [p for n, p in named.items() if p.ndim == 2 and not n.startswith(("head.W", "confidence"))]
    rest = [p for n, p in named.items() if p.ndim != 2 or n.startswith(("head.W", "confidence"))]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def loss_mix(kind, progress):
    """Weights (kl, ce, tv) at a point of training. The paper's loss is 0.1 CE + 0.9 TV; from a start where p_draft and
    p_target hardly overlap, TV has next to no gradient, so by default forward KL leads and hands over in the second half."""
    paper = {"paper": 1.0, "kl": 0.0, "kl-then-paper": min(1.0, max(0.0, (progress - 0.5) / 0.25))}[kind]
    return 1.0 - paper, 0.1 * paper, 0.9 * paper


def fit(args):
    torch.manual_seed(args.seed)
    training, held_out = read_data(args.data)
    target, _ = smollm2.load(args.target, dtype=torch.bfloat16)
    counts = torch.bincount(torch.cat([d[0][d[1] :] for d in training]), minlength=target.config.vocab_size)
    draft_ids = counts.topk(args.draft_vocab).indices.sort().values
    coverage = counts[draft_ids].sum().item() / counts.sum().item()
    config = DrafterConfig(args.gamma, args.layers, tuple(args.feature_layers), args.head, args.rank)
    drafter = drafting.from_target(config, target, draft_ids).float()
    drafter.embed, drafter.head_rows = drafter.embed.bfloat16(), drafter.head_rows.bfloat16()
    features = Features(target, drafter.feature_layers, args.keep_gb)
    optimizers = make_optimizers(drafter, args.lr)
    n_params = sum(p.numel() for p in drafter.parameters())
    print(f"{len(training)} dialogues, {counts.sum()} answer tokens (draft vocabulary covers {coverage:.1%}), {len(held_out)} held "
          f"out; {n_params / 1e6:.1f} M parameters; {args.updates} updates of {args.batch} x {args.anchors} blocks", flush=True)
    checkpoint, update, history, spent = args.data / f"{args.name}.ckpt", 0, [], 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        drafter.load_state_dict(state["drafter"])
        for o, s in zip(optimizers, state["optimizers"]):
            o.load_state_dict(s)
        update, history, spent = state["update"], state["history"], state["spent"]
        print(f"resuming {checkpoint} at update {update}", flush=True)
    begin, first, saved = time.time(), update, time.time()
    running = []
    while update < args.updates:
        # a permutation per epoch, from seed and epoch alone: a resumed run sees the order it would have seen
        per_epoch = len(training) // args.batch
        epoch, step = divmod(update, per_epoch)
        order = np.random.default_rng([args.seed, epoch]).permutation(len(training))
        chosen = order[step * args.batch : (step + 1) * args.batch]
        part = [training[i] for i in chosen]
        batch = make_batch(part, features.get(chosen.tolist(), part), args.anchors, drafter.gamma,
                           np.random.default_rng([args.seed, update, 1]))
        progress = update / args.updates
        scale = min(1.0, (update + 1) / (0.04 * args.updates)) * (0.5 + 0.5 * np.cos(np.pi * progress)) + 1e-3
        loss, accept, agree, _ = losses(drafter, batch, loss_mix(args.loss, progress), args.decay, args.confidence_through)
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = args.lr * scale
            o.step()
        update += 1
        running.append((loss.item(), 1 + tau_by_position(accept, batch[3]).sum().item()))
        if update % 20 == 0:
            seconds = (time.time() - begin) / (update - first)
            mean = np.nanmean(running, axis=0)
            running = []
            print(f"update {update}/{args.updates}  loss {mean[0]:.3f}  training tau {mean[1]:.3f}  {seconds:.2f} s/update  "
                  f"{(args.updates - update) * seconds / 60:.0f} min left", flush=True)
        if update % args.eval_every == 0 or update == args.updates:
            history.append(dict(update=update, minutes=round((spent + time.time() - begin) / 60, 1),
                                **evaluate(drafter, features, held_out[:96], args.decay)))
            print("held out:", json.dumps(history[-1]), flush=True)
        if time.time() - saved > 120 or update == args.updates:
            saved = time.time()
            state = dict(drafter=drafter.state_dict(), optimizers=[o.state_dict() for o in optimizers], update=update,
                         history=history, spent=spent + time.time() - begin)
            torch.save(state, f"{checkpoint}.part")
            Path(f"{checkpoint}.part").replace(checkpoint)
    record = dict(settings={k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "run"},
                  parameters=n_params, dialogues=len(training), answer_tokens=counts.sum().item(), draft_coverage=coverage,
                  trained_positions=args.updates * args.batch * args.anchors * args.gamma, history=history)
    args.out.mkdir(parents=True, exist_ok=True)
    drafting.save(drafter, args.out / f"{args.name}.safetensors")
    write_record(args.out / f"{args.name}.json", record)


def write_record(path, record):
    part = Path(f"{path}.part")
    part.write_text(json.dumps(record, indent=1))
    part.replace(path)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="GGUF file (default: the user's cache, fetched on first use)")
    p.add_argument("--data", type=Path, default=Path("data"), help="folder of shards and checkpoints")
    p.add_argument("--out", type=Path, default=Path("weights"), help="folder of drafters")
    p.add_argument("--seed", type=int, default=0)
    commands = p.add_subparsers(required=True)
    g = commands.add_parser("generate", help="the target writes dialogues")
    g.add_argument("--sequences", type=int, default=20000)
    g.add_argument("--shard", type=int, default=768, help="dialogues a file")
    g.add_argument("--slots", type=int, default=96, help="dialogues written at a time")
    g.add_argument("--max-question", type=int, default=64)
    g.add_argument("--max-answer", type=int, default=256)
    g.set_defaults(run=generate)
    f = commands.add_parser("fit", help="train a drafter")
    f.add_argument("--name", default="dspark")
    f.add_argument("--updates", type=int, default=2500)
    f.add_argument("--batch", type=int, default=16, help="dialogues an update")
    f.add_argument("--anchors", type=int, default=32, help="blocks a dialogue")
    f.add_argument("--gamma", type=int, default=7)
    f.add_argument("--layers", type=int, default=2)
    f.add_argument("--feature-layers", type=int, nargs="+", default=[2, 15, 27])
    f.add_argument("--head", choices=drafting.HEADS, default="markov")
    f.add_argument("--rank", type=int, default=96)
    f.add_argument("--draft-vocab", type=int, default=8192)
    f.add_argument("--lr", type=float, default=3e-3)
    f.add_argument("--loss", choices=["kl-then-paper", "kl", "paper"], default="kl-then-paper")
    f.add_argument("--decay", type=float, default=4.0, help="w_k = exp(-(k-1) / decay)")
    f.add_argument("--confidence-through", action="store_true", help="let the confidence loss reach the backbone, as in the paper's code")
    f.add_argument("--eval-every", type=int, default=250)
    f.add_argument("--keep-gb", type=float, default=12.0, help="memory for kept target features")
    f.set_defaults(run=fit)
    args = p.parse_args()
    try:
        args.run(args)
    except (smollm2.SetupError, ValueError) as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command resumes")


if __name__ == "__main__":
    main()

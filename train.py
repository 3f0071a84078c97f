"""Training: the target writes its own data, a drafter is fitted to it, its confidence is calibrated (Sec. 3.3, 5.1; Eq. 8-12).

    python train.py generate     dialogues that the target writes itself, into data/*.npz
    python train.py fit          a drafter from random anchors in those dialogues, into weights/NAME.safetensors
    python train.py refit        its confidence head anew, on held-out dialogues (fit ends with this)
    python train.py calibrate    its bias and Sequential Temperature Scaling, on real decoding of held-out questions
    python train.py export DIR   a drafter as a checkpoint folder for serving engines (deepspec.py, docs/growing.md)

generate and fit resume after an interruption, and run as several processes under torchrun (ranks.py); the others are short. Each leaves
a record beside the weights (weights/NAME.json).
The dialogues and the split into training and held out are corpus.py's.
Letters  B dialogues, L their padded length, A anchors each, G block length, M valid label rows, D width, K draft vocabulary.
"""
import argparse
import json
import math
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import checkpoints
import corpus
import deepspec
import drafter as drafting
import ranks
import scheduler
import smollm2
import study
from drafter import DrafterConfig
from target import keep_freed_memory

# ---------------------------------------------------------------------------------------------------------------------
# fit


def make_batch(dialogues, features, n_anchors, G, rng, mine=slice(None)):
    """Pad B dialogues and their features to length L, choose A anchors in each answer and mark the labels that exist.

    k counts from 0 here: input k of the block at anchor a predicts token a + k + 1, and the target's row a + k holds its distribution.
    Labels past the end of a dialogue are masked: always a suffix of the block. Anchors start at the answer's first token, as
    in decoding. mine: the dialogues of this rank, and features theirs; anchors are drawn for all, so that they do not depend on
    who computes what. -> tokens (B, L), features (B, L, m * D), anchors (B, A), valid (B, A, G), and per label row, (M, ..): k, label,
    last and normaliser of the target's row.
    """
    # a random few of each answer's positions; sorted, so that a short answer's unused anchors come last, and masked
    drawn = [np.sort(rng.permutation(np.arange(d.answer, len(d.ids) - 1))[:n_anchors]) for d in dialogues][mine]
    dialogues = dialogues[mine]
    B, L = len(dialogues), max(len(d.ids) for d in dialogues)  # dialogues of a batch differ in length: padded at the end,
    # where no context and no label ever looks
    tokens, anchors = torch.zeros(B, L, dtype=torch.long), torch.zeros(B, n_anchors, dtype=torch.long)
    stacked = torch.zeros(B, L, features[0][0].shape[1], dtype=features[0][0].dtype)
    valid = torch.zeros(B, n_anchors, G, dtype=torch.bool)
    for b, (d, (f, _, _), chosen) in enumerate(zip(dialogues, features, map(torch.from_numpy, drawn))):
        tokens[b, : len(d.ids)], stacked[b, : len(d.ids)] = d.ids, f
        anchors[b, : len(chosen)] = chosen
        valid[b, : len(chosen)] = chosen[:, None] + torch.arange(1, G + 1) < len(d.ids)
    b, a, k = valid.nonzero(as_tuple=True)  # (M,) each: from here on only labels that exist cost anything
    row = anchors[b, a] + k
    last = torch.nn.utils.rnn.pad_sequence([f[1] for f in features], batch_first=True)[b, row]
    normaliser = torch.nn.utils.rnn.pad_sequence([f[2] for f in features], batch_first=True)[b, row]
    return tokens, stacked, anchors, valid, dict(k=k, label=tokens[b, row + 1], last=last, normaliser=normaliser)


class DraftLoss(torch.autograd.Function):
    """The drafting loss over M label rows, with its gradient, and what each row says about acceptance.

        L_ce = -w log p_draft(label)              cross entropy                                                    (Eq. 9)
        L_tv =  w |p_draft - p_target|_1          total variation, times 2                                         (Eq. 10)
        L_kl = -w sum p_target log p_draft        forward KL but for the target's own entropy: ours, not the paper's
        c*   = 1 - 0.5 |p_draft - p_target|_1     the chance that a token drawn from p_draft is accepted           (Eq. 8)
        L    = 0.1 L_ce + 0.9 L_tv + 1.0 L_conf   the paper's mix (Eq. 12); L_conf (Eq. 11) is losses()'s
    Returns mix[0] L_kl + mix[1] L_ce + mix[2] L_tv, summed; c* (M,); min(1, p_draft / p_target) of the label (M,); and whether
    the label is p_draft's argmax (M,). Over the whole vocabulary: outside draft_ids p_draft is 0.

    x (M, D + r) = [h ; code], weight (K, D + r) = [head rows ; W2]: logits = x weight^T. The K-wide rows are what a step
    spends its memory traffic on, so a few hundred rows at a time go from logits to gradient while they are in cache, and
    nothing K wide is kept. Derivatives by hand, by the draft logits, with p the draft's and t the target's probabilities:
    KL: (sum t) p - t.   CE: p - onehot.   TV: p (s - sum s p), s = sign(p - t).
    """

    @staticmethod
    def forward(ctx, x, W2, head_rows, last, normaliser, column, w, mix, chunk=256):
        kl, ce, tv = mix
        # the head's rows are frozen: x needs their gradient, they need none; W2 is the trained part of the product
        weight = torch.cat([head_rows, W2.to(head_rows.dtype)], dim=1)
        r = W2.shape[1]
        grad_x, grad_W2 = torch.empty_like(x), torch.zeros_like(W2)
        total, accept = x.new_zeros((), dtype=torch.float32), torch.empty(len(x))
        agree, passed = torch.empty(len(x), dtype=torch.bool), torch.empty(len(x))
        for i in range(0, len(x), chunk):
            s = slice(i, i + chunk)
            logits, target_logits = F.linear(x[s], weight).float(), F.linear(last[s], head_rows).float()
            # (chunk, K) each from here to the end of the loop
            agree[s] = logits.argmax(-1) == column[s]
            log_p = logits.log_softmax(-1)
            target_logits -= normaliser[s, None]  # now log p_target
            p, t = log_p.exp(), target_logits.exp()
            mass = t.sum(-1, keepdim=True)  # of the target inside the draft vocabulary
            accept[s] = torch.minimum(p, t).sum(-1)  # 1 - 0.5 |p - t|_1, the mass outside included
            known = (column[s] >= 0).float()[:, None]  # a label outside the draft vocabulary cannot be drafted: no CE
            col = column[s].clamp(min=0)[:, None]
            passed[s] = (known * (log_p - target_logits).gather(1, col).clamp(max=0).exp())[:, 0]
            total += (w[s] * (tv * 2 * (1 - accept[s]) - ce * (known * log_p.gather(1, col))[:, 0]
                              - kl * (t * log_p).sum(-1))).sum()
            sign = torch.sign(p - t)
            g = p * (tv * (sign - (sign * p).sum(-1, keepdim=True)) + kl * mass + ce * known) - kl * t
            g.scatter_add_(1, col, -ce * known)
            g = (g * w[s, None]).to(x.dtype)  # d loss / d logits: all that backward will need
            grad_x[s] = g @ weight
            grad_W2 += (g.T @ x[s, x.shape[1] - r :]).to(grad_W2.dtype)
        ctx.save_for_backward(grad_x, grad_W2)
        ctx.mark_non_differentiable(accept, passed, agree)
        return total, accept, passed, agree

    @staticmethod
    def backward(ctx, g, *_):
        grad_x, grad_W2 = ctx.saved_tensors
        return g * grad_x, g * grad_W2, *[None] * 7


def label_rows(drafter, batch, decay):
    """The drafter's side of every label row: h (M, D), code and previous (M, r), weight w (M,) and column (M,) of the label among
    the draft ids, -1 where it is none. Position k weighs w_k = exp(-(k-1) / decay), normalised to sum 1 over the batch."""
    tokens, features, anchors, valid, rows = batch
    h, code, previous = drafter(features, tokens, anchors)
    w = torch.exp(-rows["k"] / decay)  # k counts from 0 here
    column = drafter.w1_row[rows["label"]]  # K stands for "none of them"
    return h[valid], code[valid], previous[valid], w / w.sum(), torch.where(column < len(drafter.draft_ids), column, -1)


def losses(drafter, batch, mix, decay, through):
    """Eq. 9-12 over one batch: L = drafting loss + 1.0 L_conf, L_conf = w BCE(c, c*) with the label c* detached (Eq. 8, 11).

    mix: weights (kl, ce, tv), the paper's are (0, 0.1, 0.9). through: let L_conf reach the backbone, as the paper's code does.
    -> loss, and per label row (M,): c*, passed, agree as in DraftLoss, and the confidence logit.
    """
    rows = batch[-1]
    with torch.autocast("cpu", torch.bfloat16):
        h, code, previous, w, column = label_rows(drafter, batch, decay)
        x = torch.cat([h, code], dim=-1).to(drafter.head_rows.dtype)  # (M, D + r)
        loss, accept, passed, agree = DraftLoss.apply(
            x, drafter.head.W2.weight, drafter.head_rows, rows["last"], rows["normaliser"], column, w, mix
        )
        # Stop-gradient unless asked otherwise: the confidence loss would bend the backbone away from drafting well
        h, previous = (h, previous) if through else (h.detach(), previous.detach())
        confidence = drafter.confidence_logit(h, previous).float()
    # a soft label, detached (it comes out of DraftLoss without a gradient): the head learns to predict, not to please
    conf_loss = (w * F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")).sum()
    return loss + conf_loss, accept, passed, agree, confidence.detach()


class ShareOfLoss(torch.nn.Module):
    """losses() of this rank's dialogues, scaled so that its mean over ranks is the loss of the whole batch (ranks.share)."""

    def __init__(self, drafter):
        super().__init__()
        self.drafter = drafter

    def forward(self, batch, mix, decay, through):
        loss, *rows = losses(self.drafter, batch, mix, decay, through)
        return loss * ranks.share(torch.exp(-batch[-1]["k"] / decay).sum()), *rows


def tau_by_position(value, valid, passed=None):
    """Conditional acceptance (M,) of the valid label rows -> unconditional acceptance by position (G,), averaged over blocks.

    Expected tau is 1 + its sum: the target's own token, then each draft token if all before it survive. Only whole blocks
    count, so that every position is averaged over the same ones.

    The labels are the target's tokens, not drafted ones, and easy tokens survive more often than they are written: the product
    of c* along a text is not survival. But the chance that text x survives in a block is the product of p_target(x_j)
    min(1, p_draft / p_target)(x_j). So on text drawn from p_target, survival of k is the mean of passed_1 .. passed_{k-1} c*_k.
    passed defaults to value: right for greedy agreement, where a token passes or it does not.
    """
    # (B, A, G) again, with zeros where no label exists: those blocks are left out below
    grid, before = torch.zeros(valid.shape), torch.ones(valid.shape)
    grid[valid] = value.float()
    before[valid] = (value if passed is None else passed).float()
    before = torch.cat([torch.ones(*valid.shape[:2], 1), before[..., :-1].cumprod(-1)], dim=-1)
    return (before * grid)[valid.all(-1)].mean(0)


@torch.no_grad()
def evaluate(drafter, features, dialogues, decay):
    """Held-out expected tau: at temperature 1 over the answers drawn at 1, greedy over the greedy answers (None: there are none)."""
    out, errors = {}, []
    for name, temperature in (("t1", 1.0), ("t0", 0.0)):
        # the same anchors at every call, so that figures of a run can be compared
        rng, means = np.random.default_rng(0), []
        chosen = [d for d in dialogues if d.temperature == temperature]
        for i in range(0, len(chosen), 8):
            part = chosen[i : i + 8]
            batch = make_batch(part, [features.get(d) for d in part], 32, drafter.gamma, rng)
            _, accept, passed, agree, confidence = losses(drafter, batch, (1.0, 0.0, 0.0), decay, False)
            errors.append((confidence.sigmoid() - accept).abs().mean())
            means.append(tau_by_position(agree, batch[3]) if temperature == 0 else tau_by_position(accept, batch[3], passed))
        survived = torch.stack(means).nanmean(0).tolist() if means else []
        out |= {f"tau_{name}": 1 + sum(survived) if means else None, f"accept_{name}": [round(v, 4) for v in survived]}
    return out | dict(confidence_error=torch.stack(errors).nanmean().item() if errors else None)


def make_optimizers(drafter, lr):
    """Muon for the matrices between hidden states, AdamW for embeddings, W2, norms and the confidence head."""
    # Muon wants directions in weight space that turn one hidden state into another; a lookup table or a norm has none
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


def refit_confidence(drafter, features, dialogues, decay, steps=60):
    """Fit the confidence head anew, alone, on dialogues that the drafter was not trained on (not in the paper).

    While both train, the head sees how well the drafter does on texts that it begins to know by heart, and learns to promise
    too much. It is one linear layer (D + r + 1 numbers), so a few dozen fresh dialogues are plenty. Every row weighs w_k as before.
    """
    inputs, labels, weights, rng = [], [], [], np.random.default_rng(0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for i in range(0, len(dialogues), 8):
            part = dialogues[i : i + 8]
            batch = make_batch(part, [features.get(d) for d in part], 48, drafter.gamma, rng)
            h, code, previous, w, column = label_rows(drafter, batch, decay)
            x = torch.cat([h, code], dim=-1).to(drafter.head_rows.dtype)
            rows = batch[-1]
            _, accept, _, _ = DraftLoss.apply(x, drafter.head.W2.weight, drafter.head_rows, rows["last"], rows["normaliser"], column, w,
                                              (1.0, 0.0, 0.0))
            inputs.append(torch.cat([h, previous], dim=-1).float()), labels.append(accept), weights.append(torch.exp(-rows["k"] / decay))
    x, y, w = torch.cat(inputs), torch.cat(labels), torch.cat(weights)
    w = w / w.sum()
    weight, bias = drafter.confidence.weight, drafter.confidence.bias
    start = weight.detach().clone()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        logit = F.linear(x, weight, bias)[:, 0]
        # pulled towards what training found, as hard as 1,000 rows could speak against it: few dialogues change little
        loss = (w * F.binary_cross_entropy_with_logits(logit, y, reduction="none")).sum() + 1e3 / len(y) * ((weight - start) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def refit(args):
    """refit_confidence for a drafter that exists, on every second held-out dialogue of args.data; calibrate again afterwards."""
    path, record_path = args.out / f"{args.name}.safetensors", args.out / f"{args.name}.json"
    training, held_out = corpus.read(args.data)
    target, _ = checkpoints.load_target(args.target, dtype=torch.bfloat16)
    drafter = drafting.load(path, target, packed=False).float()  # trained as in fit: products in bf16
    drafter.embed, drafter.head_rows = drafter.embed.bfloat16(), drafter.head_rows.bfloat16()
    if len(held_out) < 2:
        raise ValueError("refitting needs at least 2 held-out dialogues: generate more")
    features = corpus.Features(target, drafter.feature_layers, training + held_out)
    before = evaluate(drafter, features, held_out[1:200:2], args.decay)
    drafter.confidence.requires_grad_(True)
    refit_confidence(drafter, features, held_out[::2], args.decay)
    after = evaluate(drafter, features, held_out[1:200:2], args.decay)
    drafting.save(drafter, path)
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    record.pop("calibration", None)  # it was for the old head
    write_record(record_path, record | dict(confidence_refitted=dict(dialogues=len(held_out[::2]), error_before=before["confidence_error"],
                                                                     error_after=after["confidence_error"])))
    print(f"mean |c - c*| on the other held-out dialogues: {before['confidence_error']} before, {after['confidence_error']} after")


def prepare(args):
    """Data, features and a fresh drafter for fit -> (drafter, features, training, held_out, facts for the record)."""
    training, held_out = corpus.read(args.data)
    target, encoding = checkpoints.load_target(args.target, dtype=torch.bfloat16)
    if len(training) < args.batch:
        raise ValueError(f"{len(training)} training dialogues are fewer than one batch of {args.batch}: generate more, or lower --batch")
    if args.batch < ranks.rank_and_world()[1]:
        raise ValueError(f"--batch {args.batch}: every one of the {ranks.rank_and_world()[1]} processes needs a dialogue of each batch")
    if not 1 <= args.draft_vocab <= target.config.vocab_size:
        raise ValueError(f"--draft-vocab {args.draft_vocab}: must be in 1..{target.config.vocab_size}")
    if args.feature_layers != sorted(set(args.feature_layers) & set(range(target.config.n_layers - 1))):
        raise ValueError(f"feature layers {args.feature_layers}: must be rising, in 0..{target.config.n_layers - 2} (never the last)")
    if args.layers > target.config.n_layers:
        raise ValueError(f"--layers {args.layers}: a drafter starts as the target's last layers, which has {target.config.n_layers}")
    if args.head == "eagle" and args.layers != 1:
        raise ValueError(f"--layers {args.layers}: --head eagle has one layer")
    if max(d.ids.max().item() for d in training) >= target.config.vocab_size:
        raise ValueError(f"{args.data} holds ids beyond this target's vocabulary: was it written by another model?")
    # before any dialogue is left out: a features file belongs to a whole shard
    features = corpus.Features(target, args.feature_layers, training + held_out)
    known = corpus.read_prompts(args.evaluation)
    kept = corpus.without(training, [smollm2.encode(encoding, text) for _, text in known])
    facts = dict(evaluation_prompts=corpus.fingerprint(known), left_out_as_too_like_them=len(training) - len(kept))
    training = kept
    # counted over answers only, and never over what is held out
    counts = torch.bincount(torch.cat([d.ids[d.answer :] for d in training]), minlength=target.config.vocab_size)
    draft_ids = counts.topk(args.draft_vocab).indices.sort().values
    coverage = counts[draft_ids].sum().item() / counts.sum().item()
    config = DrafterConfig(args.gamma, args.layers, tuple(args.feature_layers), args.head, args.rank, args.anchor_state)
    # trained weights in fp32 with products in bf16 (autocast), frozen ones in bf16 throughout
    if args.start:
        if args.start.is_dir():
            raise ValueError(f"--start {args.start}: a drafter's .safetensors file; a checkpoint folder's own embedding and head would be lost")
        drafter = drafting.load(args.start, target, packed=False).float().requires_grad_(True)
        if drafter.config != config:
            raise ValueError(f"{args.start} is another kind of drafter ({drafter.config}): give its options to 'fit' as well")
        draft_ids = drafter.draft_ids  # W1 and W2 have a row for each of these
        coverage = counts[draft_ids].sum().item() / counts.sum().item()
    else:
        drafter = drafting.from_target(config, target, draft_ids).float()
    drafter.embed, drafter.head_rows = drafter.embed.bfloat16(), drafter.head_rows.bfloat16()
    facts |= dict(parameters=sum(p.numel() for p in drafter.parameters()), dialogues=len(training), answer_tokens=counts.sum().item(),
                  draft_coverage=coverage, trained_positions=args.updates * args.batch * args.anchors * args.gamma)
    print(f"{len(training)} dialogues ({facts['left_out_as_too_like_them']} left out: too like the evaluation prompts), {counts.sum()} answer "
          f"tokens (draft vocabulary covers {coverage:.1%}), {len(held_out)} held out; {facts['parameters'] / 1e6:.1f} M parameters; "
          f"{args.updates} updates of {args.batch} x {args.anchors} blocks", flush=True)
    return drafter, features, training, held_out, facts


def resume(checkpoint, made_for, drafter, optimizers):
    """Continue from a checkpoint if there is one -> (update, history, seconds spent)."""
    if not checkpoint.exists():
        return 0, [], 0.0
    try:
        state = torch.load(checkpoint, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, ValueError):
        raise ValueError(f"{checkpoint} is broken: delete it to start anew")
    if state["made_for"] != made_for:
        raise ValueError(f"{checkpoint} was made with other settings or data: choose another --name, or delete it")
    drafter.load_state_dict(state["drafter"])
    for o, s in zip(optimizers, state["optimizers"]):
        o.load_state_dict(s)
    return state["update"], state["history"], state["spent"]


def batch_at(update, args, training, features, gamma):
    """This rank's share of an update's batch. It follows from seed and update alone: a resumed run sees what it would have seen,
    whatever the number of processes before and after."""
    rank, world = ranks.rank_and_world()
    epoch, step = divmod(update, len(training) // args.batch)
    order = np.random.default_rng([args.seed, epoch]).permutation(len(training))  # one per epoch
    part, mine = [training[i] for i in order[step * args.batch : (step + 1) * args.batch]], slice(rank, None, world)
    return make_batch(part, [features.get(d) for d in part[mine]], args.anchors, gamma, np.random.default_rng([args.seed, update, 1]), mine)


def save_checkpoint(path, drafter, optimizers, **rest):
    torch.save(dict(drafter=drafter.state_dict(), optimizers=[o.state_dict() for o in optimizers], **rest), f"{path}.part")
    Path(f"{path}.part").replace(path)


def fit(args):
    rank, _ = ranks.rank_and_world()
    torch.manual_seed(args.seed)
    drafter, features, training, held_out, facts = prepare(args)
    optimizers = make_optimizers(drafter, args.lr)
    checkpoint = args.data / f"{args.name}.ckpt"
    # what a checkpoint has to agree with: everything that the run depends on
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("run", "data", "out", "eval_every")}
    made_for = repr((sorted(settings.items()), drafter.draft_ids.tolist(), len(training)))
    args.out.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    update, history, spent = resume(checkpoint, made_for, drafter, optimizers)
    if update == args.updates and all((args.out / f"{args.name}.{x}").exists() for x in ("safetensors", "json")):
        print(f"{args.name} is trained already; delete {checkpoint} to train it anew")
        return
    if update:
        print(f"resuming {checkpoint} at update {update}", flush=True)
    model = ranks.parallel(ShareOfLoss(drafter))
    begin, first, saved = time.time(), update, time.time()
    running = []
    while update < args.updates:
        batch = batch_at(update, args, training, features, drafter.gamma)
        # linear warm-up over 4 % (Sec. 5.1), then a cosine to nearly nothing
        progress = update / args.updates
        scale = min(1.0, (update + 1) / (0.04 * args.updates)) * (0.5 + 0.5 * math.cos(math.pi * progress)) + 1e-3
        loss, accept, passed, _, _ = model(batch, loss_mix(args.loss, progress), args.decay, args.confidence_through)
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        loss = ranks.mean(loss)  # of the whole batch; the training tau printed is of this rank's dialogues
        if not loss.isfinite():
            raise ValueError(f"the loss is {loss.item()} at update {update}: lower --lr; {checkpoint} holds the last good state")
        # rare, hard batches would otherwise throw the fresh heads off
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for o in optimizers:
            for group in o.param_groups:
                group["lr"] = args.lr * scale
            o.step()
        update += 1
        running.append((loss.item(), 1 + tau_by_position(accept, batch[3], passed).sum().item()))
        if update % 20 == 0:
            seconds = (time.time() - begin) / (update - first)
            mean = np.nanmean(running, axis=0)
            running = []
            print(f"update {update}/{args.updates}  loss {mean[0]:.3f}  training tau {mean[1]:.3f}  {seconds:.2f} s/update  "
                  f"{(args.updates - update) * seconds / 60:.0f} min left", flush=True)
        if rank > 0:
            continue
        if update % args.eval_every == 0 or update == args.updates:
            history.append(dict(update=update, minutes=round((spent + time.time() - begin) / 60, 1),
                                **evaluate(drafter, features, held_out[:200], args.decay)))
            print("held out:", json.dumps(history[-1]), flush=True)
        # every two minutes: an interruption costs no more than that
        if time.time() - saved > 120 or update == args.updates:
            saved = time.time()
            save_checkpoint(checkpoint, drafter, optimizers, update=update, history=history, spent=spent + time.time() - begin,
                            made_for=made_for)
    if rank > 0:
        return
    if len(held_out) > 1:
        refit_confidence(drafter, features, held_out[::2], args.decay)  # the other half is for reports: calibrate() splits alike
        history.append(dict(update=update, confidence="refitted", **evaluate(drafter, features, held_out[1:200:2], args.decay)))
        print("confidence refitted; other half of held out:", json.dumps(history[-1]), flush=True)
    drafting.save(drafter, args.out / f"{args.name}.safetensors")
    write_record(args.out / f"{args.name}.json", dict(settings=settings, **facts, history=history))


def write_record(path, record):
    part = Path(f"{path}.part")
    part.write_text(json.dumps(record, indent=1))
    part.replace(path)


# ---------------------------------------------------------------------------------------------------------------------
# calibrate


def calibrate(args):
    """Make a drafter's confidence hold where cycles really begin, on every second of the held-out questions; the others are for
    'bench.py reliability', which reports.

    Blocks of real decoding, verified whole, at each temperature: training saw random places of a text, but a cycle begins where the
    last draft failed. First the head's bias is shifted so that mean confidence is true there, once for all temperatures (not in
    the paper; small after a refit). Then STS, once per temperature (Sec. 3.2.1).
    """
    path, record_path = args.out / f"{args.name}.safetensors", args.out / f"{args.name}.json"
    questions = [text for _, text in corpus.read_prompts(args.questions)][::2]
    target, encoding = checkpoints.load_target(args.target, dtype=torch.bfloat16)
    drafter = drafting.load(path, target)
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    if not isinstance(record, dict):
        raise ValueError(f"{record_path} is not a drafter's record: delete it")
    ids, found = [smollm2.chat(encoding, q) for q in questions], {}
    for temperature in args.temperatures:
        blocks = study.decode(target, drafter, ids, temperature, batch=args.batch, max_new_tokens=args.max_new_tokens,
                              label=f"temperature {temperature:g}")
        found[temperature] = study.whole(blocks)  # confidence and survived, (n, G)
    shift = scheduler.fit_shift(*(np.concatenate(x) for x in zip(*found.values())))
    drafting.shift_confidence(path, shift)
    record["calibration"] = {}
    for temperature, (confidence, survived) in found.items():
        temperatures = scheduler.fit_sts(scheduler.shifted(confidence, shift), survived)
        record["calibration"][str(temperature)] = [round(float(x), 4) for x in temperatures]
        print(f"temperature {temperature}: {len(confidence)} blocks of {len(questions)} questions; bias {shift:+.3f}, STS "
              f"{record['calibration'][str(temperature)]}")
    write_record(record_path, record)


# ---------------------------------------------------------------------------------------------------------------------
# export


def export(args):
    """A drafter of args.out as a folder in the DeepSpec format, its record included. int8 files are written as the values they stand
    for, so the folder drafts as the file does."""
    record_path = args.out / f"{args.name}.json"
    record = json.loads(record_path.read_text()) if record_path.is_file() else {}
    if not isinstance(record, dict):
        raise ValueError(f"{record_path} is not a drafter's record: delete it")
    target, encoding = checkpoints.load_target(args.target, dtype=torch.float32)  # no value is rounded
    drafter = drafting.load(args.out / f"{args.name}.safetensors", target, packed=False)
    mask_id = args.mask_token_id
    if mask_id is None:
        mask_id = deepspec.unused_id(encoding, target.config.vocab_size, {*smollm2.chat(encoding, ""), *target.config.eos})
    deepspec.export_drafter(drafter, args.folder, mask_id, dict(fp32=torch.float32, bf16=torch.bfloat16)[args.dtype],
                            int(record.get("settings", {}).get("anchors", 512)))
    if record:
        write_record(args.folder / "record.json", record)
    print(f"{args.name} is in {args.folder}: block {drafter.gamma}, head {drafter.config.head}, {len(drafter.draft_ids)} of "
          f"{target.config.vocab_size} ids drafted, mask vector at id {mask_id}")
    for line in deepspec.limits(drafter):
        print("note:", line)


# least sensible value of each option; 8 tokens hold any opening
FEATURE_LAYERS = [2, 15, 27]
LEAST = dict(sequences=1, shard=1, slots=1, max_question=8, max_answer=1, updates=1, batch=1, anchors=1, gamma=1, layers=1, rank=1,
             eval_every=1, max_new_tokens=1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", help="GGUF file, folder or hub name, as for dspark.py (default: the user's cache)")
    p.add_argument("--data", type=Path, default=Path("data"), help="folder of shards and checkpoints")
    p.add_argument("--out", type=Path, default=Path("weights"), help="folder of drafters")
    p.add_argument("--seed", type=int, default=0)
    commands = p.add_subparsers(required=True)
    g = commands.add_parser("generate", help="the target writes dialogues")
    g.add_argument("--sequences", type=int, default=20000)
    g.add_argument("--shard", type=int, default=768, help="dialogues a file")
    g.add_argument("--slots", type=int, default=128, help="dialogues written at a time")
    g.add_argument("--max-question", type=int, default=64)
    g.add_argument("--max-answer", type=int, default=256)
    g.add_argument("--feature-layers", type=int, nargs="+", default=FEATURE_LAYERS, help="whose states to keep for 'fit'")
    g.set_defaults(run=corpus.generate)
    f = commands.add_parser("fit", help="train a drafter")
    f.add_argument("--name", default="dspark")
    f.add_argument("--start", type=Path, help="a drafter's file to go on from (default: the target's last layers)")
    f.add_argument("--updates", type=int, default=2500)
    f.add_argument("--batch", type=int, default=16, help="dialogues an update")
    f.add_argument("--anchors", type=int, default=32, help="blocks a dialogue")
    f.add_argument("--gamma", type=int, default=7)
    f.add_argument("--layers", type=int, default=2)
    f.add_argument("--feature-layers", type=int, nargs="+", default=FEATURE_LAYERS)
    f.add_argument("--head", choices=drafting.KINDS, default="markov", help="none: DFlash; eagle: autoregressive, with --layers 1")
    f.add_argument("--rank", type=int, default=96)
    f.add_argument("--anchor-state", action="store_true", help="join H_ctx of the newest committed token to the block's inputs (not in the paper)")
    f.add_argument("--draft-vocab", type=int, default=8192)
    f.add_argument("--lr", type=float, default=6e-3)
    f.add_argument("--loss", choices=["kl-then-paper", "kl", "paper"], default="kl-then-paper")
    f.add_argument("--decay", type=float, default=4.0, help="w_k = exp(-(k-1) / decay)")
    f.add_argument("--confidence-through", action="store_true", help="let the confidence loss reach the backbone, as in the paper's code")
    f.add_argument("--evaluation", type=Path, default=corpus.PROMPTS, help="evaluation prompts: dialogues too like them are left out")
    f.add_argument("--eval-every", type=int, default=250)
    f.set_defaults(run=fit)
    r = commands.add_parser("refit", help="fit a drafter's confidence head anew, on held-out dialogues (fit does it at its end)")
    r.add_argument("--name", default="dspark")
    r.add_argument("--decay", type=float, default=4.0)
    r.set_defaults(run=refit)
    c = commands.add_parser("calibrate", help="fit Sequential Temperature Scaling")
    c.add_argument("--name", default="dspark")
    c.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    c.add_argument("--questions", type=Path, default=study.QUESTIONS, help="held-out questions (JSONL); every second one is used")
    c.add_argument("--max-new-tokens", type=int, default=128)
    c.add_argument("--batch", type=int, default=16, help="questions decoded together")
    c.set_defaults(run=calibrate)
    e = commands.add_parser("export", help="write a drafter as a checkpoint folder in the DeepSpec format")
    e.add_argument("folder", type=Path, metavar="DIR")
    e.add_argument("--name", default="dspark")
    e.add_argument("--mask-token-id", type=int, help="whose embedding will be the mask vector (default: one that no text has)")
    e.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="fp32: every value as it is; bf16: half the size, rounded")
    e.set_defaults(run=export)
    args = p.parse_args()
    keep_freed_memory()
    try:
        for name, least in LEAST.items():
            if getattr(args, name, least) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
        if not (getattr(args, "decay", 1) > 0 and getattr(args, "lr", 1) > 0 and math.isfinite(getattr(args, "lr", 1))):
            raise ValueError("--decay and --lr must be positive")
        if "/" in getattr(args, "name", ""):
            raise ValueError(f"--name {args.name}: a name, not a path; --out names the folder")
        ranks.run(lambda: args.run(args), together=args.run in (corpus.generate, fit))
    except (smollm2.SetupError, ValueError, OSError) as error:
        if ranks.first_to_fail():
            print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command resumes" if ranks.first_to_fail() else 1)
    except Exception:
        if ranks.first_to_fail():
            raise  # a fault of the program, with its trace
        sys.exit(1)  # most often a connection that closed because another rank has ended, and has said why


if __name__ == "__main__":
    main()

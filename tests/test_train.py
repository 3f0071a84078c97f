"""
Tests of train.py and corpus.py. No weights needed: the target is tiny and random. Run: python -m pytest tests/test_train.py

The loss is compared with autograd over its definition on the full vocabulary in float64. DraftLoss works in float32 on purpose
(rows of K logits are what a step spends its traffic on), so values agree to a few float32 steps of the largest term: 1e-5.
"""
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import corpus
import drafter as drafting
import smollm2
import train
from corpus import Dialogue, extract
from drafter import Drafter, DrafterConfig
from target import tiny_target
from train import DraftLoss, losses, loss_mix, make_batch, tau_by_position
from verify import logits_to_probs, sample

V, D, RANK = 64, 32, 8
TOLERANCE = 1e-5


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def make(head="markov", K=40, gamma=3, trainable=True):
    """A float64 target and drafter. (Autocast to bf16, which losses() asks for, leaves float64 alone.)"""
    target = tiny_target().double()
    torch.manual_seed(3)
    ids = torch.randperm(V)[:K].sort().values
    config = DrafterConfig(gamma, n_layers=1, feature_layers=(0, 1), head=head, rank=RANK)
    drafter = drafting.model_class(config)(config, target, ids).double()
    return target, drafter.requires_grad_(trainable)


def dialogue(length, answer, seed=0, temperature=1.0):
    return Dialogue(randint(V, length, seed=seed), answer, temperature, Path("none"), 0)


# ---------------------------------------------------------------------------------------------------------------------
# the loss


def problem(M, K=40, seed=0):
    """M label rows: x, W2, head rows, the target's last hidden states, normaliser, label ids, weights and draft ids."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:K].sort().values
    head, last = randn(V, D, seed=seed) * 0.4, randn(M, D, seed=seed + 1)
    x, W2 = randn(M, D + RANK, seed=seed + 2), randn(K, RANK, seed=seed + 3) * 0.4
    labels, w = randint(V, M, seed=seed + 4), torch.rand(M, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1
    return SimpleNamespace(ids=ids, head=head, last=last, x=x, W2=W2, labels=labels, w=w, normaliser=(last @ head.T).logsumexp(-1))


def by_hand(p, mix, chunk=256):
    """DraftLoss -> (loss, accept, agree, grad x, grad W2)"""
    column = torch.full((V,), -1)
    column[p.ids] = torch.arange(len(p.ids))
    x, W2 = p.x.clone().requires_grad_(), p.W2.clone().requires_grad_()
    loss, accept, passed, agree = DraftLoss.apply(x, W2, p.head[p.ids], p.last, p.normaliser, column[p.labels], p.w, mix, chunk)
    assert not accept.requires_grad and not agree.requires_grad  # the label of the confidence head is detached
    return loss, accept, agree, *torch.autograd.grad(loss, (x, W2))


def by_definition(p, mix):
    """Eq. 8 to 10 and forward KL over all V ids; p_draft is zero outside ids. KL leaves the target's entropy out (it has no
    gradient) and, as log 0 would be infinite, the target's mass outside; CE leaves out labels that cannot be drafted."""
    kl, ce, tv = mix
    x, W2 = p.x.clone().requires_grad_(), p.W2.clone().requires_grad_()
    log_p = (x[:, :D] @ p.head[p.ids].T + x[:, D:] @ W2.T).log_softmax(-1)
    p_draft = torch.zeros(len(x), V, dtype=torch.float64).index_copy(1, p.ids, log_p.exp())
    p_target = (p.last @ p.head.T).softmax(-1)
    l1 = (p_draft - p_target).abs().sum(-1)
    total = torch.zeros((), dtype=torch.float64) + 0 * x.sum() + 0 * W2.sum()
    for m, label in enumerate(p.labels.tolist()):
        cross = -(p_target[m, p.ids] * log_p[m]).sum()
        nll = -log_p[m, p.ids.tolist().index(label)] if label in p.ids.tolist() else 0.0
        total = total + p.w[m] * (kl * cross + ce * nll + tv * l1[m])
    return total, 1 - 0.5 * l1, p_draft.argmax(-1) == p.labels, *torch.autograd.grad(total, (x, W2))


def close(a, b, tolerance=TOLERANCE):
    a, b = a.double(), b.double()
    return a.numel() == 0 or (a - b).abs().max().item() <= tolerance * max(1.0, b.abs().max().item())


MIXES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.0, 0.1, 0.9), (0.5, 0.05, 0.45)]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("K", [V, 40])
def test_loss_and_gradients_equal_autograd_over_the_definition(mix, K):
    p = problem(23, K)
    known = torch.isin(p.labels, p.ids)
    assert known.any() and (K == V or not known.all())  # labels inside and outside the draft vocabulary
    for ours, theirs in zip(by_hand(p, mix), by_definition(p, mix)):
        assert close(ours, theirs)
    # teeth: the parts differ from each other by far more than the tolerance
    for other in MIXES:
        if other != mix:
            assert not close(by_hand(p, other)[3], by_definition(p, mix)[3], 1e-3)


def test_forward_kl_is_kl_up_to_the_targets_entropy():
    p = problem(11, V)
    t, q = (p.last @ p.head.T).softmax(-1), (p.x[:, :D] @ p.head.T + p.x[:, D:] @ p.W2.T).log_softmax(-1)
    kl = (t * (t.log() - q)).sum(-1)
    entropy = -(t * t.log()).sum(-1)
    assert close(by_hand(p, (1.0, 0.0, 0.0))[0], (p.w * (kl + entropy)).sum())


def test_c_star_is_the_exact_acceptance_probability():
    """Eq. 8 = sum over the drafter's tokens of p_draft min(1, p_target / p_draft), with the mass outside its vocabulary lost."""
    p = problem(17, K=10)
    accept = by_hand(p, (0.0, 0.0, 1.0))[1]
    p_target = (p.last @ p.head.T).softmax(-1)[:, p.ids]
    p_draft = (p.x[:, :D] @ p.head[p.ids].T + p.x[:, D:] @ p.W2.T).softmax(-1)
    assert close(accept, (p_draft * (p_target / p_draft).clamp(max=1)).sum(-1), 1e-6)
    assert (accept <= p_target.sum(-1) + 1e-6).all() and p_target.sum(-1).max() < 0.9


def test_a_perfect_drafter_is_accepted_always_and_has_no_gradient():
    p = problem(9, V)
    p.x = torch.cat([p.last, torch.zeros(9, RANK, dtype=torch.float64)], dim=1)
    for mix in ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0)):
        _, accept, _, grad_x, grad_W2 = by_hand(p, mix)
        assert close(accept, torch.ones(9), 1e-6)
        if mix[0]:  # TV's sign(p - t) is decided by rounding there; KL's gradient vanishes smoothly
            assert close(grad_x, torch.zeros_like(grad_x), 1e-6) and close(grad_W2, torch.zeros_like(grad_W2), 1e-6)


@pytest.mark.parametrize("M", [0, 1, 3, 4, 5, 8, 9])
def test_chunk_boundaries(M):
    p = problem(M)
    for ours, theirs in zip(by_hand(p, (0.2, 0.3, 0.5), chunk=4), by_definition(p, (0.2, 0.3, 0.5))):
        assert ours.shape == theirs.shape and close(ours, theirs)


def test_the_gradient_scales_with_what_comes_after():
    p = problem(5)
    column = torch.arange(V).where(torch.isin(torch.arange(V), p.ids), -1)
    x = p.x.clone().requires_grad_()
    args = (p.W2, p.head[p.ids], p.last, p.normaliser, torch.searchsorted(p.ids, column[p.labels].clamp(min=0)).clamp(max=39), p.w)
    one, = torch.autograd.grad(DraftLoss.apply(x, *args, (0.0, 0.1, 0.9))[0], x)
    three, = torch.autograd.grad(3 * DraftLoss.apply(x, *args, (0.0, 0.1, 0.9))[0], x)
    assert torch.equal(3 * one, three)


@pytest.mark.parametrize("head", drafting.KINDS)
def test_losses_equal_the_paper_s_formula_block_by_block(head):
    """Eq. 9 to 12 from dialogues to a number and to the gradient of every parameter: weights, labels, rows, masks, BCE."""
    target, drafter = make(head)
    dialogues = [dialogue(18, 6, seed=1), dialogue(11, 8, seed=2)]
    features = extract(target, dialogues, (0, 1))
    batch = make_batch(dialogues, features, 4, 3, np.random.default_rng(0))
    mix, decay = (0.3, 0.1, 0.6), 4.0
    for through in (False, True):
        loss, accept, passed, agree, confidence = losses(drafter, batch, mix, decay, through)
        drafter.zero_grad()
        loss.backward()
        ours = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
        drafter.zero_grad()
        tokens, stacked, anchors, valid, _ = batch
        h, code, previous = drafter(stacked, tokens, anchors)
        total, weight, ids = 0.0, 0.0, drafter.draft_ids.tolist()
        for b, text in enumerate(d.ids for d in dialogues):
            zeros, places = torch.zeros(len(text), dtype=torch.long), torch.arange(len(text))
            p_target = target(text, zeros, places, target.new_cache(1, len(text)))[0].softmax(-1).clone()
            for a in range(4):
                for k in range(3):
                    if not valid[b, a, k]:
                        continue
                    w, at = np.exp(-k / decay), int(anchors[b, a]) + k  # k from 0: exp(-(k - 1) / decay) of Eq. 9
                    log_p = (h[b, a, k] @ drafter.head_rows.T + drafter.head.W2(code[b, a, k])).log_softmax(-1)
                    p_draft = torch.zeros(V, dtype=torch.float64).index_copy(0, drafter.draft_ids, log_p.exp())
                    l1, label = (p_draft - p_target[at]).abs().sum(), int(text[at + 1])
                    nll = -log_p[ids.index(label)] if label in ids else 0.0
                    see = (lambda x: x) if through else (lambda x: x.detach())
                    logit = drafter.confidence_logit(see(h[b, a, k]), see(previous[b, a, k]))
                    bce = F.binary_cross_entropy_with_logits(logit, (1 - 0.5 * l1).detach())
                    total = total + w * (mix[0] * -(p_target[at][drafter.draft_ids] * log_p).sum() + mix[1] * nll + mix[2] * l1 + bce)
                    weight += w
        total = total / weight
        total.backward()
        assert close(loss, total)
        for name, p in drafter.named_parameters():
            if p.grad is not None:
                assert close(ours[name], p.grad), name
        assert {n for n, p in drafter.named_parameters() if p.grad is not None} <= set(ours)


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_confidence_loss_reaches_the_backbone_only_if_asked(head):
    """Whatever the confidence head's weights, the gradient of everything else keeps its bits, unless `through`."""
    target, drafter = make(head)
    dialogues = [dialogue(18, 6, seed=1)]
    batch = make_batch(dialogues, extract(target, dialogues, (0, 1)), 4, 3, np.random.default_rng(0))

    def gradients(scale, through):
        with torch.no_grad():
            drafter.confidence.weight.copy_(randn(1, D + RANK, seed=7) * scale)
        drafter.zero_grad()
        losses(drafter, batch, (0.0, 0.1, 0.9), 4.0, through)[0].backward()
        return {n: p.grad.clone() for n, p in drafter.named_parameters()}

    for through in (False, True):
        one, two = gradients(0.0, through), gradients(1.0, through)
        same = {n for n in one if torch.equal(one[n], two[n])}
        assert two["confidence.weight"].abs().max() > 0
        if through:
            assert not same & {"head.W1.weight", "context_proj.weight", "layers.0.attn.qkv.weight", "norm.weight", "mask"}
        else:
            assert same == set(one) - {"confidence.weight", "confidence.bias"}


@pytest.mark.parametrize("kind, progress, mix", [
    ("paper", 0.0, (0.0, 0.1, 0.9)), ("paper", 0.9, (0.0, 0.1, 0.9)), ("kl", 0.0, (1.0, 0.0, 0.0)), ("kl", 0.9, (1.0, 0.0, 0.0)),
    ("kl-then-paper", 0.0, (1.0, 0.0, 0.0)), ("kl-then-paper", 0.5, (1.0, 0.0, 0.0)), ("kl-then-paper", 0.625, (0.5, 0.05, 0.45)),
    ("kl-then-paper", 0.75, (0.0, 0.1, 0.9)), ("kl-then-paper", 1.0, (0.0, 0.1, 0.9)),
])
def test_loss_mix(kind, progress, mix):
    assert loss_mix(kind, progress) == pytest.approx(mix, abs=1e-12)


def test_survival_on_target_text_is_survival_of_drafts():
    """Two positions, three ids: survival by enumeration of what is drafted, against the mean over text that the target writes.
    The product of c* along that text, which would be simpler, is another number."""
    p_target, p_draft = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    after = torch.tensor([[0.9, 0.1, 0.0], [0.1, 0.1, 0.8], [0.0, 0.0, 1.0]])  # p_target of the second id, given the first
    draft_after = torch.tensor([[0.8, 0.1, 0.1], [0.5, 0.4, 0.1], [1.0, 0.0, 0.0]])
    first, c_2 = torch.minimum(p_target, p_draft), torch.minimum(after, draft_after).sum(-1)
    true = torch.stack([first.sum(), (first * c_2).sum()])  # the first passes as id x with chance min(p_target, p_draft)(x)
    accept = torch.stack([first.sum().expand(3), c_2], 1)[:, None]  # (text, anchor, position), one text per first id
    passed = torch.stack([(p_draft / p_target).clamp(max=1), torch.ones(3)], 1)[:, None]
    valid = torch.ones(3, 1, 2, dtype=torch.bool)
    by_text = torch.stack([tau_by_position(accept[i].flatten(), valid[i : i + 1], passed[i].flatten()) for i in range(3)])
    assert torch.allclose(p_target @ by_text, true)
    naive = torch.stack([tau_by_position(accept[i].flatten(), valid[i : i + 1]) for i in range(3)])
    assert abs((p_target @ naive)[1] - true[1]) > 0.02


def test_tau_by_position_by_hand():
    """Block 1 survives with .5, then .5 * .4; block 2 ends early and does not count; block 3 with 1, then 0."""
    valid = torch.tensor([[[True, True], [True, False], [True, True]]])
    value = torch.tensor([0.5, 0.4, 0.9, 1.0, 0.0])
    assert torch.allclose(tau_by_position(value, valid), torch.tensor([0.75, 0.1]))
    agree = torch.tensor([True, False, True, True, True])
    assert torch.equal(tau_by_position(agree, valid), torch.tensor([1.0, 0.5]))
    assert tau_by_position(value[:0], valid & False).isnan().all()  # no block: no number


# ---------------------------------------------------------------------------------------------------------------------
# batches and features


DIALOGUES = [dialogue(20, 6, seed=1), dialogue(9, 8, seed=2), dialogue(14, 12, seed=3), dialogue(26, 20, seed=4), dialogue(5, 1, seed=5)]
# answers of                     14                     1                      2                      6                     4 tokens


def test_labels_stand_where_a_direct_forward_of_the_target_puts_them():
    target, G = tiny_target().double(), 4
    features = extract(target, DIALOGUES, (0, 1))
    tokens, stacked, anchors, valid, rows = make_batch(DIALOGUES, features, 6, G, np.random.default_rng(0))
    direct = []
    for ids in (d.ids for d in DIALOGUES):
        zeros, places = torch.zeros(len(ids), dtype=torch.long), torch.arange(len(ids))
        direct.append(target(ids, zeros, places, target.new_cache(1, len(ids)), (0, 1)))
    b, a, k = valid.nonzero(as_tuple=True)
    assert torch.equal(rows["k"], k) and len(rows["label"]) == len(rows["last"]) == len(rows["normaliser"]) == len(b) > 30
    p_target = (rows["last"] @ target.head.weight.T - rows["normaliser"][:, None]).exp()
    for m, (i, anchor, slot) in enumerate(zip(b.tolist(), anchors[b, a].tolist(), k.tolist())):
        ids = DIALOGUES[i].ids
        at = anchor + slot + 1  # slot 0 already predicts the token after the anchor
        assert at < len(ids) and rows["label"][m] == ids[at]
        assert (p_target[m] - direct[i][0][at - 1].softmax(-1)).abs().max() < 1e-5  # the normaliser is kept in float32
    for i, (ids, answer) in enumerate((d.ids, d.answer) for d in DIALOGUES):
        assert torch.equal(tokens[i, : len(ids)], ids) and (stacked[i, : len(ids)] - direct[i][1]).abs().max() < 1e-10
        real = anchors[i][valid[i, :, 0]].tolist()  # blocks with a label at all
        possible = range(answer, len(ids) - 1)  # inside the answer, at least one token to predict
        assert set(real) <= set(possible) and len(real) == len(set(real)) == min(6, len(possible))
        for j in range(6):
            n = int(valid[i, j].sum())
            assert torch.equal(valid[i, j], torch.arange(G) < n)  # a prefix of the block
            assert n == (min(G, len(ids) - 1 - int(anchors[i, j])) if valid[i, j, 0] else 0)  # and all of it that exists


def test_every_anchor_of_an_answer_is_drawn():
    target = tiny_target().double()
    part = DIALOGUES[:1]
    features, seen = extract(target, part, (0,)), set()
    for seed in range(60):
        batch = make_batch(part, features, 3, 4, np.random.default_rng(seed))
        seen |= set(batch[2][batch[3][:, :, 0]].tolist())
    assert seen == set(range(6, 19))


@pytest.mark.parametrize("head", ["markov", "rnn"])
def test_answers_too_short_for_a_block(head):
    """One token: nothing to predict. Two: one label. A batch of only such dialogues: a loss of zero, with zero gradients."""
    target, drafter = make(head)
    one, two = dialogue(9, 8, seed=2), dialogue(14, 12, seed=3)
    batch = make_batch([one, two], extract(target, [one, two], (0, 1)), 4, 3, np.random.default_rng(0))
    assert batch[3].nonzero().tolist() == [[1, 0, 0]] and batch[4]["label"].tolist() == [two.ids[13].item()]
    assert losses(drafter, batch, (0.0, 0.1, 0.9), 4.0, False)[0].isfinite()
    batch = make_batch([one], extract(target, [one], (0, 1)), 4, 3, np.random.default_rng(0))
    loss = losses(drafter, batch, (0.0, 0.1, 0.9), 4.0, False)[0]
    loss.backward()
    assert loss == 0 and all(p.grad is None or p.grad.abs().max() == 0 for p in drafter.parameters())


def test_packed_dialogues_never_see_each_other():
    """Neither in the target's pass over several, nor in the drafter's: each equals itself alone."""
    target, drafter = make("gated", trainable=False)
    together = extract(target, DIALOGUES, (0, 1))
    for d, t in zip(DIALOGUES, together):
        alone = extract(target, [d], (0, 1))[0]
        assert all((x - y).abs().max() < (1e-10 if x.dtype == torch.float64 else 1e-5) for x, y in zip(t, alone))
    tokens, stacked, anchors, _, _ = make_batch(DIALOGUES, together, 3, 3, np.random.default_rng(0))
    h = drafter(stacked, tokens, anchors)[0]
    for b, d in enumerate(DIALOGUES):
        n = len(d.ids)
        # (an anchor near the end has slots past it: without labels, their given token is clamped, so leave W1 out)
        alone = drafter(stacked[b : b + 1, :n], tokens[b : b + 1, :n], anchors[b : b + 1])[0]
        assert (alone - h[b : b + 1]).abs().max() < 1e-10


def write_shards(folder, counts, seed=0, dialogues=None):
    """Shard files as generate() leaves them; counts: dialogues in each."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, number = np.random.default_rng(seed), 0
    for s, n in enumerate(counts):
        if dialogues is None:
            lengths = rng.integers(8, 20, n)
            part = [(rng.integers(V, size=m), int(rng.integers(2, 6)), float(i % 3)) for i, m in enumerate(lengths)]
        else:
            part = dialogues[number : number + n]
        number += n
        np.savez_compressed(
            folder / f"shard-0-{s:04d}.npz", ids=np.concatenate([d[0] for d in part]).astype(np.uint16),
            starts=np.cumsum([0] + [len(d[0]) for d in part]), answer=np.array([d[1] for d in part], np.int32),
            temperature=np.array([d[2] for d in part], np.float32))


def key(d):
    return (tuple(d.ids.tolist()), d.answer, d.temperature)


def test_features_on_disk_are_the_computed_ones(tmp_path, monkeypatch):
    """In bf16, one step of which is 2^-8 of a value, whatever batches they were computed in; computed once, for these layers."""
    write_shards(tmp_path, [12, 9])
    target, dialogues = tiny_target().double(), sum(corpus.read(tmp_path), [])
    calls, compute = [], corpus.extract
    monkeypatch.setattr(corpus, "extract", lambda target, part, layers: calls.append(len(part)) or compute(target, part, layers))
    features = corpus.Features(target, (0, 1), dialogues, batch_tokens=50)
    assert sum(calls) == len(dialogues) == 21 and max(calls) > 1 and len(calls) > 4  # several a batch, several batches
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"shard-0-000{i}.{e}" for i in (0, 1) for e in ("features", "npz")]
    for d in dialogues:
        kept, alone = features.get(d), compute(target, [d], (0, 1))[0]
        assert kept[0].dtype == kept[1].dtype == torch.bfloat16 and kept[2].dtype == torch.float32
        for x, y in zip(kept, alone):
            assert x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=2**-8, atol=1e-5)
    again = corpus.Features(target, (0, 1), dialogues)
    assert sum(calls) == 21 and all(torch.equal(x, y) for d in dialogues for x, y in zip(features.get(d), again.get(d)))
    other = corpus.Features(target, (1,), dialogues)  # other layers: made anew
    assert sum(calls) == 42 and other.get(dialogues[0])[0].shape[1] == D
    # a file cut short is made anew, alone
    path = tmp_path / "shard-0-0001.features"
    path.write_bytes(path.read_bytes()[:-100])
    corpus.Features(target, (1,), dialogues)
    assert sum(calls) == 51


def test_interrupted_features_leave_no_half_file(tmp_path, monkeypatch):
    write_shards(tmp_path, [12, 9])
    target, dialogues = tiny_target(), sum(corpus.read(tmp_path), [])
    compute = corpus.extract

    def stop_in_the_second(target, part, layers):
        if part[0].shard.name == "shard-0-0001.npz":
            raise KeyboardInterrupt
        return compute(target, part, layers)

    with monkeypatch.context() as m:
        m.setattr(corpus, "extract", stop_in_the_second)
        with pytest.raises(KeyboardInterrupt):
            corpus.Features(target, (0, 1), dialogues)
    assert [f.name for f in tmp_path.glob("*.features")] == ["shard-0-0000.features"]
    features = corpus.Features(target, (0, 1), dialogues)
    assert all(len(features.get(d)[1]) == len(d.ids) for d in dialogues)


def test_p_target_from_kept_states_is_the_targets_softmax(tmp_path):
    """In bf16, as in training: the kept state times the head, less the kept normaliser, is the target's distribution. Rows
    that go through a product of another size may round their logits (of up to 100 here) to a neighbouring bf16 value."""
    write_shards(tmp_path, [12])
    target, dialogues = tiny_target().bfloat16(), sum(corpus.read(tmp_path), [])
    features, off = corpus.Features(target, (0, 1), dialogues), []
    for d in dialogues:
        _, last, normaliser = features.get(d)
        p = (F.linear(last, target.head.weight).float() - normaliser[:, None]).exp()
        n = len(d.ids)
        logits, _ = target(d.ids, torch.zeros(n, dtype=torch.long), torch.arange(n), target.new_cache(1, n))
        off.append((p.sum(-1) - 1).abs().max().item())
        assert (p - logits.softmax(-1)).abs().mean() < 1e-3
    assert max(off) < 0.05 and sorted(off)[len(off) // 2] < 1e-3


def test_held_out_dialogues_are_disjoint_stable_and_every_fiftieth(tmp_path):
    write_shards(tmp_path, [70, 120, 31])
    training, held_out = corpus.read(tmp_path)
    assert (len(training), len(held_out)) == (215, 6)  # 0 and 50; 0, 50 and 100; 0
    a, b = {key(d) for d in training}, {key(d) for d in held_out}
    assert len(a) == 215 and len(b) == 6 and not a & b
    again = corpus.read(tmp_path)
    assert [key(d) for d in again[0]] == [key(d) for d in training] and [key(d) for d in again[1]] == [key(d) for d in held_out]
    # more shards, later or earlier in order, move nothing that was held out into training
    write_shards(tmp_path / "other", [90], seed=1)
    for name in ("shard-0-0007.npz", "earlier.npz"):
        (tmp_path / name).write_bytes((tmp_path / "other" / "shard-0-0000.npz").read_bytes())
        training, more = corpus.read(tmp_path)
        assert b <= {key(d) for d in more} and not {key(d) for d in training} & b
    d = training[100]
    shard = np.load(d.shard)
    assert d.ids.dtype == torch.long and 0 <= d.answer < len(d.ids) and d.temperature in (0.0, 1.0, 2.0)
    assert d.ids.tolist() == shard["ids"][d.start : d.start + len(d.ids)].tolist()


def test_no_data_is_one_clear_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        with pytest.raises(smollm2.SetupError, match="train.py generate"):
            corpus.read(folder)
    refused(monkeypatch, capsys, "no data in .* generate", "--data", tmp_path / "missing", "fit")
    for contents in (b"", b"garbage", b"PK"):
        (tmp_path / "empty" / "shard.npz").write_bytes(contents)
        refused(monkeypatch, capsys, "shard.npz is no shard", "--data", tmp_path / "empty", "fit")
    np.savez(tmp_path / "empty" / "shard.npz", other=np.zeros(3))
    refused(monkeypatch, capsys, "shard.npz is no shard", "--data", tmp_path / "empty", "fit")


def test_a_shard_that_is_being_written_is_not_read(tmp_path):
    write_shards(tmp_path, [60])
    (tmp_path / "shard-0-0001.part").write_bytes(b"PK half a file")  # generate() renames it when it is whole
    assert len(corpus.read(tmp_path)[0]) == 58


# ---------------------------------------------------------------------------------------------------------------------
# fit


def run(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, args)])
    train.main()


def refused(monkeypatch, capsys, message, *args):
    """Exit code 2 and one line on stderr (after what progress wrote)."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, *args)
    last = capsys.readouterr().err.rstrip("\n").split("\n")[-1]
    assert error.value.code == 2 and re.match(f"train.py: .*{message}", last), last


SMALL = ("fit", "--layers", 1, "--feature-layers", 0, 1, "--rank", 8, "--gamma", 3, "--draft-vocab", 48, "--batch", 4, "--anchors", 4)


@pytest.fixture
def tiny(monkeypatch):
    """smollm2.load hands over the tiny target, in the dtype asked for, and a tokenizer of bytes."""
    monkeypatch.setattr(smollm2, "load", lambda path=None, dtype=torch.float32, **kw: (tiny_target().to(dtype), None))
    monkeypatch.setattr(smollm2, "encode", lambda encoding, text: list(text.encode()))


def test_an_interrupted_fit_resumes_as_if_nothing_had_happened(tiny, monkeypatch, tmp_path):
    """18 updates over 3 epochs, stopped twice, against 18 in one go: the same bits. Batches and anchors follow from seed and
    update alone, features come from files, and one thread adds in one order."""
    write_shards(tmp_path / "data", [30])
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(train, "time", SimpleNamespace(time=lambda: next(clock)))  # a checkpoint is due after every update
    command = ("--data", tmp_path / "data", *SMALL[:1], "--updates", 18, "--eval-every", 9, *SMALL[1:])
    run(monkeypatch, "--out", tmp_path / "one", *command, "--name", "one")
    whole = losses

    def stop_after(n):
        calls = []

        def interrupted(*args):
            calls.append(1)
            if len(calls) > n:
                raise KeyboardInterrupt
            return whole(*args)

        return interrupted

    for n in (5, 7):
        with monkeypatch.context() as m:
            m.setattr(train, "losses", stop_after(n))
            with pytest.raises(SystemExit, match="the same command resumes"):
                run(m, "--out", tmp_path / "two", *command, "--name", "two")
        assert not list((tmp_path / "two").glob("*"))
    run(monkeypatch, "--out", tmp_path / "two", *command, "--name", "two")
    target = tiny_target()
    one, two = (drafting.load(tmp_path / n / f"{n}.safetensors", target) for n in ("one", "two"))
    assert torch.equal(one.draft_ids, two.draft_ids)
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters()):
        assert torch.equal(a, b), name
    one, two = (json.loads((tmp_path / n / f"{n}.json").read_text()) for n in ("one", "two"))
    assert [h["update"] for h in one["history"]] == [h["update"] for h in two["history"]] == [9, 18]
    for a, b in zip(one["history"], two["history"]):
        assert {k: v for k, v in a.items() if k != "minutes"} == {k: v for k, v in b.items() if k != "minutes"}
    assert one["parameters"] == two["parameters"] and one["trained_positions"] == 18 * 4 * 4 * 3
    # a fit that is complete and started again trains no further
    before = (tmp_path / "one" / "one.safetensors").read_bytes()
    with monkeypatch.context() as m:
        m.setattr(train, "losses", stop_after(0))
        run(m, "--out", tmp_path / "one", *command, "--name", "one")
    assert len((tmp_path / "one" / "one.safetensors").read_bytes()) == len(before)


def own_sequences(target, n, length, seed):
    """n sequences that the target itself writes from a random token, at temperatures 1, 0, 1, 0, .. by index // 50."""
    generator, temperature = torch.Generator().manual_seed(seed), (torch.arange(n) // 50 + 1) % 2
    ids, cache, slots = torch.randint(V, (n, 1), generator=generator), target.new_cache(n, length), torch.arange(n)
    for at in range(length - 1):
        logits, _ = target(ids[:, -1], slots, torch.full((n,), at), cache)
        ids = torch.cat([ids, sample(logits_to_probs(logits, temperature), torch.rand(n, generator=generator, dtype=torch.float64))[:, None]], dim=1)
    return [(ids[i].numpy(), 2, float(temperature[i])) for i in range(n)]


def test_a_fit_learns(monkeypatch, tmp_path, capsys):
    """120 updates on 396 sequences that an untied tiny target writes (a tied one only echoes its last token). Held-out expected
    tau rises by 0.2 at temperature 1, where those sequences are noisy, and by 0.4 at temperature 0; the loss falls."""
    monkeypatch.setattr(smollm2, "load", lambda path=None, dtype=torch.float32, **kw: (tiny_target(tied=False).to(dtype), None))
    monkeypatch.setattr(smollm2, "encode", lambda encoding, text: list(text.encode()))
    target = tiny_target(tied=False).bfloat16()
    write_shards(tmp_path, [200, 204], dialogues=own_sequences(target, 404, 24, seed=0))
    training, held_out = corpus.read(tmp_path)
    assert {d.temperature for d in held_out} == {0.0, 1.0}
    torch.manual_seed(0)
    start = drafting.from_target(DrafterConfig(3, 1, (0, 1), "markov", 16), target, torch.arange(V)).float()
    start.embed, start.head_rows = start.embed.bfloat16(), start.head_rows.bfloat16()
    before = train.evaluate(start, corpus.Features(target, (0, 1), training + held_out), held_out, 4.0)
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path / "out", *SMALL, "--rank", 16, "--draft-vocab", V, "--updates", 120,
        "--batch", 16, "--anchors", 8, "--eval-every", 60)
    loss = {int(u): float(x) for u, x in re.findall(r"update (\d+)/120  loss ([\d.]+)", capsys.readouterr().out)}
    assert loss[60] < loss[40] < loss[20]  # (the same loss: the mix moves on after the first half)
    record = json.loads((tmp_path / "out" / "dspark.json").read_text())
    history = record["history"]
    assert [h["update"] for h in history] == [60, 120, 120] and record["draft_coverage"] == 1.0
    assert history[1]["tau_t1"] > before["tau_t1"] + 0.2 and history[1]["tau_t0"] > before["tau_t0"] + 0.4
    assert history[1]["confidence_error"] < before["confidence_error"] and history[2]["confidence"] == "refitted"
    for h in history[:2]:
        assert h["tau_t1"] == pytest.approx(1 + sum(h["accept_t1"]), abs=1e-3)
        assert sorted(h["accept_t1"], reverse=True) == h["accept_t1"] and 0 <= h["accept_t1"][-1] <= 1
    drafter = drafting.load(tmp_path / "out" / "dspark.safetensors", tiny_target(tied=False))
    assert drafter.gamma == 3 and drafter.config.head == "markov" and len(drafter.draft_ids) == V


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens(tiny, monkeypatch, tmp_path):
    """Counted over answers of the training part alone: prompts and held-out dialogues do not vote."""
    ids = np.full(12, 9)  # the prompt's token
    rare, often = np.concatenate([ids[:4], np.arange(20, 28)]), np.concatenate([ids[:4], np.repeat([3, 5, 7, 11], 2)])
    held = np.concatenate([ids[:4], np.full(8, 60)])
    part = [(held if i % 50 == 0 else rare if i == 1 else often, 4, float(i % 100 // 50)) for i in range(101)]
    write_shards(tmp_path, [101], dialogues=part)
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *SMALL, "--updates", 1, "--draft-vocab", 4)
    assert drafting.load(tmp_path / "dspark.safetensors", tiny_target()).draft_ids.tolist() == [3, 5, 7, 11]
    record = json.loads((tmp_path / "dspark.json").read_text())
    assert record["draft_coverage"] == pytest.approx(97 / 98) and record["answer_tokens"] == 98 * 8


@torch.no_grad()
def test_evaluate_without_a_greedy_dialogue():
    """A small held-out set may hold none drawn at temperature 0: no greedy figure then, and no crash."""
    target, drafter = make()
    part = [dialogue(20, 6, seed=1)]

    class Direct:
        def get(self, d):
            return extract(target, [d], (0, 1))[0]

    result = train.evaluate(drafter, Direct(), part, 4.0)
    assert result["tau_t0"] is None and 1 <= result["tau_t1"] <= 4


@pytest.mark.parametrize("options, message", [
    (("--batch", 30), "29 training dialogues"), (("--draft-vocab", V + 1), "draft-vocab"), (("--feature-layers", 0, 2), "feature layers"),
    (("--feature-layers", 1, 0), "feature layers"), (("--layers", 4), "--layers"), (("--batch", 0), "--batch"), (("--gamma", 0), "--gamma"),
    (("--eval-every", 0), "--eval-every"), (("--decay", 0), "positive"), (("--name", "a/b"), "not a path"),
    (("--updates", 30, "--lr", 1e30), "the loss is nan"),
])
def test_what_cannot_be_fitted_is_one_line(tiny, monkeypatch, capsys, tmp_path, options, message):
    write_shards(tmp_path, [30])
    refused(monkeypatch, capsys, message, "--data", tmp_path, "--out", tmp_path / "out", *SMALL, *options)
    assert not list((tmp_path / "out").glob("*"))


def test_a_broken_checkpoint_is_one_line(tiny, monkeypatch, capsys, tmp_path):
    write_shards(tmp_path, [30])
    for contents in (b"", b"garbage"):
        (tmp_path / "dspark.ckpt").write_bytes(contents)
        refused(monkeypatch, capsys, "dspark.ckpt is broken", "--data", tmp_path, "--out", tmp_path, *SMALL)


def test_a_checkpoint_of_another_run_is_refused(tiny, monkeypatch, capsys, tmp_path):
    """More dialogues change which ids are frequent; rows of W1 and W2 would silently come to stand for other tokens."""
    write_shards(tmp_path, [30])
    command = ("--data", tmp_path, "--out", tmp_path, *SMALL, "--draft-vocab", 20)
    run(monkeypatch, *command, "--updates", 1)
    write_shards(tmp_path / "more", [90], seed=1)
    (tmp_path / "shard-0-0001.npz").write_bytes((tmp_path / "more" / "shard-0-0000.npz").read_bytes())
    refused(monkeypatch, capsys, "dspark.ckpt was made with other", *command, "--updates", 1)
    (tmp_path / "shard-0-0001.npz").unlink()
    refused(monkeypatch, capsys, "dspark.ckpt was made with other", *command, "--updates", 1, "--head", "none")
    run(monkeypatch, *command, "--updates", 1)
    assert "trained already" in capsys.readouterr().out


def test_features_of_other_text_are_not_taken_for_this_one(tmp_path):
    """A shard written anew under its old name, or features made for a part of it only, must not be used as they are."""
    write_shards(tmp_path, [12])
    target, dialogues = tiny_target().double(), sum(corpus.read(tmp_path), [])
    corpus.Features(target, (0, 1), dialogues[:4])
    features = corpus.Features(target, (0, 1), dialogues)
    assert all(torch.allclose(features.get(d)[2], extract(target, [d], (0, 1))[0][2], atol=1e-4) for d in dialogues)
    write_shards(tmp_path, [12], seed=5)
    dialogues = sum(corpus.read(tmp_path), [])
    features = corpus.Features(target, (0, 1), dialogues)
    assert all(torch.allclose(features.get(d)[2], extract(target, [d], (0, 1))[0][2], atol=1e-4) for d in dialogues)


def test_optimizers_share_out_every_parameter_once():
    for head in drafting.KINDS:
        _, drafter = make(head)
        muon, adamw = train.make_optimizers(drafter, 1e-3)
        groups = [[id(p) for g in o.param_groups for p in g["params"]] for o in (muon, adamw)]
        assert sorted(groups[0] + groups[1]) == sorted(id(p) for p in drafter.parameters())
        assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
        assert id(drafter.head.W1.weight) in groups[1] and id(drafter.head.W2.weight) in groups[1]


# ---------------------------------------------------------------------------------------------------------------------
# writing dialogues; evaluation prompts stay out; the confidence head


def test_written_dialogues_come_with_the_features_of_a_direct_forward(monkeypatch):
    """Waves, a shrinking cache, an end at any step: every state kept equals a forward over the finished dialogue (but for the last
    token, which was never run), greedy answers are the target's."""
    target = tiny_target(tied=False).double()
    monkeypatch.setattr(smollm2, "EOS", 2)
    monkeypatch.setattr(smollm2, "encode", lambda encoding, text: [11, 12])
    monkeypatch.setattr(smollm2, "chat", lambda encoding, text: [1, 5, 2, 9, 1, 7, 2, 9, 1, 8])  # system turn, user header | rest
    written = list(corpus.write_dialogues(target, None, 23, 8, 8, 20, 0, (0, 1)))
    assert len(written) == 23 and len({len(w.ids) for w, _ in written}) > 2
    greedy = 0
    for w, kept in written:
        ids = torch.tensor(w.ids)
        assert w.ids[:6] == [1, 5, 2, 9, 1, 7] and w.ids[6:8] == [11, 12] and w.ids[w.answer - 4 : w.answer] == [2, 9, 1, 8]
        for mine, direct in zip(kept, extract(target, [Dialogue(ids, w.answer, w.temperature, None, 0)], (0, 1))[0]):
            assert len(mine) == len(ids) and (mine[:-1] - direct[:-1]).abs().max() < 1e-5 and mine[-1].abs().max() == 0
        logits = F.linear(kept[1][:-1], target.head.weight)
        if w.temperature == 0:
            greedy += 1
            assert torch.equal(logits.argmax(-1)[w.answer - 1 :], ids[w.answer :])
    assert greedy > 3


def test_generate_leaves_shards_that_fit_reads_without_another_pass(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(smollm2, "load", lambda path=None, dtype=torch.float32, **kw: (tiny_target(tied=False).to(dtype), None))
    monkeypatch.setattr(smollm2, "EOS", 2)
    monkeypatch.setattr(smollm2, "encode", lambda encoding, text: [11, 12])
    monkeypatch.setattr(smollm2, "chat", lambda encoding, text: [1, 5, 2, 9, 1, 7, 2, 9, 1, 8])
    run(monkeypatch, "--data", tmp_path, "generate", "--sequences", 60, "--shard", 30, "--slots", 9, "--max-question", 8, "--max-answer", 9,
        "--feature-layers", 0, 1)
    monkeypatch.setattr(corpus, "extract", lambda *args: pytest.fail("the features are there already"))
    training, held_out = corpus.read(tmp_path)
    features = corpus.Features(tiny_target(tied=False).bfloat16(), (0, 1), training + held_out)
    assert len(training) == 58 and all(len(features.get(d)[0]) == len(d.ids) for d in training)
    first = {p: p.read_bytes() for p in tmp_path.glob("shard*")}
    for p in list(first)[:2]:
        p.unlink()
    run(monkeypatch, "--data", tmp_path, "generate", "--sequences", 60, "--shard", 30, "--slots", 9, "--max-question", 8, "--max-answer", 9,
        "--feature-layers", 0, 1)
    assert {p.suffix for p in first} == {".npz", ".features"}
    arrays = [np.load(p)["ids"] for p in sorted(tmp_path.glob("*.npz"))]
    assert len(arrays) == 2 and not np.array_equal(*arrays)


def test_dialogues_like_an_evaluation_prompt_are_left_out():
    far, near, short = (dialogue(60, 10, seed=s) for s in range(3))
    prompts = [list(range(40, 60)), [7, 7, 7, 3]]
    near.ids[20:33] = torch.arange(45, 58)   # 13 tokens in a row
    far.ids[20:32] = torch.arange(45, 57)    # 12 are not enough
    short.ids[5:9] = torch.tensor([7, 7, 7, 3])
    assert corpus.without([far, near, short], prompts) == [far]


def test_a_fit_leaves_out_what_the_benchmark_asks(tiny, monkeypatch, tmp_path):
    """By the command itself, and its record says so."""
    part = [(np.array([9, 9, 9, 9] + list(b"Why is the sky"[:13]) + [5] * 6) % V, 4, 1.0)] + [(np.arange(i, i + 20) % V, 4, 1.0) for i in range(40)]
    part.insert(0, part[1])  # the first of a shard is held out
    write_shards(tmp_path, [len(part)], dialogues=part)
    (tmp_path / "asked.jsonl").write_text(json.dumps(dict(prompt="".join(chr(b % V) for b in b"Why is the sky"[:13]))))
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *SMALL, "--updates", 1, "--evaluation", tmp_path / "asked.jsonl")
    record = json.loads((tmp_path / "dspark.json").read_text())
    assert record["left_out_as_too_like_them"] == 1 and record["dialogues"] == 40
    assert record["evaluation_prompts"] == corpus.fingerprint(corpus.read_prompts(tmp_path / "asked.jsonl"))


def test_refitted_confidence_fits_fresh_text(monkeypatch):
    """After training on texts known by heart the head promises too much; refitted on others, its loss on still others falls,
    and nothing but the confidence layer has moved."""
    target, drafter = make(trainable=True)
    drafter.float()
    drafter.embed, drafter.head_rows = drafter.embed.float(), drafter.head_rows.float()
    with torch.no_grad():
        drafter.confidence.bias.fill_(2.0)  # 0.88 everywhere
    dialogues = [dialogue(40, 6, seed=s) for s in range(24)]

    class Direct:
        def get(self, d):
            return [x.float() for x in extract(target, [d], (0, 1))[0]]

    before = {n: p.clone() for n, p in drafter.named_parameters()}
    error = train.evaluate(drafter, Direct(), dialogues[12:], 4.0)["confidence_error"]
    train.refit_confidence(drafter, Direct(), dialogues[:12], 4.0)
    assert train.evaluate(drafter, Direct(), dialogues[12:], 4.0)["confidence_error"] < error / 2
    assert {n for n, p in drafter.named_parameters() if not torch.equal(p, before[n])} == {"confidence.weight", "confidence.bias"}


def test_calibrate_fits_bias_and_sts_on_every_second_question(monkeypatch, tmp_path, capsys):
    """From a file of questions alone, no training data. The bias makes mean confidence true over what was reached, the other weights
    keep their bytes, and the rest of the record stays."""
    target = tiny_target(tied=False)
    monkeypatch.setattr(smollm2, "load", lambda path=None, dtype=torch.float32, **kw: (target, None))
    monkeypatch.setattr(smollm2, "chat", lambda encoding, text: [ord(c) % V for c in text])
    drafting.save(drafting.tiny_drafter(target, 3, K=40), tmp_path / "dspark.safetensors")
    drafting.shift_confidence(tmp_path / "dspark.safetensors", 3.0)  # promises far too much
    (tmp_path / "dspark.json").write_text(json.dumps(dict(kept="as it was", calibration={"0.3": [1, 1, 1]})))
    questions = [f"question {i}" for i in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(dict(prompt=q)) for q in questions))
    asked, decode, before = [], train.study.decode, drafting.load(tmp_path / "dspark.safetensors", target)
    monkeypatch.setattr(train.study, "decode", lambda t, d, prompts, temperature, **kw: asked.append((temperature, prompts))
                        or decode(t, d, prompts, temperature, **kw))
    run(monkeypatch, "--out", tmp_path, "calibrate", "--questions", tmp_path / "q.jsonl", "--max-new-tokens", 40, "--temperatures", 1.0, 0.5)
    asked_ids = [[ord(c) % V for c in q] for q in questions[::2]]
    assert asked == [(1.0, asked_ids), (0.5, asked_ids)]
    record = json.loads((tmp_path / "dspark.json").read_text())
    assert record["kept"] == "as it was" and set(record["calibration"]) == {"1.0", "0.5"} and len(record["calibration"]["1.0"]) == 3
    after = drafting.load(tmp_path / "dspark.safetensors", target)
    moved = {n for (n, a), (_, b) in zip(before.named_parameters(), after.named_parameters()) if not torch.equal(a, b)}
    assert moved == {"confidence.bias"} and (after.confidence.bias < before.confidence.bias - 1).all()
    found = [train.study.whole(decode(target, after, asked_ids, t, max_new_tokens=40)) for t in (1.0, 0.5)]
    c, o = (np.concatenate(x) for x in zip(*found))
    reached = np.hstack((np.ones((len(o), 1)), o[:, :-1])) > 0
    assert c[reached].mean() == pytest.approx(o[reached].mean(), abs=1e-3)  # the same draws: confidence decides nothing here
    (tmp_path / "dspark.json").write_text("[]")
    refused(monkeypatch, capsys, "is not a drafter's record", "--out", tmp_path, "calibrate", "--questions", tmp_path / "q.jsonl")
    refused(monkeypatch, capsys, "cannot read", "--out", tmp_path, "calibrate", "--questions", tmp_path / "none")


def test_refit_changes_the_confidence_of_a_file_and_drops_its_calibration(tiny, monkeypatch, tmp_path, capsys):
    write_shards(tmp_path, [300])
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, *SMALL, "--updates", 2)
    drafting.shift_confidence(tmp_path / "dspark.safetensors", 4.0)
    path = tmp_path / "dspark.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(calibration={"1.0": [1, 1, 1]})))
    run(monkeypatch, "--data", tmp_path, "--out", tmp_path, "refit")
    record = json.loads(path.read_text())
    assert "calibration" not in record and record["confidence_refitted"]["error_after"] < record["confidence_refitted"]["error_before"] - 0.05

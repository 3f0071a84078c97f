"""
Tests of deepspec.py: drafters in the DeepSpec format. No weights needed. Run: python -m pytest tests/test_deepspec.py

The oracle. Random folders in the format; block logits and confidences are computed from their tensors, by the format's names, in float64
with none of the drafter's code: Eq. 2 to 7 written out below. The layers' shape differs from the target's in every size that may: heads,
grouping, width of a head (6 x 12 is not 32), d_ff, rotation, norm's epsilon. Features come from hooks on the target's own modules.

Tolerances. float64 on both sides: 1e-10 where two orders of summation are compared; bit equality for what was written and read again.
Confidence is handed over in float32: one step below 1, 1.2e-7. A broken variant must miss the logits by GAP, seven orders more.
"""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from safetensors.torch import load_file, save_file

import deepspec
import cli
import drafter as drafting
import dspark
import smollm2
import train
from baselines import Eagle3
from drafter import DrafterConfig, tiny_drafter
from target import tiny_target

EXACT, F32_STEP, GAP = 1e-10, 1.2e-7, 1e-3
V, D, R, G, H, J, HEAD, FF, LAYERS = 64, 32, 8, 4, 6, 2, 12, 40, 2
KINDS = ("vanilla", "gated", "rnn", None)  # None: DFlash, rank 0


def randn(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture(scope="module")
def target():
    return tiny_target(V, qk_norm=True, tied=False).double()


def random_checkpoint(kind, K=V, layers=(-1, 1), confidence=True, with_markov=True, seed=1):
    """-> (config, tensors) of a random drafter in the format, for a target of 3 layers, width 32 and 64 ids."""
    g = torch.Generator().manual_seed(seed)
    matrix = lambda rows, columns: randn(g, rows, columns) / columns**0.5  # noqa: E731
    norm = lambda n: 1 + 0.5 * randn(g, n)  # noqa: E731 (not ones, where a forgotten weight would not show)
    r = R if kind else 0
    with_markov = with_markov and r > 0
    config = dict(architectures=["Qwen3DSparkModel"], model_type="qwen3", hidden_size=D, intermediate_size=FF, num_attention_heads=H,
                  num_key_value_heads=J, head_dim=HEAD, num_hidden_layers=LAYERS, num_target_layers=3, vocab_size=V, rms_norm_eps=1e-6,
                  rope_theta=5e4, hidden_act="silu", attention_bias=False, layer_types=["full_attention"] * LAYERS,
                  target_layer_ids=list(layers), mask_token_id=61, block_size=G, num_anchors=512, markov_rank=r,
                  enable_confidence_head=confidence, confidence_head_with_markov=with_markov)
    w = {"embed_tokens.weight": 2 * randn(g, V, D), "lm_head.weight": 2 * matrix(K, D), "fc.weight": matrix(D, len(layers) * D),
         "hidden_norm.weight": norm(D), "norm.weight": norm(D)}
    for i in range(LAYERS):
        a, b = f"layers.{i}.self_attn.", f"layers.{i}."
        w |= {b + "input_layernorm.weight": norm(D), b + "post_attention_layernorm.weight": norm(D), a + "q_norm.weight": norm(HEAD),
              a + "k_norm.weight": norm(HEAD), a + "q_proj.weight": matrix(H * HEAD, D), a + "k_proj.weight": matrix(J * HEAD, D),
              a + "v_proj.weight": matrix(J * HEAD, D), a + "o_proj.weight": matrix(D, H * HEAD), b + "mlp.gate_proj.weight": matrix(FF, D),
              b + "mlp.up_proj.weight": matrix(FF, D), b + "mlp.down_proj.weight": matrix(D, FF)}
    if kind:
        config["markov_head_type"] = kind
        w |= {"markov_head.markov_w1.weight": randn(g, V, R), "markov_head.markov_w2.weight": matrix(K, R)}
    if kind == "gated":
        w |= {"markov_head.gate_proj.weight": 2 * matrix(R, D + R), "markov_head.gate_proj.bias": randn(g, R)}
    if kind == "rnn":
        w |= {"markov_head.joint_proj.weight": 2 * matrix(3 * R, 2 * R + D), "markov_head.joint_proj.bias": randn(g, 3 * R)}
    if confidence:
        w |= {"confidence_head.proj.weight": matrix(1, D + (r if with_markov else 0)), "confidence_head.proj.bias": randn(g, 1)}
    if K < V:
        config["draft_vocab_size"] = K
        w["d2t"] = torch.randperm(V, generator=g)[:K].sort().values - torch.arange(K)
    return config, w


def write(folder, config, tensors, shards=1):
    """As huggingface_hub leaves a checkpoint: one file, or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=files)))
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# the oracle: the equations, from the format's tensors


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, places, base):
    """RoPE of x (n, heads, d) at places (n): the pair (i, i + d/2) turns by place * base^(-2i/d). The table keeps float32 phases."""
    half = x.shape[-1] // 2
    angle = places.double()[:, None, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    c, s = angle.cos().float().double(), angle.sin().float().double()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


def attention(q, k, v, visible):
    """q (n, H, d), k and v (L, J, d), visible (n, L) -> (n, H d): head i reads key head i J / H."""
    heads = []
    for i in range(q.shape[1]):
        j = i * k.shape[1] // q.shape[1]
        score = (q[:, i] @ k[:, j].T / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf"))
        heads.append(torch.softmax(score, dim=-1) @ v[:, j])
    return torch.cat(heads, dim=-1)


def mlp(x, w, b, eps):
    y = rms(x, w[b + "post_attention_layernorm.weight"], eps)
    gate = y @ w[b + "mlp.gate_proj.weight"].T
    return x + (gate * torch.sigmoid(gate) * (y @ w[b + "mlp.up_proj.weight"].T)) @ w[b + "mlp.down_proj.weight"].T


def oracle_block(c, w, features, anchor, *, mask=None, plain_end=False):
    """Hidden states (G, D) of a block after features (n, m D). Broken on purpose by mask, another row; plain_end: no final norm."""
    n, eps, base = len(features), c["rms_norm_eps"], c["rope_theta"]
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)  # Eq. 2
    embed = w["embed_tokens.weight"]
    x = embed[torch.tensor([anchor] + [c["mask_token_id"] if mask is None else mask] * (G - 1))]
    places = torch.arange(n + G)
    for i in range(LAYERS):
        a, b = f"layers.{i}.self_attn.", f"layers.{i}."
        y = rms(x, w[b + "input_layernorm.weight"], eps)
        source = torch.cat([context, y])  # Eq. 3: one W_k and one W_v for context and block
        q, k, v = ((s @ w[f"{a}{p}_proj.weight"].T).unflatten(-1, (-1, HEAD)) for s, p in ((y, "q"), (source, "k"), (source, "v")))
        q, k = turn(rms(q, w[a + "q_norm.weight"], eps), places[n:], base), turn(rms(k, w[a + "k_norm.weight"], eps), places, base)
        x = x + attention(q, k, v, torch.ones(G, n + G, dtype=torch.bool)) @ w[a + "o_proj.weight"].T
        x = mlp(x, w, b, eps)
    return x if plain_end else rms(x, w["norm.weight"], eps)


def oracle(c, w, features, anchor, tokens, *, rows="gco", columns="seh", gate="he", **broken):
    """-> logits (G, K) and confidence (G,) along the tokens. rows, columns, gate: the order of joint_proj's gate, candidate and output
    rows, of its state, embedding and hidden columns, and of gate_proj's hidden and embedding columns; others are wrong."""
    h, kind = oracle_block(c, w, features, anchor, **broken), c.get("markov_head_type")
    logits, confidence, s = [], [], torch.zeros(R, dtype=torch.float64)
    for k, before in enumerate([anchor, *tokens[:-1]]):
        bias, e = 0.0, h.new_zeros(0)
        if kind:
            e = code = w["markov_head.markov_w1.weight"][before]  # Eq. 5: by target id
            part = dict(s=s, e=e, h=h[k])
            if kind == "gated":
                z = torch.cat([part[x] for x in gate])
                code = e * torch.sigmoid(w["markov_head.gate_proj.weight"] @ z + w["markov_head.gate_proj.bias"])
            if kind == "rnn":  # Eq. 6
                z = w["markov_head.joint_proj.weight"] @ torch.cat([part[x] for x in columns]) + w["markov_head.joint_proj.bias"]
                row = dict(zip(rows, z.chunk(3)))
                open_ = torch.sigmoid(row["g"])
                code, s = torch.tanh(row["o"]), open_ * s + (1 - open_) * torch.tanh(row["c"])
            bias = w["markov_head.markov_w2.weight"] @ code
        logits.append(w["lm_head.weight"] @ h[k] + bias)  # Eq. 4
        if c["enable_confidence_head"]:  # Eq. 7
            seen = torch.cat([h[k], e]) if c["confidence_head_with_markov"] else h[k]
            confidence.append(torch.sigmoid(w["confidence_head.proj.weight"][0] @ seen + w["confidence_head.proj.bias"][0]))
        else:
            confidence.append(torch.ones((), dtype=torch.float64))
    return torch.stack(logits), torch.stack(confidence)


def streams(target, tokens):
    """What the target's own modules give out along a text: {-1: embedding, i: output of layer i}, each (n, D)."""
    seen, hooks = {}, []
    for i, module in [(-1, target.embed), *enumerate(target.layers)]:
        hooks.append(module.register_forward_hook(lambda m, inputs, out, i=i: seen.__setitem__(i, out)))
    n = len(tokens)
    target(tokens, torch.zeros(n, dtype=torch.long), torch.arange(n), target.new_cache(1, n))
    for hook in hooks:
        hook.remove()
    return seen


def draft(drafter, target, tokens, anchor, seed=0):
    """One block after a text, as the engine drafts it: the target's features in, in two pieces, in the second of three slots."""
    n, cache = len(tokens), drafter.new_cache(3, 40)
    places, u = torch.arange(n), torch.rand(1, G, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    _, features = target(tokens, torch.zeros_like(places), places, target.new_cache(1, n), drafter.feature_layers)
    for part in (slice(0, 4), slice(4, n)):
        drafter.extend(tokens[part], features[part], torch.ones_like(places[part]), places[part], cache)
    return drafter.propose(torch.tensor([anchor]), torch.tensor([1]), torch.tensor([n]), cache, G, u, 1.0)


def gap(a, b):
    return (a - b).abs().max().item()


TEXT, ANCHOR = torch.tensor([3, 60, 17, 17, 8, 41, 0, 22, 9]), 33


def teacher_forced(drafter, target, drafted):
    """Training form along the drafted tokens -> block logits (G, K), confidence (G,)."""
    n = len(TEXT)
    tokens = torch.tensor([*TEXT.tolist(), ANCHOR, *drafted])[None]
    places = torch.arange(tokens.shape[1])
    _, features = target(tokens[0], torch.zeros_like(places), places, target.new_cache(1, len(places)), drafter.feature_layers)
    h, code, previous = drafter(features[None], tokens, torch.tensor([[n]]))
    return (h @ drafter.head_rows.T + drafter.head.W2(code))[0, 0], drafter.confidence_logit(h, previous).sigmoid()[0, 0]


@pytest.mark.parametrize("kind, more", [*((k, {}) for k in KINDS), ("rnn", dict(K=40)), ("gated", dict(with_markov=False)),
                                        (None, dict(confidence=False)), ("vanilla", dict(layers=(0,)))])
def test_a_folder_drafts_what_the_equations_say(kind, more, target, tmp_path):
    c, w = random_checkpoint(kind, **more)
    drafter = drafting.load(write(tmp_path / "d", c, w, shards=3), target)
    assert drafter.gamma == G and drafter.dtype == torch.float64
    stream = streams(target, TEXT)
    features = torch.cat([stream[i] for i in c["target_layer_ids"]], dim=-1)
    made = draft(drafter, target, TEXT, ANCHOR)
    logits, confidence = oracle(c, w, features, ANCHOR, made.tokens[0].tolist())
    assert 0.02 < torch.softmax(logits, -1).amax(-1).min() < 0.95  # neither flat nor one-hot, where everything would agree
    assert gap(made.p_draft[0], torch.softmax(logits, -1)) < EXACT
    assert gap(made.confidence[0].double(), confidence) < F32_STEP
    if "K" in more:
        ids = w["d2t"] + torch.arange(more["K"])
        assert torch.equal(drafter.draft_ids, ids) and torch.isin(made.tokens, ids).all()
    trained_logits, trained_confidence = teacher_forced(drafter, target, made.tokens[0].tolist())
    assert gap(trained_logits, logits) < EXACT and gap(trained_confidence, confidence) < EXACT


BROKEN = {
    "joint_proj: gate and candidate swapped": ("rnn", dict(rows="cgo")),
    "joint_proj: candidate and output swapped": ("rnn", dict(rows="goc")),
    "joint_proj: embedding before state": ("rnn", dict(columns="esh")), "joint_proj: hidden first": ("rnn", dict(columns="hse")),
    "gate_proj: embedding before hidden": ("gated", dict(gate="eh")), "mask row of another id": ("vanilla", dict(mask=60)),
    "heads read before the final norm": ("vanilla", dict(plain_end=True)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_reading_would_be_noticed(name, target, tmp_path):
    kind, broken = BROKEN[name]
    c, w = random_checkpoint(kind)
    drafter = drafting.load(write(tmp_path / "d", c, w), target)
    features = torch.cat([streams(target, TEXT)[i] for i in c["target_layer_ids"]], dim=-1)
    drafted = draft(drafter, target, TEXT, ANCHOR).tokens[0].tolist()
    logits, _ = teacher_forced(drafter, target, drafted)
    assert gap(logits, oracle(c, w, features, ANCHOR, drafted)[0]) < EXACT
    assert gap(logits, oracle(c, w, features, ANCHOR, drafted, **broken)[0]) > GAP


def test_feature_layers_shifted_by_one_would_be_noticed(target, tmp_path):
    c, w = random_checkpoint("vanilla", layers=(-1, 0))
    drafter, stream = drafting.load(write(tmp_path / "d", c, w), target), streams(target, TEXT)
    drafted = draft(drafter, target, TEXT, ANCHOR).tokens[0].tolist()
    logits, _ = teacher_forced(drafter, target, drafted)
    for shift in (0, 1):
        features = torch.cat([stream[i + shift] for i in c["target_layer_ids"]], dim=-1)
        miss = gap(logits, oracle(c, w, features, ANCHOR, drafted)[0])
        assert miss > GAP if shift else miss < EXACT


# ---------------------------------------------------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("K", [V, 40])
def test_a_folder_survives_reading_and_writing_bit_for_bit(kind, K, target, tmp_path):
    c, w = random_checkpoint(kind, K=K)
    drafter = drafting.load(write(tmp_path / "a", c, w, shards=2), target)
    deepspec.export_drafter(drafter, tmp_path / "b", c["mask_token_id"], torch.float64)
    again = load_file(tmp_path / "b" / "model.safetensors")
    w["embed_tokens.weight"] = w["embed_tokens.weight"].clone()
    assert set(again) == set(w)
    assert all(torch.equal(again[name], w[name]) for name in w), [n for n in w if not torch.equal(again[n], w[n])]
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: written.get(name) for name in c} == c


@pytest.mark.parametrize("head", drafting.HEADS)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_our_drafters_survive_export_bit_for_bit(head, qk_norm, tmp_path):
    """With a reduced vocabulary, from an int8 file as it is dequantised: the folder drafts exactly as the file does."""
    target = tiny_target(V, qk_norm=qk_norm).double()
    drafting.save(tiny_drafter(target, G, head, K=40), tmp_path / "d.safetensors")
    ours = drafting.load(tmp_path / "d.safetensors", target)
    ours.confidence.bias += 0.1
    deepspec.export_drafter(ours, tmp_path / "d", 63, torch.float64)
    theirs = drafting.load(tmp_path / "d", target)
    assert theirs.config == ours.config and torch.equal(theirs.draft_ids, ours.draft_ids) and torch.equal(theirs.head_rows, ours.head_rows)
    assert theirs.embed.data_ptr() == target.embed.weight.data_ptr()  # equal but for the mask's row: shared, not a second copy
    a, b = dict(ours.named_parameters()), dict(theirs.named_parameters())
    a["head.W1.weight"] = a["head.W1.weight"][ours.w1_row]  # there every id has a row of its own
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    first, second = draft(ours, target, TEXT, ANCHOR), draft(theirs, target, TEXT, ANCHOR)
    for x in ("tokens", "p_draft", "confidence", "draft_ids"):
        assert torch.equal(getattr(first, x), getattr(second, x))
    deepspec.export_drafter(theirs, tmp_path / "e", 63, torch.float64)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "d" / file).read_bytes() == (tmp_path / "e" / file).read_bytes()
    # no q/k norm: under a name that an engine does not know, rather than misread
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel" if qk_norm else "LlamaDSparkModel"]
    assert any("q_norm" in n for n in load_file(tmp_path / "d" / "model.safetensors")) == qk_norm


def test_what_the_format_cannot_say_is_refused(tmp_path):
    target = tiny_target(V)
    state = drafting.Drafter(DrafterConfig(G, 1, (0, 1), rank=R, anchor_state=True), target, torch.arange(V))
    for drafter, word in ((state, "anchor-state"), (tiny_drafter(target, G, "eagle"), "eagle")):
        with pytest.raises(ValueError, match=word) as error:
            deepspec.export_drafter(drafter, tmp_path / "x", 0)
        assert "\n" not in str(error.value)
    scaled = tiny_target(V, rope_scaling=("linear", 2.0))
    with pytest.raises(ValueError, match="rotation is scaled"):
        deepspec.export_drafter(tiny_drafter(scaled, G), tmp_path / "x", 0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")  # somebody's model
    for folder, mask, word in (("full", 0, "not empty"), ("x", V, "mask token id")):
        with pytest.raises(ValueError, match=word):
            deepspec.export_drafter(tiny_drafter(target, G), tmp_path / folder, mask)
    assert not (tmp_path / "x").exists()


def tiny_encoding():
    special = {"<|im_start|>": 256, "<|im_end|>": 257, "<spare>": 258}
    return tiktoken.Encoding("tiny", pat_str=".", mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens=special)


def test_the_export_command(monkeypatch, tmp_path, capsys):
    """train.py export: the file's values, its calibration, an id for the mask that no text has; --drafter takes the folder."""
    target = tiny_target(260)
    monkeypatch.setattr(smollm2, "load", lambda *args, **kw: (target, tiny_encoding()))
    drafting.save(tiny_drafter(target, 3, K=40), tmp_path / "tiny.safetensors")
    (tmp_path / "tiny.json").write_text(json.dumps(dict(settings=dict(anchors="32"), calibration={"0.0": [1, 2, 3]})))
    folder = tmp_path / "out"
    command = ["train.py", "--out", str(tmp_path), "export", str(folder), "--name", "tiny"]
    monkeypatch.setattr("sys.argv", command)
    train.main()
    said = capsys.readouterr().out
    config = json.loads((folder / "config.json").read_text())
    assert config["mask_token_id"] == 259 and config["num_anchors"] == 32 and "LlamaDSparkModel" in said and "d2t" in said
    setup = cli.load(drafter=str(folder), device="cpu", dtype="fp32")
    ours = drafting.load(tmp_path / "tiny.safetensors", target)
    assert np.array_equal(setup.calibration[0.0], [1, 2, 3]) and torch.equal(setup.drafter.mask, ours.mask)
    monkeypatch.setattr("sys.argv", command + ["--mask-token-id", "7"])
    with pytest.raises(SystemExit) as stop:  # the folder is taken
        train.main()
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    # a tokenizer that fills the embedding: a special token that conversations do not use
    assert deepspec.unused_id(tiny_encoding(), 259, {256, 257}) == 258
    with pytest.raises(ValueError, match="mask-token-id"):
        deepspec.unused_id(tiny_encoding(), 259, {256, 257, 258})


def test_a_folder_is_found_where_a_file_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir(), (tmp_path / "dspark").mkdir()
    assert str(cli.find_drafter("mine")) == "mine" and cli.find_drafter("./dspark").is_dir()
    assert cli.find_drafter("dspark") == cli.DRAFTER  # a name in weights/ stays one
    assert cli.read_calibration(tmp_path / "mine", 3) == {}


# ---------------------------------------------------------------------------------------------------------------------
# Eagle-3


def eagle_checkpoint(seed=2):
    c, w = random_checkpoint(None, layers=(0, 1), confidence=False, seed=seed)
    g = torch.Generator().manual_seed(seed)
    c |= dict(architectures=["Qwen3Eagle3Model"], num_hidden_layers=1, layer_types=["full_attention"], ttt_length=G)
    for name in ("block_size", "mask_token_id", "markov_rank", "enable_confidence_head"):
        del c[name]
    w = {n: x for n, x in w.items() if not n.startswith("layers.1.") and n != "hidden_norm.weight"}
    for x, n in (("q", H), ("k", J), ("v", J)):
        w[f"layers.0.self_attn.{x}_proj.weight"] = randn(g, n * HEAD, 2 * D) / (2 * D) ** 0.5
    return c, w | {"layers.0.hidden_norm.weight": 1 + 0.5 * randn(g, D)}


def oracle_eagle(c, w, features, ids, *, first=1):
    """Logits (G, V) after the rows of ids = text, anchor and draft tokens. The row of token t pairs its embedding with the state of
    t - 1: fused features (not normed) in the text, the layer's own output in the draft. x_0 has none. Dense, uncached."""
    a, b, eps, n = "layers.0.self_attn.", "layers.0.", c["rms_norm_eps"], len(features)
    states, out = list(features @ w["fc.weight"].T), []
    for k in range(len(ids) - n):
        text = torch.tensor(ids[first : n + 1 + k])
        state = torch.stack(states[first - 1 : n + k] if first else [torch.zeros_like(states[0]), *states[: n + k]])
        y = torch.cat([rms(w["embed_tokens.weight"][text], w[b + "input_layernorm.weight"], eps),
                       rms(state, w[b + "hidden_norm.weight"], eps)], dim=-1)
        q, key, v = ((y @ w[f"{a}{p}_proj.weight"].T).unflatten(-1, (-1, HEAD)) for p in "qkv")
        places = torch.arange(len(text))
        q, key = (turn(rms(x, w[f"{a}{p}_norm.weight"], eps), places, c["rope_theta"]) for x, p in ((q, "q"), (key, "k")))
        mixed = attention(q[-1:], key, v, torch.ones(1, len(text), dtype=torch.bool))
        x = mlp(state[-1:] + mixed @ w[a + "o_proj.weight"].T, w, b, eps)[0]
        states.append(x)
        out.append(w["lm_head.weight"] @ rms(x, w["norm.weight"], eps))
    return torch.stack(out)


def test_an_eagle_3_folder_drafts_what_its_chain_says(target, tmp_path):
    c, w = eagle_checkpoint()
    drafter, stream = drafting.load(write(tmp_path / "e", c, w), target), streams(target, TEXT)
    assert isinstance(drafter, Eagle3)
    made = draft(drafter, target, TEXT, ANCHOR)
    ids = [*TEXT.tolist(), ANCHOR, *made.tokens[0, : G - 1].tolist()]
    features = torch.cat([stream[0], stream[1]], dim=-1)
    assert gap(made.p_draft[0], torch.softmax(oracle_eagle(c, w, features, ids), -1)) < EXACT
    assert gap(made.p_draft[0], torch.softmax(oracle_eagle(c, w, features, ids, first=0), -1)) > 1e-4  # teeth: a row for x_0 would show
    assert (made.confidence == 1).all()
    del w["layers.0.hidden_norm.weight"]
    with pytest.raises(ValueError, match="lacks the tensor layers.0.hidden_norm.weight"):
        drafting.load(write(tmp_path / "e", c, w), target)
    with pytest.raises(ValueError, match="eagle"):
        deepspec.export_drafter(drafter, tmp_path / "x", 0)


@pytest.mark.parametrize("make", [lambda: random_checkpoint(None, confidence=False), lambda: random_checkpoint("rnn"), eagle_checkpoint])
def test_folders_decode_through_the_engine(make, target, tmp_path):
    """Greedy ids are plain decoding's, whatever the drafter; prompts of one token and of several, slots that are used again."""
    drafter = drafting.load(write(tmp_path / "d", *make()), target)
    prompts, sampling = [[5], [1, 2, 3, 4, 9], [7, 7]], [dspark.Sampling(0.0, max_new_tokens=12, eos=-1)] * 3
    plain = dspark.generate(target, None, prompts, sampling=sampling)
    assert [r.ids for r in dspark.generate(target, drafter, prompts, sampling=sampling)] == [r.ids for r in plain]
    with pytest.raises(ValueError, match=f"gamma {G + 1}: this drafter was trained for blocks of up to {G}"):
        dspark.generate(target, drafter, prompts, sampling=sampling, gamma=G + 1)


# ---------------------------------------------------------------------------------------------------------------------
# what cannot be read


def test_wrong_and_partial_folders_give_one_line(target, tmp_path):
    c, w = random_checkpoint("rnn")
    cut = lambda name: {n: x for n, x in w.items() if n != name}  # noqa: E731
    cases = {  # name: (config, tensors, what the line must say)
        "unknown architecture": (c | dict(architectures=["Gemma4DSparkModel"]), w, "unknown architecture Gemma4DSparkModel"),
        "no architecture": (c | dict(architectures=None), w, "unknown architecture None"),
        "unknown head": (c | dict(markov_head_type="mlp"), w, "unknown head type 'mlp'"),
        "missing tensor": (c, cut("markov_head.joint_proj.bias"), "lacks the tensor markov_head.joint_proj.bias"),
        "missing layer": (c | dict(num_hidden_layers=3, layer_types=None), w, "lacks the tensor layers.2"),
        "wrong shape": (c, w | {"fc.weight": torch.zeros(D, D)}, r"fc.weight has shape \(32, 32\), but by config.json it is \(32, 64\)"),
        "other head's shape": (c | dict(markov_rank=4), w, "markov_w1.weight has shape"),
        "another width": (c | dict(hidden_size=48), w, "made for another target: its hidden_size is 48"),
        "another vocabulary": (c | dict(vocab_size=65), w, "made for another target: its vocab_size is 65"),
        "another depth": (c | dict(num_target_layers=36), w, "made for another target: its num_target_layers is 36"),
        "the target's last layer": (c | dict(target_layer_ids=[0, 2]), w, "target_layer_ids"),
        "layers not rising": (c | dict(target_layer_ids=[1, 0]), w, "target_layer_ids"),
        "a field less": ({n: x for n, x in c.items() if n != "block_size"}, w, "block_size is None"),
        "a field of another kind": (c | dict(block_size="7"), w, "block_size is '7'"),
        "a draft vocabulary of another kind": (c | dict(draft_vocab_size="40"), w, "draft_vocab_size is '40'"),
        "a draft vocabulary larger than the whole": (c | dict(draft_vocab_size=V + 1), w, "draft_vocab_size 65"),
        "rope scaling": (c | dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), w, "rope_type 'yarn'"),
        "bias in attention": (c | dict(attention_bias=True), w, "attention_bias"),
        "sliding window": (c | dict(layer_types=["sliding_attention"] * 2), w, "sliding_attention"),
        "mask outside": (c | dict(mask_token_id=V), w, "mask_token_id 64"),
        "no confidence field": ({n: x for n, x in c.items() if n != "confidence_head_with_markov"}, w, "confidence_head_with_markov"),
        "heads that do not divide": (c | dict(num_key_value_heads=4), w, "heads, layers, block or rank"),
        "two Eagle layers": (c | dict(architectures=["Qwen3Eagle3Model"], ttt_length=4), w, "2 Eagle layers"),
    }

    def line(folder, says):
        with pytest.raises(ValueError, match=says) as error:
            drafting.load(folder, target)
        text = str(error.value)
        assert "\n" not in text and len(text) < 400 and str(folder) in text, text
        assert any(remedy in text for remedy in ("again", "choose", "fetch", "--drafter takes")), text

    for name, (config, tensors, says) in cases.items():
        line(write(tmp_path / "d", config, tensors), says)
    folder = write(tmp_path / "s", c, w, shards=3)
    drafting.load(folder, target)
    shard = folder / "model-00002-of-00003.safetensors"
    good = shard.read_bytes()
    shard.write_bytes(good[:-100])
    line(folder, "is broken")
    shard.write_bytes(b"")
    line(folder, "is broken")
    shard.unlink()
    line(folder, f"lacks the file {shard.name}")
    shard.write_bytes(good)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("markov_head.joint_proj.bias", "another"))
    line(folder, "lacks the tensor markov_head.joint_proj.bias")
    for text in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        line(folder, "index.json is broken")
    index.unlink()
    line(folder, "lacks the file model.safetensors")
    for text in ("", "[]", '"x"', '{"architectures": 3}', '{"rope_scaling": "yarn"}', '{"layer_types": 3}', '{"dflash_config": 3}'):
        (folder / "config.json").write_text(text)
        line(folder, "not the configuration of a model")
    (folder / "config.json").unlink()
    line(folder, "holds no config.json")


def test_a_d2t_that_does_not_rise_is_refused(target, tmp_path):
    c, w = random_checkpoint("vanilla", K=40)
    for d2t in (w["d2t"].flip(0) + 30, torch.full((40,), 30)):
        with pytest.raises(ValueError, match="draft ids must rise"):
            drafting.load(write(tmp_path / "d", c, w | {"d2t": d2t}), target)

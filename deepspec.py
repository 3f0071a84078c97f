"""Other drafters: folders in the format of DeepSpec, the paper's authors' training code. (Other targets: checkpoints.py.)

Drafters   released DSpark, DFlash (rank 0) and Eagle-3 drafters in the DeepSpec format, read into Drafter or Eagle3 (--drafter DIR),
           and our drafters written in that format (python train.py export DIR), for serving engines that read it.
Serving    docs/growing.md says how engines would read such a folder; limits() what of a drafter they would not take.
Errors     ValueError: one line that says what is missing or does not fit, and what to do.
Letters    V vocabulary, K draft vocabulary, D width, m feature layers, r rank, H query heads, J key/value heads, d width of a head, F d_ff.
Alone      python deepspec.py DIR    (what a drafter's config.json says, checked, without reading its weights)
"""
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from baselines import Eagle3
from drafter import Drafter, DrafterConfig
from target import Target, rope_table

# The equations are those of drafter.py; what the format calls things, and in which order a row or a column is, is what can go wrong:
#   fc, hidden_norm               W_c (D, m D) and the norm of Eq. 2; columns in the order of target_layer_ids, which counts layers from 0,
#                                 -1 for the embedding
#   layers.i.self_attn            q, k, v apart (ours is one matrix); q_norm and k_norm (d,) before the rotation (Eq. 3)
#   norm                          after the last layer; every head reads what it gives
#   embed_tokens, lm_head         the drafter's own copies (V, D); the row mask_token_id of the first is our mask vector
#   markov_head.markov_w1, _w2    (V, r), both by target id (Eq. 5)
#   markov_head.gate_proj         (r, D + r) over [h ; W1[x]]
#   markov_head.joint_proj        (3 r, 2 r + D): rows gate, candidate, output; columns state, W1[x], h (Eq. 6)
#   confidence_head.proj          (1, D + r) over [h ; W1[x]] (Eq. 7), or (1, D) without confidence_head_with_markov
# A reduced draft vocabulary is not in that format but in vLLM's reading of it: draft_vocab_size K, lm_head and markov_w2 of K rows, and
# d2t (K,) with d2t[i] = target id of row i, minus i.

DSPARK, LLAMA, EAGLE = "Qwen3DSparkModel", "LlamaDSparkModel", "Qwen3Eagle3Model"  # LLAMA is ours: no q/k norm, which no engine knows
HEAD_TYPES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
# what our layers cannot do, and a config may ask for: field, the only values that we can serve
ONLY = dict(rope_type=("default",), attention_bias=(False, None), hidden_act=("silu", None), is_causal=(False, None),
            causal=(False, None), use_swa=(False, None))


def load_drafter(folder, target: Target, packed=True) -> Drafter:
    """Read a folder and put the drafter beside its target, as drafter.load() does with a file. Tensor by tensor, cast as it is read;
    and where embedding or head equal the target's, those serve both: nothing stays in memory twice."""
    c = drafter_config(folder, target)
    get, t = drafter_tensors(folder, target), target.config
    V, D, r, K = t.vocab_size, t.d_model, c["markov_rank"], c["draft_vocab_size"]
    shape = replace(t, n_heads=c["num_attention_heads"], n_kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"],
                    d_ff=c["intermediate_size"], rope_base=c["rope_theta"], rope_scaling=(), norm_eps=c["rms_norm_eps"],
                    qk_norm=c["architecture"] != LLAMA)
    config = DrafterConfig(c["block_size"], c["num_hidden_layers"], c["target_layer_ids"], c["head"], r)
    draft_ids = torch.arange(V, device=target.device)
    if K < V:  # d2t is an offset
        draft_ids = draft_ids[:K] + get("d2t", K).long()
        if not (draft_ids.diff() > 0).all() or not 0 <= draft_ids[0] <= draft_ids[-1] < V:
            raise ValueError(f"{folder}: d2t maps to {draft_ids.tolist()[:4]} ..: draft ids must rise within 0..{V - 1}; export it again")
    kind = Eagle3 if c["head"] == "eagle" else Drafter
    with torch.device("meta"):  # shapes only: no time spent initialising what is about to be overwritten
        drafter = kind(config, target, draft_ids, shape)
        # by target id, as the format has it: every id its own row, drafted or not
        drafter.head.W1 = nn.Embedding(V, r)
    drafter.cos, drafter.sin = (x.to(target.device) for x in rope_table(t.max_len + config.gamma, shape.head_dim, shape.rope_base))
    drafter.w1_row = torch.arange(V, device=target.device)

    embed, head_rows = get("embed_tokens.weight", V, D), get("lm_head.weight", K, D)
    mask_id = c["mask_token_id"]
    # the mask's row may differ and the target's embedding still serve: a block begins with a token, and that id is none
    parts = [slice(None)] if mask_id is None else [slice(mask_id), slice(mask_id + 1, None)]
    if not all(torch.equal(embed[part], target.embed.weight[part]) for part in parts):
        drafter.embed = embed
    if not torch.equal(head_rows, drafter.head_rows):
        drafter.head_rows = head_rows
    state = layer_state(get, c, shape, eagle=kind is Eagle3)
    state |= {"head.W1.weight": embed.new_zeros(V, 0), "head.W2.weight": embed.new_zeros(K, 0)}
    if kind is Drafter:
        state |= {"mask": embed[mask_id].clone(), "context_norm.weight": get("hidden_norm.weight", D)}
    if r:
        state |= {"head.W1.weight": get("markov_head.markov_w1.weight", V, r), "head.W2.weight": get("markov_head.markov_w2.weight", K, r)}
    if c["head"] == "gated":
        state["head.gate.weight"] = get("markov_head.gate_proj.weight", r, D + r)
        state["head.gate.bias"] = get("markov_head.gate_proj.bias", r)
    if c["head"] == "rnn":
        state["head.joint.weight"] = get("markov_head.joint_proj.weight", 3 * r, 2 * r + D)
        state["head.joint.bias"] = get("markov_head.joint_proj.bias", 3 * r)
    if c["enable_confidence_head"]:
        seen = r if c["confidence_head_with_markov"] else 0
        weight = get("confidence_head.proj.weight", 1, D + seen)
        state["confidence.weight"] = torch.cat([weight, weight.new_zeros(1, r - seen)], dim=1)  # our head reads W1[x] always
        state["confidence.bias"] = get("confidence_head.proj.bias", 1)
    else:
        drafter.confidence = None
    drafter.load_state_dict(state, assign=True)
    drafter = drafter.eval().requires_grad_(False)
    return drafter.pack() if packed else drafter


def layer_state(get, c, shape, eagle):
    """The tensors that every kind has: fusion, layers and final norm, under our names. An Eagle-3 layer reads [embedding ; state], 2 D."""
    D, F, d, H, J = shape.d_model, shape.d_ff, shape.head_dim, shape.n_heads, shape.n_kv_heads
    width = 2 * D if eagle else D
    state = {"context_proj.weight": get("fc.weight", D, len(c["target_layer_ids"]) * D), "norm.weight": get("norm.weight", D)}
    for i in range(c["num_hidden_layers"]):
        a, b = f"layers.{i}.self_attn.", f"layers.{i}."
        rows = [get(f"{a}{x}_proj.weight", n * d, width) for x, n in (("q", H), ("k", J), ("v", J))]
        state[b + "attn.qkv.weight"] = torch.cat(rows)
        state[b + "attn.out.weight"] = get(a + "o_proj.weight", D, H * d)
        if shape.qk_norm:
            state[b + "attn.q_norm.weight"], state[b + "attn.k_norm.weight"] = get(a + "q_norm.weight", d), get(a + "k_norm.weight", d)
        state[b + "mlp.gate_up.weight"] = torch.cat([get(f"{b}mlp.{x}_proj.weight", F, D) for x in ("gate", "up")])
        state[b + "mlp.down.weight"] = get(b + "mlp.down_proj.weight", D, F)
        state[b + "mlp_norm.weight"] = get(b + "post_attention_layernorm.weight", D)
        state[b + ("attn_norm.token.weight" if eagle else "attn_norm.weight")] = get(b + "input_layernorm.weight", D)
        if eagle:
            state[b + "attn_norm.state.weight"] = get(b + "hidden_norm.weight", D)
    return state


def drafter_config(folder, target: Target | None = None) -> dict:
    """config.json -> the fields that matter, checked by themselves and, if given, against the target: sizes, architecture, head (our
    name), rope_theta, and what a kind lacks filled in (rank 0, the whole vocabulary, no confidence head)."""
    path = Path(folder) / "config.json"
    try:
        c = json.loads(path.read_text())
        c = {**(c.get("dflash_config") or {}), **c}  # some trainers keep the drafter's own fields in there
        architecture = (c.get("architectures") or [None])[0]
        rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})  # the newer name holds the base as well
        c |= dict(rope_type=rope.get("rope_type", rope.get("type", "default")), layer_types=list(c.get("layer_types") or []))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no config.json: --drafter takes a checkpoint folder, a .safetensors file of train.py, or none")
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        raise ValueError(f"{path} is not the configuration of a model: fetch it again")
    if architecture not in (DSPARK, LLAMA, EAGLE):
        raise ValueError(f"{folder}: unknown architecture {architecture}: choose a {DSPARK} (DSpark, DFlash) or a {EAGLE}")

    def field(name, kind=int, default=None):
        value = c.get(name, default)
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):  # in Python a bool is an int
            raise ValueError(f"{path}: {name} is {value!r}, which cannot be: fetch it again, or export it again")
        return value

    out = {name: field(name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                                          "num_hidden_layers", "vocab_size")}
    out |= dict(architecture=architecture, head_dim=field("head_dim", default=out["hidden_size"] // max(1, out["num_attention_heads"])),
                rms_norm_eps=field("rms_norm_eps", float), rope_theta=field("rope_theta", (int, float), rope.get("rope_theta")),
                target_layer_ids=field("target_layer_ids", list), draft_vocab_size=field("draft_vocab_size", default=out["vocab_size"]),
                markov_rank=0, head="none", mask_token_id=None, enable_confidence_head=False)
    if architecture == EAGLE:
        out |= dict(head="eagle", block_size=field("ttt_length"))
    else:
        out |= dict(block_size=field("block_size"), mask_token_id=field("mask_token_id"), markov_rank=field("markov_rank"),
                    enable_confidence_head=field("enable_confidence_head", bool))
    if out["markov_rank"]:
        kind = c.get("markov_head_type")
        if kind not in HEAD_TYPES:
            raise ValueError(f"{path}: unknown head type {kind!r}: {', '.join(HEAD_TYPES)} are known; choose another checkpoint")
        out["head"] = HEAD_TYPES[kind]
    if out["enable_confidence_head"]:
        out["confidence_head_with_markov"] = field("confidence_head_with_markov", bool)
    check_drafter(path, c, out, target)
    return out


def check_drafter(path, c, out, target):
    """What would be read without an error and run wrong, since a drafter that is only bad is hard to notice; and what cannot be."""
    for name, known in ONLY.items():
        if c.get(name) not in known:
            raise ValueError(f"{path}: {name} {c[name]!r} is not supported in a drafter; choose another checkpoint")
    if any(x != "full_attention" for x in c["layer_types"]):
        raise ValueError(f"{path}: layer types {c['layer_types']} are not supported in a drafter, only full_attention; choose another")
    if out["head"] == "eagle" and out["num_hidden_layers"] != 1:
        raise ValueError(f"{path}: {out['num_hidden_layers']} Eagle layers: only one can be drafted with; choose another checkpoint")
    depth = c.get("num_target_layers")
    if target:
        t = target.config
        for name, ours in dict(hidden_size=t.d_model, vocab_size=t.vocab_size, num_target_layers=t.n_layers).items():
            if c.get(name, ours) != ours:
                raise ValueError(f"{path.parent} was made for another target: its {name} is {c[name]}, this one's {ours}; choose another")
        depth = t.n_layers
    layers, mask_id = out["target_layer_ids"], out["mask_token_id"] or 0
    known = range(-1, depth - 1) if depth else layers
    if not layers or not all(isinstance(i, int) for i in layers) or layers != sorted(set(layers) & set(known)):
        raise ValueError(f"{path}: target_layer_ids {layers} must rise, from -1 on and without the target's last layer: choose another")
    if not 0 <= mask_id < out["vocab_size"] or not 1 <= out["draft_vocab_size"] <= out["vocab_size"]:
        raise ValueError(f"{path}: mask_token_id {mask_id} or draft_vocab_size {out['draft_vocab_size']} lies outside the vocabulary: "
                         "fetch it again, or export it again")
    if min(out[x] for x in ("block_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")) < 1 or (
            out["num_attention_heads"] % out["num_key_value_heads"] or out["head_dim"] % 2 or out["markov_rank"] < 0):
        raise ValueError(f"{path}: heads, layers, block or rank that cannot be: fetch it again, or export it again")


def drafter_tensors(folder, target: Target):
    """-> get(name, *shape): one tensor in the target's dtype, on its device, read when asked for (safetensors files are mapped)."""
    folder = Path(folder)
    index, opened = folder / "model.safetensors.index.json", {}
    try:
        where = dict(json.loads(index.read_text())["weight_map"]) if index.is_file() else None  # name -> shard
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{index} is broken: fetch it again")

    def get(name, *shape):
        file = folder / ("model.safetensors" if where is None else str(where.get(name, "")))
        try:
            if file != folder and file not in opened:
                opened[file] = safe_open(file, framework="pt")
            if file == folder or name not in opened[file].keys():
                raise ValueError(f"{folder} lacks the tensor {name}: fetch it again, or export it again")
            tensor = opened[file].get_tensor(name)
        except FileNotFoundError:
            raise ValueError(f"{folder} lacks the file {file.name}: fetch the whole folder")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is broken ({' '.join(str(error).split())[:100]}): fetch it again")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{folder}: {name} has shape {tuple(tensor.shape)}, but by config.json it is {shape}: fetch both again")
        # a copy, even in the same dtype: what is mapped would go with the file, and lies where products round differently
        return tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    return get


# ----- writing ---------------------------------------------------------------------------------------------------------


def export_drafter(drafter: Drafter, folder, mask_token_id, dtype=torch.float32, num_anchors=512):
    """Write a drafter as a folder in the DeepSpec format; read again in the same dtype it is the same, bit for bit.

    mask_token_id  the id whose row of embed_tokens will hold the mask vector: one that no text has (unused_id below finds it)
    num_anchors    of training; nothing here reads it, but the format's class insists on the field
    What the format cannot say, and what is done: anchor_state and our own Eagle are refused. A layer without q/k norm (a Llama-family
    target's) is written without those tensors under the name LlamaDSparkModel: a norm cannot be the identity, so an engine must refuse
    the folder, not misread it. A reduced draft vocabulary is written as draft_vocab_size and d2t, as vLLM reads it: rows that never win
    cannot be had by weights, since the head has no bias. A drafter whose calibration was fitted keeps it in train.py's record.
    """
    c, t, folder = drafter.config, drafter.target_config, Path(folder)
    if c.anchor_state:
        raise ValueError(f"a drafter with {'head eagle' if c.head == 'eagle' else '--anchor-state'} has parts that the DeepSpec format "
                         "lacks: export one trained without")
    if t.rope_scaling:
        raise ValueError(f"this drafter's rotation is scaled as its target's ({t.rope_scaling[0]}), which is not written: it cannot be exported")
    if not 0 <= mask_token_id < t.vocab_size:
        raise ValueError(f"mask token id {mask_token_id}: must be in 0..{t.vocab_size - 1}, an id that no text has")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or remove it")
    # clones: parts of one matrix are tensors of their own there
    tensors = {name: w.detach().to("cpu", dtype if w.is_floating_point() else w.dtype).clone(memory_format=torch.contiguous_format)
               for name, w in format_tensors(drafter, mask_token_id).items()}
    config = format_config(drafter) | dict(mask_token_id=mask_token_id, num_anchors=num_anchors, torch_dtype=str(dtype).split(".")[1])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: without it the folder is no checkpoint


def format_tensors(drafter, mask_token_id) -> dict:
    """A drafter's weights under the format's names: layer_state() and the rest of load_drafter(), backwards."""
    c, t, K = drafter.config, drafter.target_config, len(drafter.draft_ids)
    H, J, d = t.n_heads, t.n_kv_heads, t.head_dim
    embed = drafter.embed.to(drafter.dtype).clone()
    embed[mask_token_id] = drafter.mask  # as an anchor that id would now look like a mask: why it must be an unused one
    tensors = {"embed_tokens.weight": embed, "lm_head.weight": drafter.head_rows, "fc.weight": drafter.context_proj.weight,
               "hidden_norm.weight": drafter.context_norm.weight, "norm.weight": drafter.norm.weight}
    for i, layer in enumerate(drafter.layers):
        a, b = f"layers.{i}.self_attn.", f"layers.{i}."
        for x, w in zip("qkv", layer.attn.qkv.weight.split([H * d, J * d, J * d])):
            tensors[f"{a}{x}_proj.weight"] = w
        tensors[a + "o_proj.weight"] = layer.attn.out.weight
        if t.qk_norm:
            tensors[a + "q_norm.weight"], tensors[a + "k_norm.weight"] = layer.attn.q_norm.weight, layer.attn.k_norm.weight
        tensors[b + "mlp.gate_proj.weight"], tensors[b + "mlp.up_proj.weight"] = layer.mlp.gate_up.weight.chunk(2)
        tensors[b + "mlp.down_proj.weight"] = layer.mlp.down.weight
        tensors[b + "input_layernorm.weight"] = layer.attn_norm.weight
        tensors[b + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
    if c.rank:
        # (V, r): ids that share a row get a copy each
        tensors["markov_head.markov_w1.weight"] = drafter.head.W1.weight[drafter.w1_row]
        tensors["markov_head.markov_w2.weight"] = drafter.head.W2.weight
    for kind, ours, theirs in (("gated", "gate", "gate_proj"), ("rnn", "joint", "joint_proj")):
        if c.head == kind:  # rows and columns are in the same order already
            tensors |= {f"markov_head.{theirs}.{x}": getattr(getattr(drafter.head, ours), x) for x in ("weight", "bias")}
    if drafter.confidence is not None:
        tensors |= {f"confidence_head.proj.{x}": getattr(drafter.confidence, x) for x in ("weight", "bias")}
    if K < t.vocab_size:
        tensors["d2t"] = drafter.draft_ids - torch.arange(K, device=drafter.draft_ids.device)
    return tensors


def format_config(drafter) -> dict:
    """config.json but for what export_drafter() is told: the drafter's own fields, then those of Qwen3 that its class reads."""
    c, t, K, confidence = drafter.config, drafter.target_config, len(drafter.draft_ids), drafter.confidence is not None
    config = dict(architectures=[DSPARK if t.qk_norm else LLAMA], model_type="qwen3" if t.qk_norm else "llama", block_size=c.gamma,
                  target_layer_ids=list(c.feature_layers), num_target_layers=t.n_layers, markov_rank=c.rank,
                  enable_confidence_head=confidence, confidence_head_with_markov=confidence and c.rank > 0)
    if c.rank:
        config["markov_head_type"] = {ours: theirs for theirs, ours in HEAD_TYPES.items()}[c.head]
    if K < t.vocab_size:
        config["draft_vocab_size"] = K
    return config | dict(
        hidden_size=t.d_model, intermediate_size=t.d_ff, num_hidden_layers=c.n_layers, num_attention_heads=t.n_heads, head_dim=t.head_dim,
        num_key_value_heads=t.n_kv_heads, vocab_size=t.vocab_size, max_position_embeddings=t.max_len, rms_norm_eps=t.norm_eps,
        rope_theta=t.rope_base, hidden_act="silu", attention_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
        use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * c.n_layers)


def limits(drafter) -> list[str]:
    """Why vLLM or SGLang would not take this drafter's folder, one line each; as read in their sources, not tried."""
    notes = []
    if not drafter.target_config.qk_norm:
        notes.append(f"no q/k norm (a Llama-family target's layers): the folder's class is {LLAMA}, which no engine knows")
    if len(drafter.draft_ids) < drafter.target_config.vocab_size:
        notes.append("a reduced draft vocabulary (d2t, draft_vocab_size): vLLM reads it, SGLang and the format's own code do not")
    if drafter.config.head in ("gated", "rnn"):
        notes.append(f"a {drafter.config.head} head: their classes have the vanilla one only")
    if drafter.config.head == "none" and drafter.confidence is not None:
        notes.append("a confidence head without a sequential one: SGLang's class refuses that")
    return notes


def unused_id(encoding, vocab_size, used):
    """An id for the mask: the first row of the embedding without a token; where every row has a name (checkpoints.py names padding
    too), the highest special token that a conversation does not use. used: ids that one does."""
    for i in range(vocab_size):
        try:
            encoding.decode_single_token_bytes(i)
        except KeyError:
            return i
    free = {encoding.encode_single_token(text) for text in encoding.special_tokens_set} - set(used)
    if not free:
        raise ValueError("every id of this vocabulary is used: name one that your texts lack with --mask-token-id")
    return max(free)


if __name__ == "__main__":
    try:
        print(json.dumps(drafter_config(*sys.argv[1:2]), indent=1))
    except (ValueError, TypeError) as error:  # no folder, or not one of these
        sys.exit(f"deepspec.py DIR: {error}")

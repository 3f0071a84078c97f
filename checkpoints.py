"""Other targets: Llama and Qwen3 folders as Hugging Face's libraries write them. (Other drafters: deepspec.py.)

What     Any Llama or Qwen3 (dense) instruct model in place of SmolLM2: `--target DIR`, or a name on the hub where huggingface_hub is
         installed. load_target() serves every --target; None and GGUF files are smollm2.py's.
Reads    config.json, *.safetensors (one file, or shards with model.safetensors.index.json), generation_config.json (the ids that end
         an answer), tokenizer.json, or vocab.json and merges.txt, tokenizer_config.json and chat_template.jinja.
Out      (target.Target, Tokenizer). A Tokenizer is a tiktoken.Encoding that also knows its model's chat template.
Memory   The model is made without storage, then every tensor goes straight from its (memory-mapped) file to its rows of ours, in the
         wanted dtype and on the device: never two copies. What it all takes is computed from config.json, and printed, before.
         Qwen3-4B, say: 4.02e9 weights are 8.0 GB in bf16, a request of 2048 tokens 0.3 GB; a drafter of a tenth of that fits beside
         it in 16 GB.
Errors   SetupError: one line that says what is missing or not supported, and what to do.
Alone    python checkpoints.py DIR [DTYPE]    (its configuration, its memory, a tokenized chat; reads no weights)
"""
import json
import re
import sys
import unicodedata
from datetime import datetime
from pathlib import Path

import tiktoken
import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open

import smollm2
from smollm2 import SetupError
from target import Target, TargetConfig, pack

ARCHITECTURES = {"LlamaForCausalLM": False, "Qwen3ForCausalLM": True}  # name -> q and k are normed per head
# what target.py computes has one form of each of these; a folder that asks for another is refused, not half understood
ONLY = dict(hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False, partial_rotary_factor=1.0,
            quantization_config=None)
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Qwen2 and 3: contractions in either case, one digit at a time, line ends apart from other white space
QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def load_target(name=None, dtype=torch.float32, device="cpu", max_len=2048, drafter=None):
    """Whatever --target names -> (Target, tokenizer). drafter: the file that will be loaded beside it, to count its memory too."""
    if name is None or Path(name).is_file() or str(name).endswith(".gguf"):
        return smollm2.load(name, dtype, device=device, max_len=max_len)
    folder = find_folder(str(name))
    # cheapest first: whatever is wrong with the folder is said before minutes of reading
    config = read_config(folder, max_len)
    tokenizer = read_tokenizer(folder, config.vocab_size)
    files = find_tensors(folder, config)
    packed = check_memory(Path(name).resolve().name, config, dtype, device, drafter)
    model = read_weights(files, config, dtype, device)
    if packed:
        pack(model)
    return model, tokenizer


def find_folder(name: str) -> Path:
    """The folder itself, or what the hub has under that name, in huggingface_hub's own cache."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise SetupError(f"no file or folder at {name}: give a GGUF file, a folder with config.json, or a hub name (owner/model)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SetupError(f"no folder {name} here; to fetch it from the hub: pip install huggingface_hub, or download it and give "
                         "its folder")
    try:
        # only what is read here: many repositories hold the weights twice, in another format too
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # no network, no such model, no leave to read it
        raise SetupError(f"the hub did not give {name} ({one_line(error)}): check the name and the network, or give a folder")


def one_line(error) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_json(path: Path, default=None) -> dict:
    """A JSON object. Without the file: the default, if there is one."""
    if default is not None and not path.is_file():
        return default
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content
    except FileNotFoundError:
        raise SetupError(f"{path.parent} has no {path.name}: give a folder that Hugging Face's save_pretrained wrote")
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} is broken ({one_line(error)}): download it again")


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def read_config(folder: Path, max_len: int) -> TargetConfig:
    """config.json -> TargetConfig; max_len is cut to what the model was trained for."""
    path = folder / "config.json"
    config = read_json(path)
    try:
        architecture = (config.get("architectures") or ["none"])[0]
        if architecture not in ARCHITECTURES:
            raise SetupError(f"{path}: architecture {architecture} is not supported, only {' and '.join(ARCHITECTURES)}")
        qk_norm = ARCHITECTURES[architecture]
        # transformers 5 keeps all of RoPE in one place, rope_parameters; before, rope_theta stood apart from rope_scaling
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        for key, value in ONLY.items():
            found = rope.get(key, config.get(key))
            if found is not None and found != value:
                raise SetupError(f"{path}: {key} {str(found)[:60]} is not supported, only {value}")
        if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            raise SetupError(f"{path}: layer_types other than full_attention are not supported")
        # save_pretrained writes all sizes; the exceptions, by hand-written files, are the keys with a default below
        H, D = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or (128 if qk_norm else D // H)  # where the key is missing, each class has its own default
        c = TargetConfig(
            vocab_size=config["vocab_size"], n_layers=config["num_hidden_layers"], d_model=D, n_heads=H,
            n_kv_heads=config.get("num_key_value_heads") or H, head_dim=head_dim, d_ff=config["intermediate_size"],
            rope_base=float(rope.get("rope_theta", config.get("rope_theta", 1e4))), norm_eps=float(config["rms_norm_eps"]),
            max_len=min(max_len, config["max_position_embeddings"]), tied=bool(config.get("tie_word_embeddings")), qk_norm=qk_norm,
            rope_scaling=read_scaling(path, rope), eos=read_ends(folder, config))
        # json knows no schema: a size may be text, or missing by being null
        sizes = (c.vocab_size, c.n_layers, D, H, c.n_kv_heads, head_dim, c.d_ff, c.max_len)
        if not all(isinstance(n, int) and n > 0 for n in sizes) or H % c.n_kv_heads or head_dim % 2:
            raise ValueError("sizes that fit no model")
        return c
    except KeyError as error:
        raise SetupError(f"{path} lacks {error}: download it again")
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise SetupError(f"{path} is broken ({one_line(error)}): download it again")


def read_scaling(path, rope: dict) -> tuple:
    """RoPE's settings -> TargetConfig.rope_scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and not any(isinstance(value, dict) for value in rope.values()):  # nested: one RoPE per kind of layer
        return ()
    if kind == "linear":
        return kind, float(rope["factor"])
    if kind == "llama3":
        return kind, *(float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    raise SetupError(f"{path}: rope type {kind} is not supported, only default, linear and llama3")


def read_ends(folder: Path, config: dict) -> tuple[int, ...]:
    """The ids that end an answer: an instruct model often has several (end of turn, end of text)."""
    ends = read_json(folder / "generation_config.json", {}).get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    ends = ends if isinstance(ends, list) else [ends]
    if not ends or not all(isinstance(i, int) for i in ends):
        raise SetupError(f"{folder} names no ids that end an answer: add eos_token_id to its generation_config.json")
    return tuple(ends)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def layout(c: TargetConfig) -> dict[str, tuple[str, slice]]:
    """Hugging Face's name of every tensor -> (our parameter, its rows of it). Theirs keep q, k, v and gate, up apart; we stack them.
    Their q and k are for half-split RoPE, as ours, so no row changes its place within a head (GGUF's do)."""
    every, q, kv = slice(None), c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    places = {"model.embed_tokens.weight": ("embed.weight", every), "model.norm.weight": ("norm.weight", every)}
    if not c.tied:
        places["lm_head.weight"] = ("head.weight", every)
    for i in range(c.n_layers):
        parts = {
            "input_layernorm": ("attn_norm", every), "post_attention_layernorm": ("mlp_norm", every),
            "self_attn.q_proj": ("attn.qkv", slice(0, q)), "self_attn.k_proj": ("attn.qkv", slice(q, q + kv)),
            "self_attn.v_proj": ("attn.qkv", slice(q + kv, q + 2 * kv)), "self_attn.o_proj": ("attn.out", every),
            "mlp.gate_proj": ("mlp.gate_up", slice(0, c.d_ff)), "mlp.up_proj": ("mlp.gate_up", slice(c.d_ff, 2 * c.d_ff)),
            "mlp.down_proj": ("mlp.down", every)}
        if c.qk_norm:
            parts |= {"self_attn.q_norm": ("attn.q_norm", every), "self_attn.k_norm": ("attn.k_norm", every)}
        places |= {f"model.layers.{i}.{name}.weight": (f"layers.{i}.{ours}.weight", rows) for name, (ours, rows) in parts.items()}
    return places


def empty_target(c: TargetConfig) -> Target:
    """Shapes without storage."""
    with torch.device("meta"):
        return Target(c)


def find_tensors(folder: Path, c: TargetConfig) -> dict[Path, list[str]]:
    """File -> the tensors to take from it. Reads headers only: what is missing or of a wrong shape is refused before any weight is
    read."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")  # tensor -> file; only the files count, their own headers are the truth
        if not isinstance(names, dict) or not names:
            raise SetupError(f"{index} is broken (no weight_map): download it again")
        paths = [folder / str(name) for name in sorted(set(map(str, names.values())))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        other = " (its .bin files are not read: they can run code)" if list(folder.glob("*.bin")) else ""
        raise SetupError(f"{folder} holds no weights in *.safetensors{other}: download them, or save the model with save_pretrained")
    places, shapes = layout(c), {name: p.shape for name, p in empty_target(c).named_parameters()}
    files, missing = {}, set(places)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as f:
                found = {name: torch.Size(f.get_slice(name).get_shape()) for name in f.keys()}
        except FileNotFoundError:
            raise SetupError(f"{folder} lacks {path.name}, one of {len(paths)} files of its weights: download it")
        except (SafetensorError, OSError) as error:
            raise SetupError(f"{path} is no whole safetensors file ({one_line(error)}): download it again")
        files[path] = []
        for name, shape in found.items():
            if name.endswith("rotary_emb.inv_freq") or (c.tied and name == "lm_head.weight"):
                continue  # computed from the configuration; a second copy of the embedding
            if name not in places:
                raise SetupError(f"{path} holds {name}, which this architecture has no place for: is config.json that of another model?")
            ours, rows = places[name]
            wanted = torch.Size([len(range(*rows.indices(shapes[ours][0]))), *shapes[ours][1:]])
            if shape != wanted:
                raise SetupError(f"{path}: {name} is {list(shape)}, but by config.json it should be {list(wanted)}: they do not "
                                 "belong together")
            files[path].append(name)
            missing.discard(name)
    if missing:
        raise SetupError(f"{folder} lacks {len(missing)} of {len(places)} tensors, {min(missing)} among them: download its weights again")
    return files


def read_weights(files, c: TargetConfig, dtype, device) -> Target:
    """Every tensor goes from its file to its rows of our parameter; the file is mapped, not read, so this is the only copy."""
    model, places = empty_target(c), layout(c)
    state = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in model.named_parameters()}  # a tied head counts once
    for path, names in files.items():
        with safe_open(path, framework="pt") as f:
            for name in names:
                ours, rows = places[name]
                state[ours][rows].copy_(f.get_tensor(name))
    if c.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    if c.tied:
        model.head.weight = model.embed.weight  # one parameter, not two of one storage: a cast would part them
    model.set_rope()  # buffers were born without storage too
    return model.to(device).eval().requires_grad_(False)


def memory(c: TargetConfig, dtype) -> dict[str, int]:
    """Bytes of the weights, of one request's cache, and of the reordered copy that pack() makes on a CPU in bf16."""
    model = empty_target(c)
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return dict(weights=sum(p.numel() for p in model.parameters()) * dtype.itemsize,
                cache=2 * c.n_layers * c.max_len * c.n_kv_heads * c.head_dim * dtype.itemsize, packed=linear * dtype.itemsize)


def free_memory(device) -> float:
    """Bytes that can be had on the device."""
    if str(device) == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    except (OSError, TypeError):  # another system: it will say so itself
        return float("inf")


def check_memory(name, c: TargetConfig, dtype, device, drafter=None) -> bool:
    """Print what target and drafter will take, or refuse -> whether there is room to pack() as well."""
    # activations are left out: a few rows of a few thousand numbers. So is training, which needs several times as much
    need, free = memory(c, dtype), free_memory(device)
    beside = drafter_weights(drafter) * dtype.itemsize
    total = need["weights"] + need["cache"] + beside
    text = (f"{name} in {str(dtype).removeprefix('torch.')}: weights {need['weights'] / 1e9:.2f} GB, drafter {beside / 1e9:.2f} GB, "
            f"a request of {c.max_len} tokens {need['cache'] / 1e9:.2f} GB; together {total / 1e9:.2f} GB")
    if total > free:
        smaller = "--dtype bf16, " if dtype.itemsize > 2 else ""
        raise SetupError(f"{text}, but {device} has {free / 1e9:.2f} GB free: use {smaller}a smaller model or another --device")
    # pack() trades memory for speed; a model that only fits once runs, slower
    packed = str(device) == "cpu" and dtype == torch.bfloat16 and total + need["packed"] <= free
    if packed:
        text += f" and {need['packed'] / 1e9:.2f} GB for weights reordered for this processor"
    print(f"{text}; {free / 1e9:.2f} GB free", file=sys.stderr)
    return packed


def drafter_weights(path) -> int:
    """How many numbers a drafter's file or folder holds; 0 where there is none (who loads it will say so)."""
    if path is None:
        return 0
    paths, n = sorted(Path(path).glob("*.safetensors")) if Path(path).is_dir() else [path], 0
    try:
        for p in paths:
            with safe_open(p, framework="pt") as f:
                n += sum(torch.Size(f.get_slice(name).get_shape()).numel() for name in f.keys())
        return n
    except (SafetensorError, OSError):
        return 0


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and chat template


class Tokenizer(tiktoken.Encoding):
    """tiktoken's Encoding, and what else belongs to a model's tokenizer: how text is normalised, how a chat is written."""

    def __init__(self, ranks, special, split, nfc):
        super().__init__("checkpoint", pat_str=split, mergeable_ranks=ranks, special_tokens=special)
        self.nfc, self.before, self.after, self.strip = nfc, None, None, False  # the last three: read_chat()

    def encode_ordinary(self, text):
        return super().encode_ordinary(unicodedata.normalize("NFC", text) if self.nfc else text)

    def chat(self, prompt: str) -> list[int]:
        """The template's text around the user's. Special tokens are recognised in the template alone: a prompt cannot forge one. Text
        merges across the seam, as if it had been written in one piece."""
        prompt = prompt.strip() if self.strip else prompt
        ids = []
        for k, piece in enumerate([*self.before[:-1], self.before[-1] + prompt + self.after[0], *self.after[1:]]):
            ids += [self.encode_single_token(piece)] if k % 2 else smollm2.encode(self, piece)
        return ids


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """tokenizer.json, or vocab.json and merges.txt, as a byte-level BPE for tiktoken. SetupError for tokenizers of other kinds."""
    settings = read_json(folder / "tokenizer_config.json", {})
    whole = folder / "tokenizer.json"
    try:
        if whole.is_file():
            vocab, merges, added, split, nfc = read_tokenizer_json(read_json(whole))
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            vocab, merges, added, split, nfc = read_vocab_and_merges(folder, settings)
        else:
            raise SetupError(f"{folder} has no tokenizer: download tokenizer.json, or vocab.json and merges.txt")
        tokenizer = to_tiktoken(vocab, merges, added, split, nfc, vocab_size)
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise SetupError(f"the tokenizer of {folder} is not one that can be read here ({one_line(error)}): use a model with byte-level BPE")
    read_chat(folder, settings, tokenizer)
    return tokenizer


def read_tokenizer_json(content: dict):
    """-> vocabulary {token: id}, merges [(left, right)], added tokens {text: id}, split pattern, whether text is brought to NFC."""
    model, normalizer = content["model"], content.get("normalizer") or {"type": "none"}
    # byte fallback marks SentencePiece (Llama 2), prefixes and suffixes mark older kinds of BPE, which know words
    strange = any(model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type", "BPE") != "BPE" or strange:
        raise ValueError("its model is not byte-level BPE")
    if normalizer["type"] not in ("none", "NFC"):
        raise ValueError(f"normalizer {normalizer['type']}")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    added = {t["content"]: t["id"] for t in content.get("added_tokens", [])}
    if model.get("ignore_merges") and {t for t in model["vocab"] if len(t) > 1} - set(added) - {a + b for a, b in merges}:
        raise ValueError("tokens that no merge makes")  # Llama-3's flag: such a token stands for a piece of text that equals it
    return model["vocab"], merges, added, split_pattern(content.get("pre_tokenizer") or {}), normalizer["type"] == "NFC"


def split_pattern(pre: dict) -> str:
    """The pre-tokenizer as one pattern for tiktoken. Three kinds are in use; all end in the byte alphabet."""
    steps = pre.get("pretokenizers", [pre])
    *first, last = steps
    kinds = [step.get("type") for step in steps]
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return GPT2_SPLIT
        if kinds == ["Digits", "ByteLevel"] and first[0].get("individual_digits") and last.get("use_regex", True):
            return smollm2.SPLIT
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):  # Qwen, Llama 3: the file holds the pattern itself
            if first[0]["behavior"] == "Isolated" and not first[0].get("invert"):  # matches are pieces, nothing is thrown away
                return first[0]["pattern"]["Regex"]
    raise ValueError(f"pre-tokenizer {' + '.join(map(str, kinds))}, or its settings")


def read_vocab_and_merges(folder: Path, settings: dict):
    """The older form says neither how text is split nor how it is normalised: the class of the tokenizer does."""
    kind = settings.get("tokenizer_class", "none").removesuffix("Fast")
    if kind not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        raise ValueError(f"tokenizer class {kind} without a tokenizer.json")
    # one merge a line. Not splitlines(): a merge may hold characters that Unicode counts as line ends
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    added = {t["content"]: int(i) for i, t in settings.get("added_tokens_decoder", {}).items()}
    added |= read_json(folder / "added_tokens.json", {})
    qwen = kind == "Qwen2Tokenizer"
    return read_json(folder / "vocab.json"), merges, added, QWEN_SPLIT if qwen else GPT2_SPLIT, qwen


def to_tiktoken(vocab, merges, added, split, nfc, vocab_size) -> Tokenizer:
    """tiktoken merges whichever neighbours make the token of the lowest id. That is BPE by a list of merges exactly if ids rise
    along that list, and if no other token can come about."""
    alphabet = smollm2.byte_alphabet()
    # Llama 3's list holds every split of a token, one after the other: ids may also stay
    made = [vocab[left + right] for left, right in merges]
    if any(a > b for a, b in zip(made, made[1:])):
        raise ValueError("ids are not in the order of the merges")
    made = set(made)
    ranks, special = {}, dict(added)
    for token, i in vocab.items():
        if token in added:  # SmolLM2 keeps its added tokens in the vocabulary as well
            continue
        if i in made or len(token) == 1:
            ranks[bytes(alphabet[c] for c in token)] = i
        else:
            special[f"<|unreachable {token}|>"] = i  # never encoded: no merge leads there
    if max([*ranks.values(), *special.values()]) >= vocab_size:
        raise ValueError(f"it has ids beyond config.json's vocab_size {vocab_size}")
    known = {*ranks.values(), *special.values()}
    if len(known) < len(ranks) + len(special):  # tiktoken would end the program
        raise ValueError("two of its tokens share an id")
    # embeddings are often padded to a round number of rows; a model may, though it should not, say one of those
    special |= {f"<|unused {i}|>": i for i in range(vocab_size) if i not in known}
    return Tokenizer(smollm2.with_all_bytes(ranks), special, split, nfc)


MARK = "\ue000"  # for private use: no template contains it


def read_chat(folder: Path, settings: dict, tokenizer: Tokenizer):
    """Run the template once, on a marked prompt, and keep what it writes before and after: any template that copies the user's
    message serves, whichever its format."""
    path = folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise SetupError(f"{folder} has no chat template: use an instruct model, or add chat_template.jinja")
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # a downloaded template is somebody else's program
    except ImportError:
        raise SetupError("reading a chat template needs jinja2: pip install jinja2")

    def refuse(message):
        raise ValueError(message)

    # as transformers runs it
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    jinja.globals |= dict(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    # bos_token and its kin, as text or as a record; null is as good as absent, and must not be written as "None"
    tokens = {key: value["content"] if isinstance(value, dict) else value for key, value in settings.items()
              if key.endswith("_token") and value is not None}
    try:
        # the tabs tell whether the template strips the message
        text = jinja.from_string(template).render(messages=[dict(role="user", content=f"\t{MARK}\t")], add_generation_prompt=True,
                                                  tools=None, documents=None, **tokens)
        before, after = text.split(MARK)
    except Exception as error:  # a template can fail in any way a program can
        raise SetupError(f"the chat template of {folder} does not work for one user message ({one_line(error)}): use another model")
    # Llama 3's template strips, ChatML's does not
    tokenizer.strip = not (before.endswith("\t") and after.startswith("\t"))
    # the longest first: of two that begin alike, the whole one is meant
    special = "|".join(map(re.escape, sorted(tokenizer.special_tokens_set, key=len, reverse=True)))
    # text, special, text, .., special, text
    tokenizer.before, tokenizer.after = (re.split(f"({special})", part) for part in (before.removesuffix("\t"), after.removeprefix("\t")))


if __name__ == "__main__":
    try:
        folder = find_folder(sys.argv[1])
        config, dtype = read_config(folder, 2048), getattr(torch, (sys.argv[2:] or ["bfloat16"])[0])
        tokenizer = read_tokenizer(folder, config.vocab_size)
        print(config, *(f"{k} {v / 1e9:.2f} GB" for k, v in memory(config, dtype).items()), sep="\n")
        print(*(f"{i}:{tokenizer.decode([i])!r}" for i in tokenizer.chat("Why is the sky blue?")))
    except SetupError as error:
        sys.exit(str(error))
    except (IndexError, AttributeError):
        sys.exit("python checkpoints.py DIR [float32 or bfloat16]")

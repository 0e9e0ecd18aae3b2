"""critkl: reinforcement learning of a small language model on critical tokens, in one file.

    python critkl.py --mode critical      pretrain (cached), then PPO with the prioritized KL penalty
    python critkl.py --mode standard      the same with the usual KL penalty; --mode none: without one
    python critkl.py --mode dppo          the ratio clip replaced by a mask on the divergence
    python critkl.py --mode evaluate      tables of the pretrained model (or of --checkpoint FOLDER)
    python critkl.py --help               every setting; --mode inspect and bench

Two papers, cited below by letter and equation:
  [V] Vassoyan et al., Ignore the KL Penalty! Boosting Exploration on Critical Tokens ..., arXiv 2502.06533.
  [Q] Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879.

A language model that adds on a scratchpad is trained for numbers of up to N digits, then by RL on
N+1 digits. Notation: B episodes, T positions, V tokens; mu is the rollout policy, pi the policy being
trained, ref the frozen pretrained policy. A position t holds the state ids[:, :t+1] and the action
ids[:, t+1], so that all (B, T) tensors of a batch with T+1 tokens line up.

Departures from the papers (D) and from their authors' released code (C); the README explains each.
  D1  The model: rotary positions on half of the channels, layer norm without parameters, no biases but the head's.
  D2  Preset laptop: N = 3, and a share `dial` of the pretraining problems is drawn like RL's (others: none).
  D3  Pretraining uses Muon for the hidden matrices and AdamW for the rest.
  D4  PPO, whitened advantages, a falling learning rate; A2C is the case of one epoch with one minibatch (tested).
  D5  GAE with lambda = 1: the only reward comes at the end, some 250 tokens late.
  D6  Training and evaluation problems are split by a hash of the problem, so they never overlap.
  D7  Log-ratios are cut to [-20, 20] before exp in the ratio, and at 20 in k3.
  D8  The value loss trains the value head alone, so it does not move the policy; its coefficient is 1.
  D9  [V] table 1 is taken on the true answers, and of the other tokens gives the mean (paper: the minimum).
  D10 [Q] GAE, whitened advantages unless asked: --advantage group; the mean over a minibatch's tokens (Eq. 12: sums).
  D11 The KL penalty is estimated from mu's samples without weights, also where pi has moved away from mu.
  C1  [V] certainty is the text's negentropy; released: --certainty max_prob --certainty-temperature 4.
  C2  [V] policy and sampler use temperature 1; the released code divides logits by 2: --temperature 2.
  C3  [V] the KL term is added to the loss (the released PPO class subtracts it).
  C4  [Q] no constant inside logarithms, no cap (released: 10), the top K and the sampled token (released: K in all).
"""
import argparse
import copy
import itertools
import json
import math
import os
import platform
import random
import re
import signal
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

VERSION = "1.2"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""

# ---- Configuration: one dataclass; every field is a flag, --help is made from it.
PRESETS = {
    "laptop": dict(),
    "laptop7": dict(digits=7, dial=0.0, pretrain_steps=12000, window=8),
    # the size and from iterations on the RL of [V] tables 2 and 3, section 5.3: GPT-2 small without its embeddings, A2C
    "paper": dict(digits=7, dial=0.0, layers=12, width=768, heads=12, pretrain_steps=20000, pretrain_batch=64,
                  pretrain_lr=2e-3, iterations=1000, episodes=50, epochs=1, minibatch=50, lr=1e-6,
                  entropy_coef=5e-4, value_coef=0.1, kl_coef=5.0, method="pg_is")}
MODES = {"pretrain": dict(penalty="none", iterations=0), "none": dict(penalty="none"),
         "standard": dict(penalty="standard"), "critical": dict(penalty="critical"),
         "dppo": dict(penalty="none", method="dppo")}
DIVERGENCES = ("binary_tv", "binary_kl", "topk_tv", "topk_kl", "tv", "kl")
# The methods that [Q] compares, each a row: mask, its bounds, cap C and anchor of Eq. 23.
METHODS = {
    "ppo": dict(trust_region="clip"),
    "pg_is": dict(trust_region="none"),
    "cispo": dict(trust_region="none", ratio_cap=3.0),
    "grpo_clip_higher": dict(trust_region="clip", eps_high=0.28),
    "minirl": dict(trust_region="clip", eps_high=0.28, anchor="recomputed"),
    "minirl_tis": dict(trust_region="clip", eps_high=0.28, anchor="recomputed", ratio_cap=3.0),
    "dppo": dict(trust_region="divergence"),
    "negative_only": dict(trust_region="negative", delta=0.5)}

def option(default, text, low=-math.inf, high=math.inf, choices=None):
    """A Config field with its help text and what it allows: choices, or low <= value <= high."""
    return field(default=default, metadata=dict(help=text, low=low, high=high, choices=choices))

@dataclass
class Config:
    mode: str = option("critical", "what to do", choices=(*MODES, "evaluate", "inspect", "bench"))
    preset: str = option("laptop", "a set of defaults", choices=(*PRESETS,))
    digits: int = option(3, "N: pretraining covers numbers of 1 to N digits", 1, 30)
    extra: int = option(1, "k: RL problems have an operand of N+k digits", 1, 3)
    dial: float = option(0.04, "share of pretraining problems drawn like those of RL (0: strictly none)", 0, 1)
    layers: int = option(3, "transformer blocks", 1, 96)
    width: int = option(64, "width of the residual stream", 4, 16384)
    heads: int = option(4, "attention heads", 1, 128)
    window: int = option(0, "the first block sees this many tokens and it alone has positions (0: all see all)", 0)
    pretrain_steps: int = option(1600, "optimizer steps of pretraining", 1)
    pretrain_batch: int = option(16, "problems per pretraining step", 1)
    pretrain_lr: float = option(0.012, "learning rate of pretraining (falls linearly to 5%%)", 0, 1)
    pretrain_weight_decay: float = option(0.1, "weight decay of the hidden matrices", 0, 1)
    iterations: int = option(80, "RL iterations: one batch of rollouts each", 0)
    episodes: int = option(64, "rollouts per iteration", 1)
    epochs: int = option(2, "passes over each batch of rollouts", 1, 100)
    minibatch: int = option(16, "episodes per optimizer step", 1)
    lr: float = option(3e-4, "learning rate of RL (falls linearly to 0)", 0, 1)
    gamma: float = option(1.0, "discount", 0, 1)
    lam: float = option(1.0, "lambda of GAE", 0, 1)
    value_coef: float = option(1.0, "coefficient of the value loss", 0, 1e6)
    entropy_coef: float = option(0.0, "coefficient of the entropy bonus", 0, 1e6)
    max_grad_norm: float = option(1.0, "gradient clipping (0: none)", 0)
    temperature: float = option(1.0, "policies are softmax(logits / temperature)", 0.01, 100)
    # KL penalty, [V] section 4
    penalty: str = option("critical", "KL penalty (set by --mode)", choices=("none", "standard", "critical"))
    kl_coef: float = option(2.0, "alpha: coefficient of the KL penalty", 0, 1e6)
    kl_kind: str = option("k2", "KL estimator", choices=("k1", "k2", "k3", "exact"))
    beta: float = option(150.0, "exponent of the certainty in the critical penalty", 0, 1e9)
    certainty: str = option("negentropy", "certainty of the reference", choices=("negentropy", "max_prob"))
    certainty_temperature: float = option(0.0, "temperature it is computed at (0: that of the policies)", 0, 100)
    # trust region, [Q] section 4
    method: str = option("ppo", "sets the trust region, its bounds, cap and anchor", choices=(*METHODS,))
    trust_region: str = option("clip", "trust region", choices=("clip", "divergence", "negative", "none"))
    eps_low: float = option(0.2, "clip: ratios below 1 - eps_low", 0, 1)
    eps_high: float = option(0.2, "clip: ratios above 1 + eps_high", 0)
    divergence: str = option("binary_tv", "divergence of the mask", choices=DIVERGENCES)
    delta: float = option(0.15, "threshold of the masks divergence (in [Q] 0.15 for TV, 0.05 for KL) and negative", 0)
    top_k: int = option(20, "K of the top-K divergences", 1)
    ratio_cap: float = option(math.inf, "C: cap of the importance weight", 0)
    anchor: str = option("rollout", "compare pi with mu or itself before the update", choices=("rollout", "recomputed"))
    relax: str = option("none", "ends of the clip lifted for unlikely tokens", choices=("none", "high", "low", "both"))
    relax_below: float = option(0.1, "which tokens these are: mu below this", 0, 1)
    advantage: str = option("gae", "value head, or reward less the mean of its group", choices=("gae", "group"))
    group: int = option(8, "answers per problem with group advantages", 2)
    sampler_dtype: str = option("float32", "weights of the sampler", choices=("float32", "bfloat16"))
    staleness: int = option(1, "iterations for which the sampler keeps its weights, so that rollouts grow stale", 1)
    fixed: int = option(0, "RL on this many fixed problems, solved sometimes before (0: new ones each time)", 0)
    seed: int = option(0, "seed of everything random", 0, 2**31)
    device: str = option("auto", "where to run", choices=("auto", "cpu", "cuda"))
    threads: int = option(1, "CPU threads (0: as the machine has); another number rounds otherwise", 0, 1024)
    out: str = option("runs", "folder that holds all runs")
    name: str = option("", "name of the run folder (default: made from the settings)")
    eval_every: int = option(10, "iterations between two evaluations", 1)
    eval_problems: int = option(200, "problems per evaluation set while training", 1)
    test_problems: int = option(1000, "problems per evaluation set at the end", 1)
    problem: str = option("", "inspect: the problem, for example 2033+5179")
    checkpoint: str = option("", "evaluate, inspect: a run folder whose policy is used")
    json: bool = option(False, "bench: print JSON")

def make_config(given):
    """Config from the settings `given`; defaults < preset < mode < method < given. Raises UserError."""
    values = {f.name: f.default for f in fields(Config)}
    for name, table in dict(preset=PRESETS, mode=MODES, method=METHODS).items():
        values |= table.get(given.get(name, values[name]), {})
    values |= given
    for f in fields(Config):
        flag, value, meta = "--" + f.name.replace("_", "-"), values[f.name], f.metadata
        if meta["choices"] and value not in meta["choices"]:
            raise UserError(f"{flag} {value}: allowed are {', '.join(meta['choices'])}")
        if f.type is not str and not meta["low"] <= value <= meta["high"]:  # also false for nan
            raise UserError(f"{flag} {value}: allowed is {meta['low']} to {meta['high']}")
    cfg = Config(**values)
    for wrong, flag, allowed in (
            (cfg.width % (4 * cfg.heads), "width", f"a multiple of four times --heads {cfg.heads}"),
            (cfg.checkpoint and cfg.mode not in ("evaluate", "inspect"), "checkpoint", "none but to evaluate, inspect"),
            (not re.fullmatch(r"([\w+=-][\w.+=-]*)?", cfg.name), "name", "letters, digits and _ + = - ., no . first"),
            (cfg.mode == "pretrain" and cfg.iterations, "iterations", "0 with mode pretrain"),
            (cfg.episodes % cfg.minibatch, "minibatch", f"a divisor of --episodes {cfg.episodes}"),
            (cfg.advantage == "group" and cfg.episodes % cfg.group, "group", f"a divisor of --episodes {cfg.episodes}"),
            (cfg.relax != "none" and cfg.trust_region != "clip", "relax", f"none, {cfg.trust_region} is no clip")):
        if wrong:
            raise UserError(f"--{flag} {getattr(cfg, flag)}: allowed is {allowed}")
    return cfg

def stream(*key):
    """A generator of its own for each (seed, purpose, iteration): nothing random has to be saved."""
    return random.Random("/".join(map(str, key)))

# ---- Several processes, started by torchrun: each takes its rows of the same batch, what all need is gathered,
# gradients are summed. WORLD = 1 is the same code.
def my_share(rows):
    """The consecutive rows of a batch, a tensor or list, that this process computes."""
    return rows[RANK * len(rows) // WORLD:(RANK + 1) * len(rows) // WORLD]

def all_ranks(value):
    """The list of every process's value, in rank order; also a barrier."""
    values = [value] * WORLD
    if WORLD > 1:
        torch.distributed.all_gather_object(values, value)
    return values

def sum_gradients(model):
    if WORLD > 1:                                                    # as one vector: one exchange
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = nn.utils.parameters_to_vector(gradients)
        torch.distributed.all_reduce(total)
        nn.utils.vector_to_parameters(total, gradients)

# ---- Tokens: one character, one token. PAD fills the right end of a batch.
PAD = "_"
VOCABULARY = PAD + "\n +,-/0123456789:<=>ACDEINT[]aceghnprstu"
TOKEN_ID = {character: i for i, character in enumerate(VOCABULARY)}
NEWLINE, SLASH = TOKEN_ID["\n"], TOKEN_ID["/"]
IS_DIGIT = torch.tensor([character.isdigit() for character in VOCABULARY])

def encode(text):
    """Text to a list of token ids. Raises UserError on a character outside the vocabulary."""
    try:
        return [TOKEN_ID[character] for character in text]
    except KeyError as error:
        raise UserError(f"unknown character {error.args[0]!r}; the vocabulary is {VOCABULARY[1:]!r}") from None

def decode(ids):
    """Token ids (list or 1-D tensor) to text."""
    return "".join(VOCABULARY[i] for i in torch.as_tensor(ids).tolist())

# ---- Environment: addition on a scratchpad, [V] section 3.1. State: the text so far. Action: a character.
# Reward: 0, and 1 at the end for a right result.
def prompt(a, b):
    """The text the model is given: "Input:\\n128+367\\nTarget:"."""
    return f"Input:\n{a}+{b}\nTarget:"

def scratchpad(a, b):
    """The response it should give, from the newline after the prompt to the newline after the result.
    For 128+367 (a carry out of the first digit shows in the result alone; END has no comma before C):
        <scratch>
        [1,2,8] + [3,6,7] , A=[] , C=0 , 8+7+0=15 , A->5 , C->1
        [1,2] + [3,6] , A=[5] , C=1 , 2+6+1=9 , A->9 , C->0
        [1] + [3] , A=[9,5] , C=0 , 1+3+0=4 , A->4 , C->0
        [] + [] , A=[4,9,5] C=0 , END
        </scratch>
        4 9 5"""
    x, y, result, carry, lines = str(a), str(b), "", 0, []
    show = lambda digits: "[" + ",".join(digits) + "]"
    while x or y:
        i, j = int(x[-1:] or 0), int(y[-1:] or 0)
        total = i + j + carry
        lines.append(f"{show(x)} + {show(y)} , A={show(result)} , C={carry} , "
                     f"{i}+{j}+{carry}={total} , A->{total % 10} , C->{total // 10}")
        x, y, result, carry = x[:-1], y[:-1], str(total % 10) + result, total // 10
    lines.append(f"[] + [] , A={show(result)} C={carry} , END")
    return "\n<scratch>\n" + "\n".join(lines) + "\n</scratch>\n" + " ".join(str(a + b)) + "\n"

def is_correct(a, b, response):
    """The reward: is the line after "</scratch>" the spaced digits of a+b? False on any other text."""
    answer, newline, _ = response.partition("</scratch>\n")[2].partition("\n")
    return newline == "\n" and answer == " ".join(str(a + b))

def parse_problem(text):
    """ "2033+5179" to (2033, 5179). Raises UserError."""
    if not re.fullmatch(r"(0|[1-9][0-9]{0,29})\+(0|[1-9][0-9]{0,29})", text):
        raise UserError(f"--problem {text}: must be two numbers without leading zeros, like 2033+5179")
    return tuple(map(int, text.split("+")))

def held_out(a, b):
    """One problem in ten is kept for evaluation, so that no training problem is ever tested on (D6)."""
    return zlib.crc32(f"{a}+{b}".encode()) % 10 == 0

def draw(rng, lengths, test=False):
    """One problem (a, b), its operands of the given lengths in any order, from the training or the test part."""
    rng.shuffle(lengths)
    while True:
        a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10 ** n) for n in lengths)
        if held_out(a, b) == test:
            return a, b

def rl_problem(rng, cfg):
    """One operand has N+k digits, the other half of the time 1 to N, else N+1 to N+k ([V] code)."""
    n = cfg.digits + cfg.extra
    return draw(rng, [n, rng.randint(1, cfg.digits) if rng.random() < 0.5 else rng.randint(cfg.digits + 1, n)])

def pretraining_problem(rng, cfg):
    """The longer operand has 1 to N digits, balanced; a share `dial` are RL problems (D2)."""
    if rng.random() < cfg.dial:
        return rl_problem(rng, cfg)
    n = rng.randint(1, cfg.digits)
    return draw(rng, [n, rng.randint(1, n)])

def test_set(n, count, seed, kind="varying"):
    """`count` held-out problems, [V] appendix A: an operand has n digits, the other 1 to n, or n ("identical")."""
    rng = stream(seed, "test", kind, n)
    return [draw(rng, [n, n if kind == "identical" else rng.randint(1, n)], test=True) for _ in range(count)]

def collate(prompts, responses):
    """Token lists to ids (B, L), right-padded, and mask (B, L-1): True where ids[:, t+1] is a response."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(p + r) for p, r in zip(prompts, responses)], batch_first=True)
    begin, length = (torch.tensor([len(x) for x in tokens])[:, None] for tokens in (prompts, responses))
    position = torch.arange(1, ids.shape[1])
    return ids, (position >= begin) & (position < begin + length)

def true_batch(problems, device="cpu"):
    """ids (B, L) and mask (B, L-1) of the problems with their true scratchpads."""
    batch = collate([encode(prompt(*p)) for p in problems], [encode(scratchpad(*p)) for p in problems])
    return tuple(x.to(device) for x in batch)

# ---- Model: a small pre-norm transformer with tied embeddings, rotary positions and a value head.
norm = lambda x: F.layer_norm(x, x.shape[-1:])

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x, rotation, cache=None, mask=None, rows=None, positions=None):
        B, T, C = x.shape
        qkv = self.qkv(norm(x)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.unbind(2)
        if rotation is not None:
            qk = torch.view_as_complex(qkv[:, :, :2].float().unflatten(-1, (C // self.heads // 2, 2))) * rotation
            q, k = torch.view_as_real(qk).flatten(-2).to(qkv.dtype).unbind(2)
        if cache is not None:                                        # (2, B, L, heads, C // heads)
            cache[0][rows, positions], cache[1][rows, positions] = k.to(cache.dtype), v.to(cache.dtype)
            if mask is not None:
                k, v = cache[:, :, :mask.shape[-1]]
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))             # (B, heads, T, C // heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(norm(x))))

class GPT(nn.Module):
    """ids (B, T) to logits (B, T, V), float32 and divided by the temperature, and values (B, T).
    With a window the first block attends to that many tokens, and it alone knows their positions (D1).
    The value head reads the features but its loss does not change them (D8)."""
    def __init__(self, layers, width, heads, window=0):
        super().__init__()
        self.temperature, self.window = 1.0, window
        self.embedding = nn.Embedding(len(VOCABULARY), width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.value_head = nn.Linear(width, 1)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def device(self):
        return self.embedding.weight.device

    def new_cache(self, B, length):
        """Keys and values of B rows: (layers, 2, B, length, heads, width // heads)."""
        heads, width = self.blocks[0].heads, self.embedding.embedding_dim
        dtype = torch.bfloat16 if self.device.type == "cuda" else self.embedding.weight.dtype
        return torch.zeros(len(self.blocks), 2, B, length, heads, width // heads, dtype=dtype, device=self.device)

    def forward(self, ids, cache=None, start=None):
        """Without `start`, each row begins at position 0. With `start` (B,), row i continues at position
        start[i] and attends to what `cache` holds before it. The cache is written in place.
        Arithmetic is that of the weights on the CPU, bfloat16 autocast on CUDA."""
        B, T = ids.shape
        rows, positions, L = torch.arange(B, device=ids.device)[:, None], torch.arange(T, device=ids.device)[None], T
        if start is not None:
            positions, L = start[:, None] + positions, int(start.max()) + T    # (B, T)
        back = positions[:, None, :, None] - torch.arange(L, device=ids.device)
        mask, near = None if start is None else back >= 0, self.window and (back >= 0) & (back < self.window)
        with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
            x = norm(self.embedding(ids))
            pairs = x.shape[-1] // self.blocks[0].heads // 2
            frequency = 1e4 ** -(torch.arange(pairs, device=ids.device) / pairs)
            frequency[pairs // 2:] = 0                               # slow channels carry content alone
            angle = positions[..., None] * frequency
            rotation = torch.polar(torch.ones_like(angle), angle)[:, :, None, None]
            for i, block in enumerate(self.blocks):
                local = self.window and i == 0
                x = block(x, rotation if local or not self.window else None, None if cache is None else cache[i],
                          near if local else mask, rows, positions)
            x = norm(x)
            logits, values = F.linear(x, self.embedding.weight), self.value_head(x.detach()).squeeze(-1)
        return logits.float() / self.temperature, values.float()

def token_logp(logits, actions):
    """log softmax(logits)[actions]: (..., V), (...) to (...), in float32."""
    return logits.float().log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)

# ---- Pretraining: supervised, from scratch, loss on response tokens only, [V] section 3.2.
def pretraining_optimizers(model, cfg):
    rest = [model.embedding.weight, *model.value_head.parameters()]
    return [torch.optim.Muon(model.blocks.parameters(), lr=cfg.pretrain_lr, weight_decay=cfg.pretrain_weight_decay,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=cfg.pretrain_lr, betas=(0.9, 0.95), weight_decay=0.0)]

def pretraining_batches(cfg, group):
    """Four batches of problems, sorted by length before they are cut: less padding."""
    rng = stream(cfg.seed, "pretrain", group)
    problems = [pretraining_problem(rng, cfg) for _ in range(4 * cfg.pretrain_batch)]
    problems.sort(key=lambda p: len(scratchpad(*p)))
    batches = [problems[i:i + cfg.pretrain_batch] for i in range(0, len(problems), cfg.pretrain_batch)]
    rng.shuffle(batches)
    return batches

def pretraining_step(model, optimizers, batch, progress, cfg):
    """One step of both optimizers on a batch of problems; `progress` in [0, 1) sets the learning rate."""
    ids, mask = true_batch(batch, cfg.device)
    ids, mask, response_tokens = ids[RANK::WORLD], mask[RANK::WORLD], mask.sum()
    logits, _ = model(ids[:, :-1])
    loss = -masked_mean(token_logp(logits, ids[:, 1:]), mask)
    if not loss.isfinite():
        raise UserError(f"pretraining, {progress:.0%} done: loss not finite; stopped before the step")
    model.zero_grad()
    (loss * mask.sum() / response_tokens).backward()
    sum_gradients(model)
    for optimizer in optimizers:
        lr = cfg.pretrain_lr * min(1 - 0.95 * progress, progress * cfg.pretrain_steps / 20 + 0.05)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return loss

def pretrain(cfg, log):
    """The pretrained model of `cfg` and its seconds. It is cached; a stopped one goes on where it was."""
    path = Path(cfg.out) / f"pretrained-{fingerprint(cfg, PRETRAINING_FIELDS)}.pt"
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.layers, cfg.width, cfg.heads, cfg.window).to(cfg.device)
    optimizers = pretraining_optimizers(model, cfg)
    step, seconds = 0, 0.0
    if path.exists():
        step, seconds, states = load(path, cfg.device, dict(model=model), "step", "seconds", "optimizers")
        for optimizer, state in zip(optimizers, states):             # none once it is complete
            optimizer.load_state_dict(state)
    began = time.time() - seconds
    while step < cfg.pretrain_steps:
        if step % 4 == 0:                                            # a stop is at a multiple of 4, too
            batches = pretraining_batches(cfg, step // 4)
        loss = pretraining_step(model, optimizers, batches[step % 4], step / cfg.pretrain_steps, cfg)
        step += 1
        stop = step % 4 == 0 and any(all_ranks(log.interrupted))
        log.progress("pretraining", step, cfg.pretrain_steps, lambda: f"loss {loss.item():.4f}")
        if step % 500 == 0 or stop or step == cfg.pretrain_steps:
            state = [o.state_dict() for o in optimizers] if step < cfg.pretrain_steps else []
            seconds = time.time() - began
            write(path, dict(version=VERSION, step=step, seconds=seconds, model=model.state_dict(), optimizers=state))
        if stop:
            log.line(f"stopped while pretraining; to go on: the same command, or --resume {run_folder(cfg)}")
            all_ranks(None)                                          # none ends before the first has saved
            raise KeyboardInterrupt
    model.temperature = cfg.temperature
    return model, seconds

# ---- Sampling with a KV cache. The true scratchpad serves as a draft: one parallel pass scores all of it,
# each row keeps its own samples up to the first that differs from the draft, and goes on from there
# with the rest of the draft as the next guess. Every token kept is the sample that decoding one token
# at a time would have drawn from the same Gumbel noise, so this is exact sampling from the policy.
def gumbel(seed, *shape):
    """Gumbel noise: argmax(log p + noise) is a sample from p."""
    return -torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed)).log()

@torch.no_grad()
def generate(policy, prompts, drafts, limit, noise=None, window=24, match=4):
    """Sample one response for each prompt; greedy without noise.
    prompts, drafts: lists of B token lists; a draft may be empty or wrong: it only costs time.
    limit: most response tokens. noise: (B, longest prompt + limit, V) or None. window: tokens read in a round after the
    first. match: characters that must read alike where the draft is resumed; a prompt has as many or more.
    A response ends with the second newline after the first "/", or at the limit.
    Returns ids (B, L), mask (B, L-1), logits (B, L-1, V) and values (B, L-1) of the policy on them."""
    B, V, device = len(prompts), len(VOCABULARY), policy.device
    begin = torch.tensor([len(p) for p in prompts], device=device)   # (B,) first response position
    draft = collate(prompts, drafts)[0].to(device)
    width = draft.shape[1] - 1                                       # tokens read in this round
    size = max(int(begin.max()) + limit, width + 1) + window
    draft = F.pad(draft, (0, size - width - 1), value=TOKEN_ID[PAD])
    column = torch.arange(size, device=device)
    back = torch.arange(1 - match, 1, device=device)
    digit = IS_DIGIT.to(device)
    shape_of = lambda ids: torch.where(digit[ids], TOKEN_ID["0"], ids)
    if noise is not None:
        noise = F.pad(noise.to(device), (0, 0, 0, size - noise.shape[1]))      # past the limit nothing is kept
    ids, length = draft.clone(), torch.zeros_like(begin)
    logits, values = torch.zeros(B, size, V, device=device), torch.zeros(B, size, device=device)
    cache = policy.new_cache(B, size)
    # the state of the rows that still write: text holds settled tokens, then the guess
    rows, text, fed, shift = torch.arange(B, device=device), draft.clone(), torch.zeros_like(begin), 0 * begin
    while len(rows):
        position = fed[:, None] + column[:width]                     # (R, W)
        out, value = policy(text.gather(1, position), cache, None if width > window else fed)
        logits[rows[:, None], position], values[rows[:, None], position] = out, value
        sampled = (out if noise is None else out + noise[rows[:, None], position + 1]).argmax(-1)
        guess = text.gather(1, position + 1)
        miss = (sampled != guess) & (position + 1 >= begin[rows, None])  # the prompt is given
        missed = miss.any(1)
        first = torch.where(missed, miss.int().argmax(1), width - 1)
        fed = fed + first + 1                                        # position of the last settled token
        token = torch.where(missed, sampled.gather(1, first[:, None])[:, 0], text.gather(1, fed[:, None])[:, 0])
        # the next guess: the draft goes on after its nearest place that reads like the last characters,
        # all digits being alike
        recent = shape_of(text.scatter(1, fed[:, None], token[:, None]).gather(1, fed[:, None] + back))
        like = (shape_of(draft[rows]).unfold(1, len(back), 1) == recent[:, None]).all(-1)
        far = torch.where(like, (column[-back[0]:] - (fed + shift)[:, None]).abs(), size)
        shift = torch.where(missed & like.any(1), far.argmin(1) - back[0] - fed, shift)
        guess = draft[rows].gather(1, (column + shift[:, None]).clamp(0, size - 1))
        text = torch.where(column > fed[:, None], guess, text).scatter(1, fed[:, None], token[:, None])
        newlines = ((text == NEWLINE) & ((text == SLASH).cumsum(1) > 0)).cumsum(1)
        end = torch.where(newlines[:, -1] >= 2, (newlines >= 2).int().argmax(1), size)
        end = torch.minimum(end, begin[rows] + limit - 1)
        ids[rows], length[rows] = text, end + 1
        going = end > fed
        if not going.all():
            rows, text, fed, shift, cache = rows[going], text[going], fed[going], shift[going], cache[:, :, going]
        width = window
    L = int(length.max())
    ids = torch.where(column < length[:, None], ids, TOKEN_ID[PAD])[:, :L]
    mask = (column[:L - 1] >= begin[:, None] - 1) & (column[:L - 1] < length[:, None] - 1)
    return ids, mask, logits[:, :L - 1], values[:, :L - 1]

# ---- Masked statistics: one mean for losses and diagnostics.
def masked_mean(x, mask):
    """Mean of x where mask is True (same shapes); 0 if it never is. What is masked has no gradient."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)

def whiten(x, mask):
    """x shifted and scaled to mean 0 and (population) variance 1 over the mask; 0 outside."""
    centered = torch.where(mask, x - masked_mean(x, mask), 0)
    return centered * (masked_mean(centered ** 2, mask) + 1e-8).rsqrt()

# ---- KL penalty, [V] section 4.
LOG_LIMIT = 20.0  # |log-ratio| is cut here before exp (D7)

def entropy(logits):
    """Entropy of the policy, (..., V) to (...), in nats."""
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * torch.where(logp > -math.inf, logp, 0)).sum(-1)

def certainty(logits, kind="negentropy"):
    """Certainty J of a policy, (..., V) to (...): 1 for one-hot, 0 for uniform. "negentropy": (Hmax - H) / Hmax with
    Hmax = log V, [V] Eq. 2. "max_prob": 1 + log(max p) / log V, [V] released code (C1)."""
    if kind not in ("negentropy", "max_prob"):
        raise UserError(f"certainty {kind}: allowed are negentropy, max_prob")
    uncertainty = entropy(logits) if kind == "negentropy" else -logits.float().log_softmax(-1).max(-1).values
    return (1 - uncertainty / math.log(logits.shape[-1])).clamp(0, 1)

def reference_certainty(logits_ref, cfg):
    """J as `cfg` asks for it, from logits that the model has divided by cfg.temperature."""
    return certainty(logits_ref * (cfg.temperature / (cfg.certainty_temperature or cfg.temperature)), cfg.certainty)

def kl_weight(certainty, beta):
    """Weight J^beta of the prioritized penalty, [V] Eq. 1; beta = 0 gives 1, the standard penalty."""
    return certainty ** beta

def kl_estimate(logp, logp_ref, kind):
    """Estimate of KL(pi || ref) from actions drawn from pi, (B, T) to (B, T), in nats.
    With r = pi / ref: k1 = log r, k2 = (log r)^2 / 2, k3 = 1/r - 1 + log r. As a loss, k2 has the
    gradient of KL in expectation; k1 has none and k3 another one."""
    log_ratio = logp - logp_ref
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio ** 2 / 2
    if kind == "k3":
        return torch.expm1((-log_ratio).clamp(max=LOG_LIMIT)) + log_ratio
    raise UserError(f"KL estimator {kind}: allowed are k1, k2, k3")

def kl_exact(logits, logits_ref):
    """KL(pi || ref) over the whole vocabulary, (..., V) to (...), in nats."""
    return expected_log_ratio(logits.float().log_softmax(-1), logits_ref.float().log_softmax(-1))

def expected_log_ratio(logp, logq):
    """sum p (log p - log q) over the last dimension; what has p = 0 adds 0, what has q = 0 < p gives inf."""
    possible = logp.exp() > 0
    logp, logq = torch.where(possible, logp, -math.inf), torch.where(possible, logq, 0)
    return (logp.exp() * torch.where(possible, logp - logq, 0)).sum(-1)

# ---- Trust region, [Q] section 4.
@torch.no_grad()
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    """Divergence D(mu || pi) of the next-token distributions, (..., V), (..., V), (...) to (...).
    kind: "binary_tv", "binary_kl": the sampled token or not, [Q] Eq. 13, 14; "topk_tv", "topk_kl": the
    top K of mu with the sampled token, the rest as one, Eq. 15, 16 (K > V counts as V); "tv", "kl": all
    of V. TV in [0, 1], KL in nats (inf where pi = 0 < mu). No gradient: it only makes a mask."""
    if kind not in DIVERGENCES:
        raise UserError(f"divergence {kind}: allowed are {', '.join(DIVERGENCES)}")
    logs = [mu_logits.float().log_softmax(-1), pi_logits.float().log_softmax(-1)]
    if kind == "binary_tv":
        mu, pi = (logp.gather(-1, actions[..., None]).squeeze(-1).exp() for logp in logs)
        return (mu - pi).abs()
    if kind not in ("tv", "kl"):
        named = torch.zeros_like(logs[0], dtype=torch.bool).scatter(-1, actions[..., None], True)
        if kind.startswith("topk"):
            named = named.scatter(-1, logs[0].topk(min(top_k, logs[0].shape[-1]), sorted=False).indices, True)
        if kind == "topk_tv":                                        # the rest moves as one
            moved = logs[0].exp() - logs[1].exp()
            return ((moved.abs() * named).sum(-1) + (moved * ~named).sum(-1).abs()) / 2
        # the tail, log(1 - sum of the named), from its own logits: 1 - p would round to 0
        logs = [torch.cat((torch.where(named, logp, -math.inf),
                           torch.where(named, -math.inf, logp).logsumexp(-1, keepdim=True)), -1) for logp in logs]
    if kind.endswith("kl"):
        return expected_log_ratio(*logs)
    return (logs[0].exp() - logs[1].exp()).abs().sum(-1) / 2

def trust_region_mask(ratio, advantages, divergence, delta):
    """M of [Q] Eq. 12, (B, T) bool, True = keep. A token is dropped if it is beyond delta and its update
    would move it further: (A > 0 and ratio > 1) or (A < 0 and ratio < 1)."""
    outward = (advantages > 0) & (ratio > 1) | (advantages < 0) & (ratio < 1)
    return ~(outward & (divergence > delta))

# ---- Advantages and losses.
def gae(rewards, values, mask, gamma, lam):
    """Generalized advantage estimation: (B, T) each to (advantages, returns), (B, T), 0 outside the mask, in each row a
    run of True. The episode ends after it, also where the length limit cut it off: nothing is bootstrapped."""
    rewards, values = torch.where(mask, rewards, 0), torch.where(mask, values, 0)
    advantages = torch.zeros_like(values)
    following = next_value = torch.zeros_like(values[:, 0])          # advantage and value at t+1
    for t in reversed(range(values.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = following = torch.where(mask[:, t], error + gamma * lam * following, 0)
        next_value = values[:, t]
    return advantages, advantages + values

def policy_loss(logp, logp_mu, advantages, mask, trust_region="clip", eps_low=0.2, eps_high=0.2, divergence=None,
                delta=0.15, ratio_cap=math.inf, logp_anchor=None):
    """Surrogate loss: (B, T) log-probabilities under pi and mu, advantages and mask to (scalar, info). The gradient is
    that of [Q] Eq. 23, M min(r, C) A grad log pi with r = pi / mu and C = ratio_cap, averaged over the tokens.
    M compares pi with the anchor: mu, or the policy of `logp_anchor` (B, T). By trust_region:
    "clip": PPO, min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), Eq. 10; the eps are numbers or both (B, T).
    "divergence": DPPO, M r A, Eq. 12; needs `divergence` (B, T) between anchor and pi.
    "negative": only tokens with A < 0 and anchor - pi >= delta are dropped, section 5.3. "none": r A.
    info: 0-dimensional tensors without gradient. Raises UserError on another trust region."""
    anchor = logp_mu if logp_anchor is None else logp_anchor
    logp, logp_mu, anchor, advantages = (torch.where(mask, x, 0) for x in (logp, logp_mu, anchor, advantages))
    ratio, moved = ((logp - x).clamp(-LOG_LIMIT, LOG_LIMIT).exp() for x in (logp_mu, anchor))
    weight = ratio * (ratio.clamp(max=ratio_cap) / ratio).detach()
    stopped = torch.zeros_like(weight)                               # value of a token that is not kept
    if trust_region == "clip":
        keep = ~((advantages > 0) & (moved > 1 + eps_high) | (advantages < 0) & (moved < 1 - eps_low))
        stopped = moved.detach().clamp(1 - eps_low, 1 + eps_high)
    elif trust_region == "divergence":
        if divergence is None:
            raise UserError("trust region divergence: needs the divergence of each token")
        keep = trust_region_mask(moved, advantages, divergence, delta)
    elif trust_region == "negative":
        keep = ~((advantages < 0) & (anchor.exp() - logp.exp() >= delta))
    elif trust_region == "none":
        keep = torch.ones_like(mask)
    else:
        raise UserError(f"trust region {trust_region}: allowed are clip, divergence, negative, none")
    loss = -masked_mean(torch.where(keep, weight, stopped) * advantages, mask)
    with torch.no_grad():
        drift = torch.where(mask, logp.exp() - logp_mu.exp(), 0)     # pi - mu of the sampled token
        share = lambda these: masked_mean(these.float(), mask)       # of the response tokens; bad: [Q] 5.3
        info = dict(masked=share(~keep), masked_positive=share(~keep & (advantages > 0)),
                    masked_negative=share(~keep & (advantages < 0)), bad=share((advantages < 0) & (drift <= -0.5)),
                    ratio_max=torch.where(mask, ratio, 1).max(), ratio_min=torch.where(mask, ratio, 1).min(),
                    kl_mu=masked_mean(kl_estimate(logp_mu, logp, "k3"), mask),
                    drift=masked_mean(drift, mask), drift_max=drift.max(), drift_min=drift.min())
    return loss, info

# ---- The loop: rollout, update.
@dataclass
class Rollout:
    """One batch of episodes under mu; no tensor here carries a gradient."""
    ids: torch.Tensor                 # (B, T+1) int64: prompt, response, PAD
    mask: torch.Tensor                # (B, T) bool: ids[:, t+1] is a response token
    logits: torch.Tensor              # (B, T, V) float32: mu's, as the sampler computed them
    logp: torch.Tensor                # (B, T) float32: log mu(ids[:, t+1] | ids[:, :t+1])
    values: torch.Tensor              # (B, T) float32, the sampler's
    correct: torch.Tensor             # (B,) float32: the reward at the end of each episode
    problems: list                    # B pairs (a, b)
    advantages: torch.Tensor = None   # (B, T) float32; from here on filled in by `prepare`
    returns: torch.Tensor = None      # (B, T) float32
    logits_ref: torch.Tensor = None   # (B, T, V) float32: the reference's
    anchor: torch.Tensor = None       # (B, T, V) float32: what the mask compares pi with, mu's or recomputed
    kl_weights: torch.Tensor = None   # (B, T) float32: J^beta, or 1

@torch.no_grad()
def score(model, ids):
    """Logits (B, T, V) of a model on ids (B, T+1); 16 rows at a time, which stay in the processor's cache."""
    logits = torch.cat([model(rows[:, :-1])[0] for rows in my_share(ids).split(16)])
    return torch.cat([x.to(logits.device) for x in all_ranks(logits.cpu())]) if WORLD > 1 else logits

def rollout(policy, problems, seed=None):
    """Sample one answer to each problem (greedy without a seed) and grade it."""
    prompts, drafts = [encode(prompt(*p)) for p in problems], [encode(scratchpad(*p)) for p in problems]
    limit = max(map(len, drafts)) + 16
    noise = None if seed is None else my_share(
        gumbel(seed, len(problems), max(map(len, prompts)) + limit, len(VOCABULARY)))
    parts = generate(policy, my_share(prompts), my_share(drafts), limit, noise)
    if WORLD > 1:
        parts = [nn.utils.rnn.pad_sequence([row for part in found for row in part], batch_first=True).to(policy.device)
                 for found in zip(*all_ranks([x.cpu() for x in parts]))]
    ids, mask, logits, values = parts
    correct = [is_correct(*p, decode(row[1:][m])) for p, row, m in zip(problems, ids.cpu(), mask.cpu())]
    return Rollout(ids, mask, logits, token_logp(logits, ids[:, 1:]), values,
                   torch.tensor(correct, dtype=torch.float32, device=policy.device), problems)

@torch.no_grad()
def prepare(batch, policy, reference, cfg):
    """Advantages, and what mask and penalty need of the policy before the update and of the reference."""
    last = batch.mask & ~F.pad(batch.mask[:, 1:], (0, 1))            # the last action of each episode
    rewards = torch.where(last, batch.correct[:, None], 0)
    advantages, batch.returns = gae(rewards, batch.values, batch.mask, cfg.gamma, cfg.lam)
    batch.advantages = whiten(advantages, batch.mask)
    if cfg.advantage == "group":                                     # not divided by the deviation, [Q]
        grouped = batch.correct.view(-1, cfg.group)
        batch.advantages = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1).expand_as(batch.mask)
    batch.anchor = batch.logits if cfg.anchor == "rollout" else score(policy, batch.ids)
    if cfg.penalty != "none":
        batch.logits_ref = score(reference, batch.ids)
        J = reference_certainty(batch.logits_ref, cfg)
        batch.kl_weights = kl_weight(J, cfg.beta if cfg.penalty == "critical" else 0.0)

def ppo_loss(policy, batch, rows, cfg):
    """L = L_RL + alpha L_KL + value and entropy terms on some rows of a batch; returns (scalar, info)."""
    T = int(batch.mask[rows].any(0).nonzero().max()) + 1             # without padding that all rows share
    ids, mask = batch.ids[rows, :T + 1], batch.mask[rows, :T]
    logits, values = policy(ids[:, :-1])
    actions, logp, terms = ids[:, 1:], token_logp(logits, ids[:, 1:]), {}
    logp_mu, anchor, apart = batch.logp[rows, :T], batch.anchor[rows, :T], None
    if cfg.trust_region == "divergence":
        apart = divergence(anchor, logits, actions, cfg.divergence, cfg.top_k)
    unlikely = logp_mu.exp() < cfg.relax_below                       # [Q] section 6
    eps_low = torch.where(unlikely & (cfg.relax in ("low", "both")), 1, cfg.eps_low)
    eps_high = torch.where(unlikely & (cfg.relax in ("high", "both")), math.inf, cfg.eps_high)
    terms["policy_loss"], info = policy_loss(
        logp, logp_mu, batch.advantages[rows, :T], mask, cfg.trust_region, eps_low, eps_high, apart, cfg.delta,
        cfg.ratio_cap, token_logp(anchor, actions) if cfg.anchor == "recomputed" else None)
    terms["value_loss"] = masked_mean((values - batch.returns[rows, :T]) ** 2, mask) / 2
    loss = terms["policy_loss"]
    if cfg.advantage == "gae" and cfg.value_coef:
        loss = loss + cfg.value_coef * terms["value_loss"]
    if cfg.penalty != "none":
        logits_ref = batch.logits_ref[rows, :T]
        kl = (kl_exact(logits, logits_ref) if cfg.kl_kind == "exact" else
              kl_estimate(logp, token_logp(logits_ref, actions), cfg.kl_kind))
        terms["kl_ref"] = masked_mean(kl.detach(), mask)
        terms["penalty"] = masked_mean(batch.kl_weights[rows, :T] * kl, mask)   # [V] Eq. 1
        loss = loss + cfg.kl_coef * terms["penalty"] if cfg.kl_coef else loss
    with torch.set_grad_enabled(cfg.entropy_coef > 0):
        terms["entropy"] = masked_mean(entropy(logits), mask)
    if cfg.entropy_coef:
        loss = loss - cfg.entropy_coef * terms["entropy"]
    return loss, info | {name: term.detach() for name, term in terms.items()}

def update(policy, optimizer, batch, cfg, iteration):
    """Some epochs of minibatches; returns the diagnostics: extremes of ..._max and ..._min, else means."""
    infos = []
    for epoch in range(cfg.epochs):
        order = list(range(cfg.episodes))
        stream(cfg.seed, "minibatches", iteration, epoch).shuffle(order)
        for i in range(0, cfg.episodes, cfg.minibatch):
            rows = order[i:i + cfg.minibatch]
            mine = rows[RANK::WORLD]
            loss, info = ppo_loss(policy, batch, mine, cfg)
            info["share"] = batch.mask[mine].sum() / batch.mask[rows].sum()
            optimizer.zero_grad()
            (loss * info["share"]).backward()
            sum_gradients(policy)
            info["grad_norm"] = nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm or math.inf)
            if bad := [name for name, term in info.items() if not term.isfinite()]:
                raise UserError(f"iteration {iteration}: {', '.join(bad)} not finite; stopped before the step")
            optimizer.step()
            infos.append({name: term.item() for name, term in info.items()})
    infos = [info for part in all_ranks(infos) for info in part]
    means = {name: sum(i[name] * i["share"] for i in infos) / sum(i["share"] for i in infos) for name in infos[0]}
    for extreme, suffix in ((max, "_max"), (min, "_min")):
        means |= {name: extreme(i[name] for i in infos) for name in means if name.endswith(suffix)}
    spread, left = (masked_mean((batch.returns - x) ** 2, batch.mask).item()
                    for x in (masked_mean(batch.returns, batch.mask), batch.values))
    explained = 1 - left / spread if spread > 1e-8 else 0.0          # all returns alike: nothing to explain
    return means | dict(reward=batch.correct.mean().item(), explained_variance=explained)

# ---- Evaluation. Under teacher forcing the product of the token probabilities is the exact probability of
# sampling the true scratchpad: one pass, no sampling noise, a lower bound of graded success.
SETS = ("N", "N+1", "N+2", "N+3")  # digits of the longer operand

def critical_tokens(a, b, digits):
    """Name to index in scratchpad(a, b) of each critical token, [V] appendix B: in lines 1 to 3, for an operand of
    digits + g digits, the last 2g characters of its list, commas and digits that pretraining did not have."""
    found, start = {}, len("\n<scratch>\n")
    for i, line in enumerate(scratchpad(a, b).split("\n")[2:5], 1):
        for operand, number, digit_list in zip(("first", "second"), (a, b), re.finditer(r"\[([0-9,]*)\]", line)):
            excess = len(str(number)) - digits
            for k in range(1, excess + 1):
                comma = digit_list.end(1) - 2 * (excess + 1 - k)
                if comma > digit_list.start(1):
                    name = f"line{i}_{operand}_n+{k}_"
                    found |= {name + "comma": start + comma, name + "digit": start + comma + 1}
        start += len(line) + 1
    return found

def examine(model, problems, digits):
    """Teacher forcing on the true scratchpads: (n,) probabilities of sampling them, and a dict from the
    name of each critical token to the mean probability of the right character."""
    (ids, mask), critical = true_batch(problems, model.device), {}
    logp = torch.where(mask, token_logp(score(model, ids), ids[:, 1:]), 0).cpu()
    for row, (a, b) in zip(logp, problems):
        for name, index in critical_tokens(a, b, digits).items():
            critical.setdefault(name, []).append(math.exp(row[len(prompt(a, b)) - 1 + index]))
    return logp.sum(1).exp(), {name: sum(p) / len(p) for name, p in sorted(critical.items())}

def force(policy, problems, places, wrong=True):
    """Decisive? [V] section 3.3. A place is (number of the problem, index in its scratchpad). There the likeliest
    wrong character is put, after the true text (or as a control the true one), and the greedy answer goes on.
    Returns the list of these characters and (n,) bool, True where the answer comes out right."""
    logits = score(policy, true_batch(problems, policy.device)[0])
    starts, drafts, put = [], [], []
    for i, index in places:
        begin, true = prompt(*problems[i]), scratchpad(*problems[i])
        likeliest = decode(logits[i, len(begin) - 1 + index].argsort(descending=True)[:2])
        put.append(likeliest.replace(true[index], "")[0] if wrong else true[index])
        starts.append(encode(begin + true[:index] + put[-1]))
        drafts.append(encode(true[index + 1:]))
    rows, limit = [], max(map(len, drafts)) + 16
    for i in range(0, len(places), 100):                             # all at once would take gigabytes
        rows += generate(policy, starts[i:i + 100], drafts[i:i + 100], limit)[0]
    answers = [decode(row).rstrip(PAD)[len(prompt(*problems[i])):] for row, (i, _) in zip(rows, places)]
    return put, torch.tensor([is_correct(*problems[i], text) for text, (i, _) in zip(answers, places)])

def bootstrap(values, resamples=1000):
    """Mean of (n,) values and its 95% interval by resampling: (mean, low, high)."""
    index = torch.randint(len(values), (resamples, len(values)), generator=torch.Generator().manual_seed(0))
    low, high = values[index].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return values.mean().item(), low, high

def test_accuracy(model, cfg, count):
    """Expected success on the varying sets: ({"N": (mean, low, high), "N+1": ...}, critical of N+k)."""
    found = {name: examine(model, test_set(cfg.digits + k, count, cfg.seed), cfg.digits)
             for k, name in enumerate(SETS[:max(3, cfg.extra + 1)])}
    return {name: bootstrap(expected) for name, (expected, _) in found.items()}, found[SETS[cfg.extra]][1]

# ---- Saving: every file is written beside its place and renamed, so that it is whole or absent.
FREE_FIELDS = ("out", "name", "json", "preset")  # they do not change what a run computes
PRETRAINING_FIELDS = ("digits", "extra", "dial", "layers", "width", "heads", "window", "pretrain_steps",
                      "pretrain_batch", "pretrain_lr", "pretrain_weight_decay", "seed", "device", "threads")

def fingerprint(cfg, names):
    """Eight hexadecimal digits that change with the named settings, the versions and the number of processes."""
    content = json.dumps([VERSION, torch.__version__, WORLD] + [getattr(cfg, name) for name in names])
    return f"{zlib.crc32(content.encode()):08x}"

def run_folder(cfg):
    names = [f.name for f in fields(Config) if f.name not in FREE_FIELDS + ("seed",)]
    return Path(cfg.out) / f"{cfg.mode}-{cfg.name or fingerprint(cfg, names)}-seed{cfg.seed}"

def write(path, content):
    """Text, or a dict as a checkpoint (.pt) or as JSON, to a file, atomically. Only rank 0 writes."""
    if RANK > 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            if path.suffix == ".pt":
                torch.save(content, file)
            else:
                file.write((content if isinstance(content, str) else json.dumps(content, indent=1)).encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)

def load(path, device, parts, *names):
    """Put the state_dicts of a checkpoint into its `parts` (name to module or optimizer) and return the list of
    its values of other names. Nothing is unpickled but tensors and plain values. Raises UserError."""
    try:
        state = dict(torch.load(path, map_location=device, weights_only=True))
        if state["version"] != VERSION:
            raise UserError(f"made by version {state['version']}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        return [state[name] for name in names]
    except Exception as error:  # what torch.load raises on other files is not documented
        raise UserError(f"{path}: not a checkpoint of critkl {VERSION}, or of another configuration "
                        f"({type(error).__name__}: {' '.join(str(error).split())[-200:]})") from None

def csv_text(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[f"{row[n]:.6g}" if n in row else "" for n in names] for row in rows]
    return "\n".join(map(",".join, [names] + lines)) + "\n"

def peak_memory_mb(device):
    """Peak of this process on the CPU, of the allocator on a GPU, in MB."""
    if device == "cuda" or sys.platform == "win32":
        return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else math.nan
    import resource                                                  # Windows has none
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)

class Log:
    """What a run prints: one live line on a terminal, elsewhere a plain line every 20 seconds. It also
    holds Ctrl-C while training: the first asks to stop at the next whole step, the second stops at once."""
    def __init__(self, training=True, quiet=False):
        self.live, self.last, self.first, self.interrupted = sys.stdout.isatty(), 0.0, {}, False
        self.quiet = quiet or RANK > 0
        if training:
            signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_):
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def line(self, text, end="\n"):
        if not self.quiet:
            print(("\r\033[K" if self.live else "") + text, end=end, flush=True)

    def progress(self, what, step, total, detail):
        now = time.time()
        first_step, began = self.first.setdefault(what, (step, now))
        if step > first_step and now - self.last >= (0.2 if self.live else 20):
            left = (now - began) / (step - first_step) * (total - step)
            self.last = now
            self.line(f"{what} {step}/{total}  {detail()}  {left:.0f} s left", end="" if self.live else "\n")

# ---- Runs.
def read_settings(folder, cfg=None, names=()):
    """The settings in a run folder's config.json. Raises UserError, also where a named one is not that of `cfg`."""
    try:
        there = dict(json.loads((Path(folder) / "config.json").read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{folder}: not a run folder, or its config.json is damaged") from None
    for name in names:
        if there.get(name) != getattr(cfg, name):
            raise UserError(f"{folder}: holds a run with {name} {there.get(name)}, not {getattr(cfg, name)}")
    return there

def open_run(cfg):
    """Make the run folder, or check that the one there has the same settings."""
    folder = run_folder(cfg)
    if (folder / "config.json").exists():
        read_settings(folder, cfg, [f.name for f in fields(Config) if f.name not in FREE_FIELDS])
        for left in folder.glob(".*.[0-9]*") if RANK == 0 else ():   # half-written by a run that was killed
            left.unlink()
    else:
        write(folder / "config.json", dict(
            settings=asdict(cfg), version=VERSION, torch=torch.__version__, python=platform.python_version(),
            machine=platform.platform(), processes=WORLD))
    return folder

def fixed_problems(reference, cfg):
    """`cfg.fixed` problems that the pretrained model solves with probability 0.05 to 0.95, [Q] 5.1."""
    rng, chosen, tried = stream(cfg.seed, "fixed"), {}, 0
    while len(chosen) < cfg.fixed:
        if tried == 10_000:
            raise UserError(f"--fixed {cfg.fixed}: the pretrained model solves only {len(chosen)} of 10,000 sometimes")
        problems = [rl_problem(rng, cfg) for _ in range(100)]
        expected, _ = examine(reference, problems, cfg.digits)
        chosen |= dict.fromkeys(p for p, e in zip(problems, expected) if 0.05 <= e <= 0.95)
        tried += len(problems)
    return list(chosen)[:cfg.fixed]

def train(cfg, log):
    """Pretrain (or load), fine-tune, evaluate, save: the whole of one run. Returns its summary."""
    folder = open_run(cfg)
    if (folder / "summary.json").exists():
        log.line(f"{folder}: this run is complete")
        return print_summary(json.loads((folder / "summary.json").read_text()), cfg, log)
    checkpoint, source = folder / "checkpoint.pt", fingerprint(cfg, PRETRAINING_FIELDS)
    if checkpoint.exists() and load(checkpoint, "cpu", {}, "pretrained") != [source]:
        raise UserError(f"{folder}: began with another torch or number of processes; use these or another --name")
    policy, pretrain_seconds = pretrain(cfg, log)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)
    sampler = copy.deepcopy(policy).to(getattr(torch, cfg.sampler_dtype))
    parts, done, rows, recent, seconds = dict(policy=policy, sampler=sampler, optimizer=optimizer), 0, [], [], 0.0
    if checkpoint.exists():
        done, rows, recent, seconds = load(checkpoint, cfg.device, parts, "done", "rows", "recent", "seconds")
        log.line(f"{folder}: goes on from iteration {done}")
    all_ranks(None)                                                  # nobody writes before all have read
    began, fixed = time.time() - seconds, fixed_problems(reference, cfg)
    def keep():
        write(folder / "metrics.csv", csv_text(rows))
        write(checkpoint, {name: part.state_dict() for name, part in parts.items()} | dict(
            version=VERSION, done=done, rows=rows, recent=recent, seconds=time.time() - began, pretrained=source))
    while True:
        due = done % cfg.eval_every == 0 or done == cfg.iterations
        if due and not (rows and rows[-1]["iteration"] == done):
            accuracy, critical = test_accuracy(policy, cfg, cfg.eval_problems)
            means = {name: sum(r[name] for r in recent) / len(recent) for name in recent[0]} if recent else {}
            rows.append(dict(iteration=done, seconds=time.time() - began)
                        | {f"accuracy_{k}": v[0] for k, v in accuracy.items()} | critical | means)
            recent = []
            log.line(f"iteration {done:4d}  " + "  ".join(f"{k} {v[0]:.3f}" for k, v in accuracy.items())
                     + "".join(f"  {k} {means[k]:.3g}" for k in ("reward", "kl_ref", "masked") if k in means))
            keep()
        if done == cfg.iterations:
            break
        lr = optimizer.param_groups[0]["lr"] = cfg.lr * (1 - done / cfg.iterations)
        rng, answers = stream(cfg.seed, "problems", done), cfg.group if cfg.advantage == "group" else 1
        problems = [rng.choice(fixed) if fixed else rl_problem(rng, cfg) for _ in range(cfg.episodes // answers)]
        problems = [p for p in problems for _ in range(answers)]
        if done % cfg.staleness == 0:
            sampler.load_state_dict(policy.state_dict())
        batch = rollout(sampler, problems, stream(cfg.seed, "noise", done).getrandbits(63))
        prepare(batch, policy, reference, cfg)
        try:
            recent.append(update(policy, optimizer, batch, cfg, done) | dict(lr=lr))
        except UserError as error:
            raise UserError(f"{error}; the last good checkpoint is {checkpoint}") from None
        done += 1
        log.progress("iteration", done, cfg.iterations, lambda: f"reward {recent[-1]['reward']:.2f}")
        if done % (2 * cfg.eval_every) == 0:
            (a, b), answer = problems[0], decode(batch.ids[0, 1:][batch.mask[0]])
            log.line(f"  sampled, reward {batch.correct[0]:.0f}: {a}+{b}\n  " + answer.strip().replace("\n", "\n  "))
        if any(all_ranks(log.interrupted)):
            keep()
            log.line(f"stopped after iteration {done}; to go on: the same command, or --resume {folder}")
            all_ranks(None)                                          # none ends before the first has saved
            raise KeyboardInterrupt
    after, critical_after = test_accuracy(policy, cfg, cfg.test_problems)
    before, critical_before = test_accuracy(reference, cfg, cfg.test_problems)
    seconds = time.time() - began
    summary = dict(
        mode=cfg.mode, seed=cfg.seed, accuracy={k: v[0] for k, v in after.items()},
        pretrained_accuracy={k: v[0] for k, v in before.items()},
        intervals=dict(accuracy=after, pretrained_accuracy=before),
        critical_tokens={k: dict(before=critical_before[k], after=critical_after[k]) for k in critical_before},
        seconds=dict(pretrain=pretrain_seconds, rl=seconds, total=pretrain_seconds + seconds),
        peak_memory_mb=peak_memory_mb(cfg.device), parameters=sum(p.numel() for p in policy.parameters()))
    write(folder / "summary.json", summary)
    return print_summary(summary, cfg, log)

percent = lambda interval: "{:.1f} ({:.1f} to {:.1f})".format(*(100 * x for x in interval))

def print_summary(summary, cfg, log):
    log.line(f"\nexpected success in %, varying lengths, {cfg.test_problems} held-out problems, 95% interval")
    log.line(f"{'':8}{'pretrained':>22}{'after RL, ' + cfg.mode if cfg.iterations else 'no RL':>26}")
    intervals, seconds = summary["intervals"], summary["seconds"]
    for k in summary["accuracy"]:
        log.line(f"{k:8}{percent(intervals['pretrained_accuracy'][k]):>22}{percent(intervals['accuracy'][k]):>26}")
    log.line(f"{seconds['pretrain']:.0f} s pretraining, {seconds['rl']:.0f} s RL and evaluation, "
             f"{summary['peak_memory_mb']:.0f} MB at the peak; all of it in {run_folder(cfg)}")
    return summary

def chosen_policy(cfg, log):
    """The run folder, the pretrained model, and the policy to look at: that of --checkpoint, or the pretrained."""
    policy = GPT(cfg.layers, cfg.width, cfg.heads, cfg.window).to(cfg.device)
    policy.temperature = cfg.temperature
    if cfg.checkpoint:                                               # refused before anything is written
        read_settings(cfg.checkpoint, cfg, sorted({*PRETRAINING_FIELDS, "temperature"} - {"device", "threads"}))
        load(Path(cfg.checkpoint) / "checkpoint.pt", cfg.device, dict(policy=policy))
    folder, (reference, _) = open_run(cfg), pretrain(cfg, log)
    return folder, reference, policy if cfg.checkpoint else copy.deepcopy(reference)

def evaluate(cfg, log):
    """Writes evaluation.json: [V] tables 4 and 5 (success at N to N+3) of a policy; of the pretrained model table 1
    and the critical tokens by definition; 2,000 tokens as a bfloat16 sampler and the trainer see them, [Q] fig. 2."""
    (folder, reference, policy), rows = chosen_policy(cfg, log), []
    log.line(f"{'set':10} {'digits':6} {'sampled':>22} {'greedy':>22} {'expected':>22}   in %, 95% interval")
    for kind, (k, name) in itertools.product(("identical", "varying"), enumerate(SETS)):
        problems, graded = test_set(cfg.digits + k, cfg.test_problems, cfg.seed, kind), dict(sampled=[], greedy=[])
        for i in range(0, len(problems), 100):
            for how, seed in zip(graded, (stream(cfg.seed, "evaluate", kind, k, i).getrandbits(63), None)):
                graded[how].append(rollout(policy, problems[i:i + 100], seed).correct.cpu())
        graded = {how: torch.cat(correct) for how, correct in graded.items()}
        graded["expected"], _ = examine(policy, problems, cfg.digits)
        row = {how: bootstrap(success) for how, success in graded.items()}
        rows.append(dict(set=kind, digits=name) | row)
        log.line(f"{kind:10} {name:6} " + " ".join(f"{percent(x):>22}" for x in row.values()))
    problems = test_set(cfg.digits + 1, 50, cfg.seed)
    gap, definition = critical_evidence(reference, problems, cfg)
    log.line("certainty of the pretrained model on a token less its mean on the others, 50 answers: " + ", ".join(
        f"{name} {mean:.4f} ({low:.4f} to {high:.4f})" for name, (mean, low, high) in gap.items()))
    log.line("tokens of these answers: " + ", ".join(f"{n} {name}" for name, n in definition.items()))
    batch = rollout(copy.deepcopy(policy).bfloat16(), problems, 0)
    pi = token_logp(score(policy, batch.ids), batch.ids[:, 1:])
    pairs = torch.stack((batch.logp, pi), -1)[batch.mask].exp()[:2000].tolist()
    write(folder / "evaluation.json", dict(rows=rows, certainty_gap=gap, definition=definition, sampler=pairs))
    log.line(f"written to {folder}")

def critical_evidence(reference, problems, cfg, uncertain_below=0.8):
    """What makes a token critical, [V] section 3.3, on the true answers. Returns (gap, counts). gap, table 1:
    certainty on the listed tokens (`critical_tokens`) and on the others, each less the mean on the rest of its answer;
    mean over answers and its 95% interval. counts: tokens listed, uncertain (J below the threshold and among the ten
    lowest of the answer), decisive (the greedy answer from the true character is right, from a wrong one not)."""
    gaps, listed, uncertain = {"critical": [], "non-critical": []}, set(), set()
    ids, mask = true_batch(problems, reference.device)
    for i, (problem, J) in enumerate(zip(problems, reference_certainty(score(reference, ids), cfg))):
        J = J[mask[i]].cpu()
        gap, critical = J - (J.sum() - J) / (len(J) - 1), [*critical_tokens(*problem, cfg.digits).values()]
        gaps["critical"].append(gap[critical].mean())
        gaps["non-critical"].append((gap.sum() - gap[critical].sum()) / (len(gap) - len(critical)))
        listed |= {(i, t) for t in critical}
        uncertain |= {(i, t) for t in J.argsort()[:10].tolist() if J[t] < uncertain_below}
    places = sorted(listed | uncertain)
    outcome = zip(places, *(force(reference, problems, places, wrong)[1] for wrong in (False, True)))
    decisive = {place for place, with_true, with_wrong in outcome if with_true and not with_wrong}
    return {name: bootstrap(torch.stack(x)) for name, x in gaps.items()}, {
        "listed": len(listed), "listed and decisive": len(listed & decisive), "uncertain": len(uncertain),
        "uncertain and decisive": len(uncertain & decisive), "listed and uncertain": len(listed & uncertain),
        "all three": len(listed & uncertain & decisive)}

def inspect(cfg, log):
    """[V] fig. 5: the greedy answer, each character coloured by the certainty of the pretrained model."""
    a, b = parse_problem(cfg.problem)
    folder, reference, policy = chosen_policy(cfg, log)
    batch = rollout(policy, [(a, b)])
    J = reference_certainty(score(reference, batch.ids), cfg)[batch.mask].tolist()
    text = answer = decode(batch.ids[:, 1:][batch.mask])
    if log.live:                                                     # red below 0.8, yellow, green at 1
        level = [min(5, max(0, round(25 * j - 20))) for j in J]
        text = "".join(f"\033[38;5;{196 - 36 * max(0, n - 3) + 6 * n}m{c}" for n, c in zip(level, answer)) + "\033[0m"
    log.line(prompt(a, b) + text)
    log.line(f"{'right' if batch.correct[0] else 'wrong'}: {a}+{b}={a + b}; the pretrained model is least certain at")
    for i in sorted(range(len(J)), key=J.__getitem__)[:5]:
        log.line(f"  J = {J[i]:.3f}  {answer[max(0, i - 16):i]!r} then {answer[i]!r}")
    write(folder / "inspect.json", dict(problem=cfg.problem, text=answer, certainty=J, correct=bool(batch.correct[0])))

def bench(cfg, log):
    """Time, tokens/s, share of the machine's rate and peak memory so far of each phase, to bench.json.
    Tokens are prompt and response without padding. FLOPs of a forward pass are counted as 2 for each
    weight a token meets and 2 T C for causal attention in each layer; a training step as three of them.
    The machine's rate is that of a 2048 x 2048 matrix product, float32 on the CPU, bfloat16 on CUDA."""
    from torch.utils.benchmark import Timer                          # imports much that no other mode needs
    folder, (policy, _) = open_run(cfg), pretrain(cfg, log)
    reference, optimizer = copy.deepcopy(policy), torch.optim.AdamW(policy.parameters(), lr=0.0)
    both, weights = pretraining_optimizers(reference, cfg), sum(p.numel() for p in policy.parameters())
    count = lambda ids: int((ids != TOKEN_ID[PAD]).sum())
    mean_seconds = lambda call: Timer("call()", globals=dict(call=call), num_threads=cfg.threads).timeit(3).mean
    matrix = torch.randn(2048, 2048, device=cfg.device).to(torch.bfloat16 if cfg.device == "cuda" else torch.float32)
    rate = 2 * 2048**3 / mean_seconds(lambda: matrix @ matrix)
    rng, batches = stream(cfg.seed, "bench"), pretraining_batches(cfg, 0)
    problems = [rl_problem(rng, cfg) for _ in range(cfg.episodes)]
    batch, phases = rollout(policy, problems, 0), {}
    tokens, E, both_tokens = count(batch.ids), cfg.epochs, sum(count(true_batch(b)[0]) for b in batches)
    for name, passes, n, answers, call in (
            ("sampling", 1, tokens, cfg.episodes, lambda: rollout(policy, problems, 0)),
            ("scoring", 1, tokens, cfg.episodes, lambda: prepare(batch, policy, reference, cfg)),
            ("update", 3, E * tokens, E * cfg.episodes, lambda: update(policy, optimizer, batch, cfg, 0)),
            ("pretraining", 3, both_tokens, 4 * cfg.pretrain_batch,
             lambda: [pretraining_step(reference, both, b, 0.5, cfg) for b in batches])):
        seconds = mean_seconds(call)
        flops = passes * n * (2 * weights + 2 * cfg.layers * n / answers * cfg.width)
        phases[name] = dict(seconds=seconds, tokens_per_second=n / seconds, share_of_rate=flops / seconds / rate,
                            peak_memory_mb=peak_memory_mb(cfg.device))
    iteration = sum(phases[name]["seconds"] for name in ("sampling", "scoring", "update"))
    phases = {name: phase | dict(share_of_iteration=phase["seconds"] / iteration) for name, phase in phases.items()}
    result = dict(device=cfg.device, threads=cfg.threads, matrix_product_gflops=rate / 1e9, phases=phases)
    write(folder / "bench.json", result)
    if cfg.json:
        return print(json.dumps(result))
    log.line(f"{cfg.device}, {cfg.threads} threads, matrix product {rate / 1e9:.0f} GFLOP/s, an iteration (sampling, "
             f"scoring, update) {iteration:.2f} s\n{'phase':12} {'tokens/s':>10} {'of an iteration':>16} "
             f"{'of the rate':>12} {'peak MB so far':>15}")
    for name, phase in phases.items():
        log.line(f"{name:12} {phase['tokens_per_second']:10.0f} {phase['share_of_iteration']:16.0%} "
                 f"{phase['share_of_rate']:12.0%} {phase['peak_memory_mb']:15.0f}")

# ---- Command line.
class Parser(argparse.ArgumentParser):
    def error(self, message):                                        # one line, without the 27 of the usage
        raise UserError(message)

def parse(argv):
    """Command line to Config; flags, types and help come from its fields."""
    parser = Parser(prog="critkl.py", allow_abbrev=False, description=__doc__.split("\n\n")[0],
                    epilog="Defaults are preset laptop's; presets, modes and methods change some.")
    for f in fields(Config):
        kind = dict(action="store_true") if f.type is bool else dict(type=f.type, choices=f.metadata["choices"])
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, **kind,
                            help=f"{f.metadata['help']} (default: {f.default})")
    parser.add_argument("--resume", metavar="RUN_FOLDER", help="go on with a stopped run, with its own settings")
    given = vars(parser.parse_args(argv))
    resume = given.pop("resume")
    if resume is None:
        return make_config(given)
    folder = Path(resume).resolve()
    try:
        cfg = make_config(read_settings(folder, argparse.Namespace(**given), given) | dict(out=str(folder.parent)))
    except TypeError as error:                                       # settings of another version
        raise UserError(f"--resume {resume}: {error}") from None
    if run_folder(cfg) != folder:
        raise UserError(f"--resume {resume}: renamed, or other version or number of processes: now {run_folder(cfg)}")
    return cfg

def start(cfg):
    """Resolve device and threads into `cfg`, join the other processes."""
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.device == "cuda" and torch.cuda.device_count() <= (local := int(os.environ.get("LOCAL_RANK", 0))):
        raise UserError(f"--device cuda: no CUDA device {local} here (one for each process); allowed is cpu")
    torch.set_num_threads(cfg.threads or torch.get_num_threads())
    cfg.threads = torch.get_num_threads()
    if WORLD > 1:
        if cfg.minibatch % WORLD or cfg.pretrain_batch % WORLD or cfg.mode not in MODES:
            raise UserError(f"{WORLD} processes: they must divide --minibatch and --pretrain-batch, and can only train")
        if cfg.device == "cuda":
            torch.cuda.set_device(local)
        torch.distributed.init_process_group("nccl" if cfg.device == "cuda" else "gloo")

def main(argv=None):
    try:
        cfg = parse(argv)
        start(cfg)
        log = Log(cfg.mode in MODES, quiet=cfg.json and cfg.mode == "bench")
        log.line(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""))
        dict(evaluate=evaluate, inspect=inspect, bench=bench).get(cfg.mode, train)(cfg, log)
        if WORLD > 1:
            all_ranks(None)                                          # none ends before the first has saved
            torch.distributed.destroy_process_group()
        return 0
    except (UserError, OSError) as error:
        print(f"critkl.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    code = main()
    os._exit(code) if WORLD > 1 else sys.exit(code)                  # gloo's threads can abort Python's own end

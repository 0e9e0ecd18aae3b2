"""Tests of the grader: right answers have all points, every wrong one loses its step and no other.

    python -m pytest notebooks/test_grade.py

Wrong answers are of two sorts: critkl's own source with one small replacement (REPLACED, which
cannot drift from critkl.py), and functions as students write them (WRITTEN).
"""
import ast
import functools
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import critkl
import grade
import steps
from steps import FUNCTIONS, HUNT, QUESTIONS, STEPS

HERE = Path(grade.__file__).resolve().parent
IMPORTS = ("import math\nimport torch\nimport torch.nn.functional as F\n"
           "import critkl\nfrom critkl import DIVERGENCES, LOG_LIMIT, UserError, kl_of_logp\n"
           "from critkl import cut_log_ratio, merge_rest, policy_diagnostics, token_logp\n")
STEP_OF = {name: title for title, step in STEPS.items() for name in step.functions}

# name: function, text in its source, replacement
REPLACED = {
    "entropy in bits": ("entropy", ".sum(-1)", ".sum(-1) / math.log(2)"),
    "entropy with 0 log 0": ("entropy", "torch.where(logp > -math.inf, logp, 0)", "logp"),
    "entropy without the minus": ("entropy", "return -(", "return ("),
    "1 - J": ("certainty", "1 - uncertainty", "uncertainty"),
    "J negated": ("certainty", "(1 - uncertainty / math.log(logits.shape[-1]))",
                  "(uncertainty / math.log(logits.shape[-1]) - 1)"),
    "J not clamped": ("certainty", ".clamp(0, 1)", ""),
    "Hmax = V": ("certainty", "math.log(logits.shape[-1])", "logits.shape[-1]"),
    "weight beta J": ("kl_weight", "J ** beta", "J * beta"),
    "weight (1 - J)^beta": ("kl_weight", "J ** beta", "(1 - J) ** beta"),
    "weight with a whole beta": ("kl_weight", "J ** beta", "J ** int(beta)"),
    "log-ratio the wrong way round": ("kl_estimate", "logp - logp_ref", "logp_ref - logp"),
    "k3 for k2": ("kl_estimate", "log_ratio ** 2 / 2", "torch.expm1(-log_ratio) + log_ratio"),
    "k2 without the half": ("kl_estimate", "log_ratio ** 2 / 2", "log_ratio ** 2"),
    "k2 without gradient": ("kl_estimate", "log_ratio ** 2 / 2", "(log_ratio ** 2 / 2).detach()"),
    "log-ratio cut at 10": ("kl_estimate", "logp - logp_ref", "(logp - logp_ref).clamp(-10, 10)"),
    "KL the wrong way round": ("kl_exact", "(logits, logits_ref)", "(logits_ref, logits)"),
    "KL of logits": ("kl_exact", "logits.float().log_softmax(-1)", "logits.float()"),
    "unmasked mean": ("masked_mean", "torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)",
                      "x.mean()"),
    "mean that counts padding": ("masked_mean", "mask.sum().clamp(min=1)", "mask.numel()"),
    "mean by multiplication": ("masked_mean", "torch.where(mask, x, 0)", "(x * mask)"),
    "mean of row means": (
        "masked_mean", "torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)",
        "(torch.where(mask, x, 0).sum(-1) / mask.sum(-1).clamp(min=1)).mean()"),
    "mean of nothing": ("masked_mean", ".clamp(min=1)", ""),
    "whitening over padding": ("whiten", "x - masked_mean(x, mask)", "x - x.mean()"),
    "sample std": ("whiten", "masked_mean(centered ** 2, mask)", "centered[mask].var()"),
    "whitening fills padding": ("whiten", "torch.where(mask, x - masked_mean(x, mask), 0)",
                                "x - masked_mean(x, mask)"),
    "whitening without 1e-8": ("whiten", " + 1e-8", ""),
    "lambda on the next value": ("gae", "gamma * next_value", "gamma * lam * next_value"),
    "lambda forgotten": ("gae", "gamma * lam * following", "gamma * following"),
    "gamma forgotten": ("gae", "gamma * lam * following", "lam * following"),
    "value after the end used": ("gae", "torch.where(mask, values, 0)", "values"),
    "advantage after the end used": (
        "gae", "torch.where(mask[:, t], error + gamma * lam * following, 0)",
        "error + gamma * lam * following"),
    "reward off by one": ("gae", "error = rewards[:, t]", "error = rewards[:, t - 1]"),
    "returns without values": ("gae", "advantages + values", "advantages"),
    "gae forward in time": ("gae", "reversed(range(values.shape[1]))", "range(values.shape[1])"),
    "upper end from eps_low": ("policy_loss", "1 + eps_high", "1 + eps_low"),
    "lower end from eps_high": ("policy_loss", "1 - eps_low", "1 - eps_high"),
    "clip without the minimum": (
        "policy_loss", "torch.min(ratio * advantages, clipped * advantages)",
        "clipped * advantages"),
    "maximum for minimum": ("policy_loss", "torch.min(ratio", "torch.max(ratio"),
    "no clip at all": ("policy_loss", "torch.min(ratio * advantages, clipped * advantages)",
                       "ratio * advantages"),
    "ratio inverted": ("policy_loss", "cut_log_ratio(logp, logp_anchor)",
                       "cut_log_ratio(logp_anchor, logp)"),
    "gain for loss": ("policy_loss", "loss = -masked_mean", "loss = masked_mean"),
    "clipped at every loss": ("policy_loss", "clipped = ratio.clamp",
                              "ratio = clipped = ratio.clamp"),
    "ratio without gradient": ("policy_loss", "cut_log_ratio(logp, logp_anchor)",
                               "cut_log_ratio(logp, logp_anchor).detach()"),
    "policy loss with an unmasked mean": ("policy_loss", "masked_mean(weight * objective, mask)",
                                          "(weight * objective).mean()"),
    "sampled token missing from top-K": (
        "divergence", "named.scatter_(-1, actions[..., None], True)",
        "named.scatter_(-1, actions[..., None], kind.startswith('binary'))"),
    "no tail bucket": (
        "divergence", "log_pi = merge_rest(log_pi, named)",
        "log_pi = merge_rest(log_pi, named)[..., :-1]\n        log_mu = log_mu[..., :-1]"),
    "no tail in the KL": (
        "divergence", "kl_of_logp(log_mu, log_pi)",
        "kl_of_logp(log_mu[..., :4], log_pi[..., :4])"),
    "divergence the wrong way round": ("divergence", "kl_of_logp(log_mu, log_pi)",
                                       "kl_of_logp(log_pi, log_mu)"),
    "TV without the half": ("divergence", ".abs().sum(-1) / 2", ".abs().sum(-1)"),
    "top K of pi": ("divergence", "log_mu.topk", "log_pi.topk"),
    "K above V": ("divergence", "min(top_k, log_mu.shape[-1])", "top_k"),
    ">= for > at delta": ("trust_region_mask", "D > delta", "D >= delta"),
    "mask drops moves back": ("trust_region_mask", "~(away & (D > delta))", "D <= delta"),
    "mask drops only moves back": (
        "trust_region_mask", "((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))",
        "advantages * (1 - ratio) > 0"),
    "mask inverted": ("trust_region_mask", "return ~(", "return ("),
    "beta on the wrong factor": (
        "critical_penalty", 'weight * kl_estimate(logp, logp_ref, "k2")',
        'certainty(logits_ref) * kl_estimate(logp, logp_ref, "k2") ** beta'),
    "gradient through the weights": ("critical_penalty", "torch.no_grad()", "torch.enable_grad()"),
    "gradient through the reference": ("critical_penalty", ".detach()", ""),
    "penalty with k3": ("critical_penalty", '"k2"', '"k3"'),
    "penalty with k1": ("critical_penalty", '"k2"', '"k1"'),
    "penalty weighted by uncertainty": ("critical_penalty", "certainty(logits_ref)",
                                        "1 - certainty(logits_ref)"),
    "penalty with an unmasked mean": (
        "critical_penalty", 'masked_mean(weight * kl_estimate(logp, logp_ref, "k2"), mask)',
        '(weight * kl_estimate(logp, logp_ref, "k2")).mean()'),
    "penalty with nan in the gradient": ("critical_penalty", "logp = torch.where(mask, logp, 0)",
                                         "logp = logp"),
    "weight off by one": ("critical_penalty", "weight * kl", "weight.roll(1, -1) * kl"),
    "weight forgotten": ("critical_penalty", "weight * kl", "kl"),
    "penalty subtracted": ("learn", "loss + alpha", "loss - alpha"),
    "penalty left out": ("learn", "loss + alpha", "loss + 0 * alpha"),
    "half alpha": ("learn", "loss + alpha", "loss + alpha / 2"),
    "alpha ignored": ("learn", "alpha *", "5.0 *"),
    "beta ignored": ("learn", "mask, beta)", "mask, 10.0)"),
    "lr ignored": ("learn", "parameters(), lr)", "parameters(), 0.1)"),
    "epochs ignored": ("learn", "range(epochs)", "range(6)"),
    "iterations ignored": ("learn", "range(iterations)", "range(25)"),
    "one epoch too many": ("learn", "range(epochs)", "range(epochs + 1)"),
    "standard penalty": ("learn", "mask, beta)", "mask, 0.0)"),
    "penalty to the policy itself": ("learn", "reference(states)", "policy(states)"),
    "penalty by the policy's certainty": ("learn", "logp_ref, logits_ref", "logp_ref, logits"),
    "exact KL for the penalty": (
        "learn", "critical_penalty(logp, logp_ref, logits_ref, mask, beta)",
        "masked_mean(kl_weight(certainty(logits_ref), beta) * kl_exact(logits, logits_ref), mask)"),
    "k3 for the penalty": (
        "learn", "critical_penalty(logp, logp_ref, logits_ref, mask, beta)",
        "masked_mean(kl_weight(certainty(logits_ref), beta)"
        " * kl_estimate(logp, logp_ref, 'k3'), mask)"),
    "KL in the reward": (
        "learn", "advantages, returns = gae(rewards",
        "advantages, returns = gae(rewards - alpha * (logp_mu - logp_ref)"),
    "no step": ("learn", "optimizer.step()", "pass"),
    "gradients not zeroed": ("learn", "optimizer.zero_grad()", "pass"),
    "loss for gain": ("learn", "loss, _ = policy_loss(logp, logp_mu, advantages, mask)",
                      "loss = -policy_loss(logp, logp_mu, advantages, mask)[0]"),
    "a new Adam each time": (
        "learn", "        advantages = whiten",
        "        optimizer = torch.optim.Adam(policy.parameters(), lr)\n"
        "        advantages = whiten"),
    "gradients cut": ("learn", "optimizer.step()",
                      "torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)\n"
                      "            optimizer.step()"),
    "no steps far from mu": (
        "learn", "            optimizer.zero_grad()",
        "            if masked_mean(logp_mu - logp, mask) > 0.03:\n                break\n"
        "            optimizer.zero_grad()"),
    "another optimizer": ("learn", "optim.Adam(", "optim.RMSprop("),
    "one batch for all iterations": (
        "learn",
        "    for _ in range(iterations):\n        states, actions, mask, rewards = sample(policy)",
        "    states, actions, mask, rewards = sample(policy)\n    for _ in range(iterations):"),
    "a second call of sample": (
        "learn", "curve.append(rewards",
        "_, _, _, rewards = sample(policy)\n        curve.append(rewards"),
    "mu follows the policy": ("learn", "policy_loss(logp, logp_mu",
                              "policy_loss(logp, logp.detach()"),
    "loop without the clip": ("learn", "logp_mu, advantages, mask)",
                              "logp_mu, advantages, mask, 9, 9)"),
    "clip at 0.5": ("learn", "logp_mu, advantages, mask)", "logp_mu, advantages, mask, .5, .5)"),
    "no whitening": ("learn", "whiten(advantages, mask)", "advantages"),
    "whitening over padding in the loop": ("learn", "whiten(advantages, mask)",
                                           "whiten(advantages, mask | True)"),
    "mask all True": ("learn", " = sample(policy)",
                      " = sample(policy)\n        mask = mask | True"),
    "lambda 0": ("learn", "1.0, 1.0", "1.0, 0.0"),
    "gamma 0.9": ("learn", "1.0, 1.0", "0.9, 1.0"),
    "returns for advantages": ("learn", "whiten(advantages", "whiten(returns"),
    "rewards for advantages": ("learn", "whiten(advantages", "whiten(rewards"),
    "values not trained": ("learn", "loss + masked_mean((values - returns) ** 2, mask) / 2",
                           "loss"),
    "value loss without the half": ("learn", ", mask) / 2", ", mask)"),
    "values toward advantages": ("learn", "values - returns", "values - advantages"),
    "value loss with an unmasked mean": (
        "learn", "masked_mean((values - returns) ** 2, mask)", "((values - returns) ** 2).mean()"),
    "gradient of the old policy": ("learn", "logits, values = policy(states)\n            logp",
                                   "logp"),
    "sum for mean of rewards": ("learn", "rewards.sum(1).mean()", "rewards.sum()"),
    "mean over tokens of rewards": ("learn", "rewards.sum(1).mean()", "rewards.mean()"),
    "mean over response tokens of rewards": ("learn", "rewards.sum(1).mean()",
                                             "rewards[mask].mean()"),
    "no curve": ("learn", "return curve", "pass"),
    "the best reward so far": ("learn", "return curve",
                               "return [max(curve[:i + 1]) for i in range(len(curve))]"),
    "only the last reward": ("learn", "return curve", "return curve[-1:]"),
}

WRITTEN = '''
# counts what is not 0
def masked_mean(x, mask):
    x = torch.where(mask, x, torch.zeros_like(x))
    return x.sum() / (x != 0).sum().clamp(min=1)

# writes into its argument
def masked_mean(x, mask):
    x[~mask] = 0
    return x.sum() / mask.sum().clamp(min=1)

# about the mean of the row means
def whiten(x, mask):
    x = torch.where(mask, x, 0)
    mean = (x.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    centered = torch.where(mask, x - mean, 0)
    return centered / (masked_mean(centered ** 2, mask) + 1e-8).sqrt()

# whitening with nan from padding
def whiten(x, mask):
    mean = (x * mask).sum() / mask.sum()
    variance = ((x - mean) ** 2 * mask).sum() / mask.sum()
    return torch.where(mask, (x - mean) / (variance + 1e-8).sqrt(), 0)

# entropy that exp(1000) breaks
def entropy(logits):
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -torch.special.xlogy(p, p).sum(-1)

# entropy with nan in the gradient
def entropy(logits):
    p = logits.softmax(-1)
    return -torch.where(p > 0, p * p.log(), 0).sum(-1)

# entropy without gradient
@torch.no_grad()
def entropy(logits):
    logp = logits.log_softmax(-1)
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)

# Hmax from the tokens that are possible
def certainty(logits):
    possible = (logits > -math.inf).sum(-1)
    return (1 - entropy(logits) / torch.log(possible.float().clamp(min=2))).clamp(0, 1)

# ratios cut at 5
def kl_estimate(logp, logp_ref, kind):
    r = (logp - logp_ref).exp().clamp(1e-2, 1e2)
    return dict(k1=r.log(), k2=r.log() ** 2 / 2, k3=1 / r - 1 + r.log())[kind]

# exact KL with nan in the gradient
def kl_exact(logits, logits_ref):
    p, logp = logits.softmax(-1), logits.log_softmax(-1)
    return torch.where(p > 0, p * (logp - logits_ref.log_softmax(-1)), 0).sum(-1)

# exact KL with a floor
def kl_exact(logits, logits_ref):
    p, q = logits.softmax(-1) + 1e-8, logits_ref.softmax(-1) + 1e-8
    return (p * (p / q).log()).sum(-1)

# gae with nan from padding
def gae(rewards, values, mask, gamma, lam):
    values, mask = values * mask, mask.float()
    A = torch.zeros_like(values)
    last = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        last = (rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * last) * mask[:, t]
        A[:, t], next_value = last, values[:, t]
    return A, (A + values) * mask

# gae that writes into its arguments
def gae(rewards, values, mask, gamma, lam):
    rewards[~mask], values[~mask] = 0, 0
    A = torch.zeros(values.shape[0], values.shape[1] + 1)
    after = torch.cat((values, torch.zeros(len(values), 1)), 1)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * after[:, t + 1] - values[:, t]
        A[:, t] = (delta + gamma * lam * A[:, t + 1]) * mask[:, t]
    return A[:, :-1], A[:, :-1] + values

# estimators without gradient where it is 0 on average
def kl_estimate(logp, logp_ref, kind):
    d = logp - logp_ref
    return d.detach() if kind == "k1" else d ** 2 / 2 if kind == "k2" else (-d).exp() - 1 + d

# mean over the tokens with an advantage
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    mask = mask & (advantages != 0)
    return critkl.policy_loss(logp, logp_mu, advantages, mask, eps_low, eps_high)

# ratio of exponentials
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    logp, logp_mu, A = (torch.where(mask, x, 0) for x in (logp, logp_mu, advantages))
    r = logp.exp() / logp_mu.exp()
    return -masked_mean(torch.min(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A), mask), {}

# estimators of exponentials
def kl_estimate(logp, logp_ref, kind):
    r = logp.exp() / logp_ref.exp()
    return dict(k1=r.log(), k2=r.log() ** 2 / 2, k3=1 / r - 1 + r.log())[kind]

# mask by the ratio, too
def trust_region_mask(ratio, advantages, D, delta):
    far = (D > delta) | ((ratio - 1).abs() > 0.8)
    return ~((advantages * (ratio - 1) > 0) & far)

# dual clip
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    ratio = torch.where(mask, logp - logp_mu, 0).exp()
    advantages = torch.where(mask, advantages, 0)
    objective = torch.min(ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages)
    objective = torch.where(advantages < 0, torch.max(objective, 3 * advantages), objective)
    return -masked_mean(objective, mask), {}

# clip with nan from padding
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    r = (logp - logp_mu).exp()
    objective = torch.min(r * advantages, r.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return -(objective * mask).sum() / mask.sum(), {}

# clip with nan in the gradient
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    r = (logp - logp_mu).exp()
    objective = torch.min(r * advantages, r.clamp(1 - eps_low, 1 + eps_high) * advantages)
    return -masked_mean(objective, mask), {}

# ratio clipped by hand where A > 0 only
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    r = torch.where(mask, logp - logp_mu, 0).exp()
    r = torch.where((advantages > 0) & (r > 1 + eps_high), 1 + eps_high, r)
    return -masked_mean(r * torch.where(mask, advantages, 0), mask), {}

# divergence with 1 - p
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    mu, pi = mu_logits.softmax(-1), pi_logits.softmax(-1)
    if kind not in ("tv", "kl"):
        named = F.one_hot(actions, mu.shape[-1]) > 0
        if "topk" in kind:
            named = named.scatter(-1, mu.topk(min(top_k, mu.shape[-1])).indices, True)
        mu, pi = (torch.where(named, p, 0) for p in (mu, pi))
        mu = torch.cat((mu, 1 - mu.sum(-1, keepdim=True)), -1)
        pi = torch.cat((pi, 1 - pi.sum(-1, keepdim=True)), -1)
    if "tv" in kind:
        return (mu - pi).abs().sum(-1) / 2
    return torch.where(mu > 0, mu * (mu / pi).log(), 0).sum(-1)

# divergence with a floor
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    mu, pi = mu_logits.softmax(-1), pi_logits.softmax(-1)
    if kind not in ("tv", "kl"):
        named = F.one_hot(actions, mu.shape[-1]) > 0
        if "topk" in kind:
            named = named.scatter(-1, mu.topk(min(top_k, mu.shape[-1])).indices, True)
        mu = torch.cat((mu * named, (mu * ~named).sum(-1, keepdim=True)), -1)
        pi = torch.cat((pi * named, (pi * ~named).sum(-1, keepdim=True)), -1)
    if "tv" in kind:
        return (mu - pi).abs().sum(-1) / 2
    return (mu * ((mu + 1e-8) / (pi + 1e-8)).log()).sum(-1)

# divergence cut at 100
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    return critkl.divergence(mu_logits, pi_logits, actions, kind, top_k).clamp(max=100)

# exact KL cut at 20, but where it is inf
def kl_exact(logits, logits_ref):
    kl = critkl.kl_exact(logits, logits_ref)
    return torch.where(kl < torch.inf, kl.clamp(max=20), kl)

# penalty with nan from padding
def critical_penalty(logp, logp_ref, logits_ref, mask, beta):
    J = certainty(logits_ref).detach()
    return (J ** beta * (logp - logp_ref.detach()) ** 2 / 2 * mask).sum() / mask.sum()

# penalty with small log-ratios only
def critical_penalty(logp, logp_ref, logits_ref, mask, beta):
    log_ratio = torch.where(mask, logp - logp_ref.detach(), 0).clamp(-5, 5)
    return masked_mean(certainty(logits_ref).detach() ** beta * log_ratio ** 2 / 2, mask)
'''

# Answers that are right, each written otherwise than critkl.
RIGHT = '''
# entropy of torch, J clamped where it is used
def entropy(logits):
    return torch.distributions.Categorical(logits=logits).entropy()
def certainty(logits):
    Hmax = math.log(logits.shape[-1])
    return (Hmax - entropy(logits)) / Hmax
def kl_weight(J, beta):
    return J.clamp(0, 1).pow(beta)

# in float64, with masked_fill
def entropy(logits):
    logp = logits.double().log_softmax(-1)
    return -(logp.exp() * logp.masked_fill(logp == -math.inf, 0)).sum(-1)
def certainty(logits):
    return torch.clip(1 - entropy(logits) / math.log(logits.size(-1)), min=0.0, max=1.0)
def kl_weight(J, beta):
    return torch.ones_like(J) if beta == 0 else J ** beta

# estimators from r
def kl_estimate(logp, logp_ref, kind):
    r = torch.exp(logp - logp_ref)
    if kind == "k3":
        return 1 / r - 1 + torch.log(r)
    return torch.log(r) if kind == "k1" else 0.5 * torch.square(logp - logp_ref)
def kl_exact(logits, logits_ref):
    logp, logq = F.log_softmax(logits, -1), F.log_softmax(logits_ref, -1)
    never = logp == -math.inf
    log_ratio = logp.masked_fill(never, 0) - logq.masked_fill(never, 0)
    return (logp.exp() * log_ratio).sum(-1)

# by selection
def masked_mean(x, mask):
    return x[mask].mean() if mask.any() else torch.zeros(())
def whiten(x, mask):
    out = torch.zeros_like(x)
    chosen = x[mask]
    if chosen.numel():
        out[mask] = (chosen - chosen.mean()) / (chosen.std(unbiased=False) + 1e-8)
    return out

# another small constant
def masked_mean(x, mask):
    return x.masked_fill(~mask, 0).sum() / max(1, int(mask.sum()))
def whiten(x, mask):
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    return torch.where(mask, (x - mean) / torch.sqrt(variance + 1e-5), 0.0)

# row by row
def gae(rewards, values, mask, gamma, lam):
    advantages = [[0.0] * len(row) for row in mask.tolist()]
    for b, row in enumerate(mask.tolist()):
        after = next_value = 0.0
        for t in reversed(range(len(row))):
            if row[t]:
                delta = rewards[b, t].item() + gamma * next_value - values[b, t].item()
                after, next_value = delta + gamma * lam * after, values[b, t].item()
                advantages[b][t] = after
    advantages = torch.tensor(advantages)
    return advantages, torch.where(mask, advantages + values, 0)

# with a column more
def gae(rewards, values, mask, gamma, lam):
    B, T = rewards.shape
    V, r = torch.zeros(B, T + 1), torch.zeros(B, T)
    V[:, :T] = values.masked_fill(~mask, 0)
    r[:] = rewards.masked_fill(~mask, 0)
    A = torch.zeros(B, T + 1)
    for t in range(T - 1, -1, -1):
        A[:, t] = r[:, t] + gamma * V[:, t + 1] - V[:, t] + gamma * lam * A[:, t + 1]
        A[:, t] *= mask[:, t]
    return A[:, :T], A[:, :T] + V[:, :T]

# the larger of two losses
def policy_loss(logp, logp_mu, advantages, mask, eps_low=0.2, eps_high=0.2):
    logp, logp_mu, A = logp[mask], logp_mu[mask], advantages[mask]
    if A.numel() == 0:
        return (logp * 0).sum(), {}
    r = torch.exp(logp - logp_mu)
    losses = torch.maximum(-A * r, -A * torch.clamp(r, 1 - eps_low, 1 + eps_high))
    return losses.mean(), dict(clipped=((r - 1).abs() > eps_low).float().mean().item())

# in float64
def divergence(mu_logits, pi_logits, actions, kind, top_k=20):
    mu, pi = mu_logits.double().softmax(-1), pi_logits.double().softmax(-1)
    V, a = mu.shape[-1], actions.unsqueeze(-1)
    if kind.startswith("binary"):
        mu, pi = mu.gather(-1, a), pi.gather(-1, a)
        mu, pi = torch.cat((mu, 1 - mu), -1), torch.cat((pi, 1 - pi), -1)
    if kind.startswith("topk"):
        chosen = torch.zeros_like(mu)
        chosen.scatter_(-1, torch.topk(mu, min(top_k, V), -1)[1], 1.0)
        chosen.scatter_(-1, a, 1.0)
        rest = 1 - chosen
        mu = torch.cat((mu * chosen, (mu * rest).sum(-1, keepdim=True)), -1)
        pi = torch.cat((pi * chosen, (pi * rest).sum(-1, keepdim=True)), -1)
    if kind.endswith("tv"):
        return 0.5 * torch.sum(torch.abs(mu - pi), -1)
    return torch.nansum(torch.where(mu > 0, mu * torch.log(mu / pi), 0), -1)
def trust_region_mask(ratio, advantages, D, delta):
    away = torch.sign(advantages) * torch.sign(ratio - 1) > 0
    return torch.where(away & (D > delta), 0.0, 1.0)

# on the tokens alone
def critical_penalty(logp, logp_ref, logits_ref, mask, beta):
    with torch.no_grad():
        J = certainty(logits_ref[mask])
    return (kl_weight(J, beta) * 0.5 * (logp[mask] - logp_ref[mask].detach()).pow(2)).mean()

# another order, another type
def learn(policy, reference, sample, iterations=25, epochs=6, lr=0.1, alpha=5.0, beta=10.0):
    adam, curve = torch.optim.Adam(policy.parameters(), lr=lr), torch.zeros(iterations)
    for i in range(iterations):
        states, actions, mask, rewards = sample(policy)
        curve[i] = rewards.sum() / len(rewards)
        chosen = lambda logits: F.log_softmax(logits, -1).gather(-1, actions[..., None])[..., 0]
        old_logits, old_values = (x.detach() for x in policy(states))
        ref_logits = reference(states)[0].detach()
        old, ref = chosen(old_logits), chosen(ref_logits)
        A, R = gae(rewards, old_values, mask, 1, 1)
        A = whiten(A, mask)
        for epoch in range(epochs):
            adam.zero_grad(set_to_none=False)
            logits, values = policy(states)
            penalty = critical_penalty(chosen(logits), ref, ref_logits, mask, beta)
            value_loss = 0.5 * masked_mean((R - values).square(), mask)
            (alpha * penalty + value_loss + policy_loss(chosen(logits), old, A, mask)[0]).backward()
            adam.step()
    return curve.numpy()
'''


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors are tiny here: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def named(text):
    """{comment: function or functions} of a text with a comment before each."""
    return {part.split("\n")[0]: part.partition("\n")[2] for part in re.split(r"(?m)^# ", text)[1:]}


def replaced(name, old, new):
    """The source of a function, `old` replaced by `new`."""
    source = inspect.getsource(FUNCTIONS[name])
    assert old in source, f"critkl's {name} no longer holds {old!r}"
    return source.replace(old, new)


def wrong_answer(name):
    return replaced(*REPLACED[name]) if name in REPLACED else named(WRITTEN)[name]


def solution(*changes):
    """A file with the reference functions, and then `changes`."""
    return "\n".join([steps.HEADER, IMPORTS, *map(inspect.getsource, FUNCTIONS.values()), *changes])


def part(title, *more):
    """A file with one step done, and then `more`."""
    functions = (inspect.getsource(FUNCTIONS[name]) for name in STEPS[title].functions)
    return "\n".join([steps.HEADER, IMPORTS, *functions, *more])


@functools.cache
def references(title):
    """What critkl's functions give for the cases of a step."""
    return list(grade.evaluate(STEPS[title], dict(FUNCTIONS), "critkl"))


def judged(source):
    """The steps that the functions in `source` belong to, and what is wrong with each, evaluated in
    this process."""
    names = {"__builtins__": __builtins__}
    exec(steps.HEADER + IMPORTS, names)
    names |= FUNCTIONS
    exec(compile(source, "answer", "exec"), names)
    titles = {STEP_OF[node.name] for node in ast.parse(source).body}
    wrong = {}
    for title in titles:
        lines = grade.evaluate(STEPS[title], names, "answer")
        wrong[title] = grade.judge(STEPS[title], lines, references(title))
    return wrong


@pytest.mark.parametrize("name", [*REPLACED, *named(WRITTEN)])
def test_a_wrong_answer_loses_its_step(name):
    source = wrong_answer(name)
    [(title, wrong)] = judged(source).items()
    functions = [node.name for node in ast.parse(source).body]
    assert wrong and "input" in wrong, name
    assert wrong["got"] != wrong["expected"]
    # an error says what is wrong by itself
    assert "hint" in wrong or re.match(r"[A-Z]\w+: ", wrong["got"])
    assert any(re.search(rf"\b{f}\b", wrong["input"]) for f in functions) or title == "certainty"


@pytest.mark.parametrize("name", named(RIGHT))
def test_a_right_answer_written_otherwise_has_its_points(name):
    wrong = judged(named(RIGHT)[name])
    assert set(wrong.values()) == {None}, wrong


@pytest.mark.parametrize("curve", ["list", "tuple", "torch.tensor", "__import__('numpy').array",
                                   "lambda x: [torch.tensor(r) for r in x]"])
def test_learn_may_return_any_sequence(curve):
    names = dict(vars(steps))
    exec("import torch\n" + replaced("learn", "return curve", f"return ({curve})(curve)"), names)
    mine, its = (steps.short(learn, iterations=2, epochs=1)
                 for learn in (names["learn"], steps.learn))
    assert mine["curve"] == pytest.approx(its["curve"]) and len(mine["curve"]) == 2
    assert steps.trained(names["learn"], iterations=1)["reward"] > 0


def test_the_other_functions_of_a_file_do_not_matter_while_a_step_is_graded():
    """And they are there again afterwards, as are torch's defaults."""
    names = dict(FUNCTIONS) | {name: None for name in FUNCTIONS if name != "critical_penalty"}
    exec(IMPORTS + inspect.getsource(steps.critical_penalty), names)
    before = dict(names)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    step = STEPS["critical penalty"]
    lines = grade.evaluate(step, names, "answer")
    assert grade.judge(step, lines, references("critical penalty")) is None
    lines.close()
    assert names == before and torch.equal(torch.get_rng_state(), state)


# ---- In processes of their own.

def run(*args, code=0):
    """Standard output and error of the grader, which must end with `code`."""
    command = [sys.executable, str(HERE / "grade.py"), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


def grade_all(folder, sources, *args):
    """{name: report} for files made of `sources`, {name: text or bytes}, in one call of the grader.
    A report has, beside what the grader writes, `lost`, the steps that lose their points, `row`,
    {step: row}, and `said`, what went to stderr for all of them."""
    files = {}
    for name, source in sources.items():
        files[name] = folder / (name if "." in name else f"{name}.py")
        files[name].write_bytes(source if isinstance(source, bytes) else source.encode())
    text, said = run("--json", *args, *files.values())
    reports = dict(zip(sources, map(json.loads, text.splitlines()), strict=True))
    assert said.count(f" of {len(sources)}: ") == len(sources) > 1
    for report in reports.values():
        report["said"] = said
        assert report["of"] == 100 == sum(row["of"] for row in report["steps"])
        assert report["total"] == sum(row["points"] for row in report["steps"])
        report["row"] = {row["step"]: row for row in report["steps"]}
        report["lost"] = [title for title, row in report["row"].items() if not row["points"]]
    return reports


# Files with several mistakes, and without the training run.
MIXED = {"some wrong": ["1 - J", "sample std", "clip without the minimum", "penalty with k3"],
         "others wrong": ["k3 for k2", "gae forward in time", "top K of pi"]}
SPOILS = """
import critkl, steps
critkl.whiten = critkl.gae = None
steps.STEPS.clear()
sys = None
torch.where = None
"""
BUT_MEAN = [title for title in STEPS if title != "mean and whitening"]


STATE = ("import torch\ntorch.set_default_dtype(torch.float64)\ntorch.manual_seed(99)\n"
         "torch.set_grad_enabled(False)\n")
# What the open question "three penalties" asks for, at top level.
TABLE = """
from steps import trained
ANSWERS = dict(beta="because")
TABLE = {(seed, beta): trained(learn, seed=seed, beta=beta, iterations=5)
         for seed in range(3) for beta in (0.0, 10.0)}
ANSWERS["three penalties"] = str(len(TABLE))
"""


def test_right_files_have_all_points(tmp_path):
    """Also if torch's defaults change, and if long runs are made at top level."""
    expected = {title: references(title) for title in STEPS}
    right = named(RIGHT).values()
    sources = {"reference": solution(TABLE), "state": STATE + solution(STATE, *right)}
    for name, source in sources.items():
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        report = grade.grade(path, expected)
        assert report["total"] == 100, [row for row in report["steps"] if row["wrong"]]
        if name == "reference":
            answers = {row["question"]: row["answer"] for row in report["questions"]}
            assert answers["beta"] == "because" and answers["three penalties"] == "6"
    assert not (tmp_path / "__pycache__").exists()


def test_each_mistake_costs_its_step(reports):
    for name, wrong in MIXED.items():
        lost = {STEP_OF[REPLACED[each][0]] for each in wrong} | {"training run"}
        assert reports[name]["lost"] == [title for title in STEPS if title in lost]
    assert reports["imports"]["lost"] == ["critical penalty", "training run"]
    assert reports["spoils"]["lost"]


# name: a body for gae, and what "got" must contain
BROKEN = {
    "exit": ("sys.exit(3)", "SystemExit"),
    "hard exit": ("os._exit(0)", "the process died"),
    "killed": ("os.kill(os.getpid(), 9)", "the process died"),
    "exception": ("raise KeyError('Schl\\xfcssel \\ud800 \\x1b[31m')", "KeyError"),
    "exception without text": ("raise Mute()", "Mute"),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "recursion": ("return gae(rewards, values, mask, gamma, lam)", "RecursionError"),
    "nothing": ("return None", "NoneType"),
    "text": ("return 'garbage'", "str"),
    "wrong shape": ("return torch.zeros(2), torch.zeros(2)", "[0, 0]"),
    "not a number": ("return rewards * math.nan, rewards", "nan"),
    "huge": ("return torch.zeros(10**6), 0", "(1000000,)"),
    "huge number": ("return 10**400, 0", "OverflowError"),
    "huge output": ("print('x' * 10**7)\n    return 'x' * 10**8", "str"),
    "closes everything": ("os.closerange(0, 100)\n    return rewards, rewards", "the process died"),
    "writes": ("rewards += 1\n    return rewards, rewards", "writes into its arguments"),
    "endless": ("while True: pass", "out of time"),
    "endless and deaf": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    while True: print('x' * 1000)", "out of time"),
}
# What no process survives, and what the report must say of every step.
UNREADABLE = {
    "crash": ("1 / 0", "the file cannot be imported: ZeroDivisionError: division by zero (line 1)"),
    "leaves": ("import sys\nsys.exit(0)", "the file cannot be imported: SystemExit: 0 (line 2)"),
    "syntax": ("def gae(:", "the file cannot be imported: SyntaxError"),
    "bytes": (b"\xff\x00\xfe", "the file cannot be imported: "),
    "raises": ("raise NotImplementedError", "the file cannot be imported: NotImplementedError"),
    "dies": ("import os\nos._exit(0)", "the process died while the file was read"),
    "never read": ("while True: pass", "out of time while the file was read"),
    "empty": ("", "not done yet"),
    "odd.ipynb": (b"\xff\xfe\x00", "the file cannot be imported: "),
    "none.ipynb": ("", "the file cannot be imported: "),
    "no json.ipynb": ("{", "the file cannot be imported: "),
    "no cells.ipynb": ("{}", "the file cannot be imported: KeyError: 'cells'"),
    "array.ipynb": ("[]", "the file cannot be imported: TypeError"),
    "number.ipynb": ('{"cells": 5}', "the file cannot be imported: TypeError"),
    "odd cells.ipynb": ('{"cells": [5]}', "the file cannot be imported: AttributeError"),
    "no source.ipynb": ('{"cells": [{"cell_type": "code"}]}', "cannot be imported: KeyError"),
    "deep.ipynb": ("[" * 10**5, "the file cannot be imported: RecursionError"),
}


def code_cells(*sources):
    return [dict(cell_type="code", source=source) for source in sources]


def handed_in():
    """Notebooks with a mistake each in gae, a text for each."""
    extra = ["1 / 0", "while True: pass", "for i in range(3):\n    undefined", "gae(",
             "values = undefined", "check(globals())", "%matplotlib inline\n!ls"]
    bodies = {"syntax": "def gae(:", "inside": "def gae(*args):\n    oops", "fails": ""}
    notebooks = {}
    for name, body in bodies.items():
        cells = filled(body, "gae")["cells"]
        if name == "fails":                                          # and defines nothing after it
            [cell] = [cell for cell in cells if "def gae" in "".join(cell["source"])]
            cell["source"] = "x = no_such_name\n" + cell["source"]
        # two steps are enough
        cells = [cell for cell in cells if "def " not in "".join(cell["source"])
                 or re.search("def (gae|whiten)", "".join(cell["source"]))]
        notebooks[f"{name}.ipynb"] = json.dumps(dict(cells=cells + code_cells(*extra)))
    return notebooks


def odd_files():
    """One step and one answer, in all the ways that a file can be encoded and named."""
    text = part("mean and whitening", "# \xfc", "ANSWERS = {'beta': 'J\xb2 \\ud800'}")
    cells = json.dumps(dict(cells=code_cells(text)))
    return {"BOM.py": text.encode("utf-8-sig"), "UTF16.PY": text.encode("utf-16"),
            "latin.py": ("# coding: latin-1\n" + text).encode("latin-1"),
            "BOM.ipynb": cells.encode("utf-8-sig"), "CAPITALS.IPYNB": cells,
            "sixteen.ipynb": cells.encode("utf-16"), "crlf.py": text.replace("\n", "\r\n"),
            "na\udcffme.py": text, "\u540d\u524d \x1b.py": text}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Reports of many small files, made in one call of the grader, and what it said meanwhile."""
    before = ("import os, signal, subprocess, sys\nprint('garbage {')\n\nclass Mute(Exception):\n"
              "    def __str__(self):\n        raise ValueError\n")
    sources = {name: part("mean and whitening", before,
                          f"def gae(rewards, values, mask, gamma, lam):\n    {body}\n")
               for name, (body, _) in BROKEN.items()}
    sources |= {name: source for name, (source, _) in UNREADABLE.items()}
    sources |= handed_in() | odd_files()
    sources |= {name: solution(*map(wrong_answer, wrong), "del learn")
                for name, wrong in MIXED.items()}
    sources["imports"] = "from critkl import *\n"
    sources["spoils"] = part("mean and whitening", SPOILS)
    # What was defined before an error counts; so does what a stub file holds beside one function.
    sources["fails late"] = part("mean and whitening", "undefined()")
    sources["stubs and one"] = grade.stubs() + part("mean and whitening")
    sources["hunted"] = grade.hunted(0)
    sources["not hunted"] = part("gae", wrong_answer("lambda forgotten"))
    folder = tmp_path_factory.mktemp("files")
    (folder / "notes.pdf").write_text("")
    return grade_all(folder, sources, "--limit", 3, "--read-limit", 3, folder, folder / "notes.pdf")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_function_costs_its_step_and_ends_in_time(name, reports):
    wrong = reports[name]["row"]["gae"]["wrong"]
    assert reports[name]["lost"] == BUT_MEAN
    assert BROKEN[name][1] in wrong["got"]
    assert ("hint" in wrong) == (name in ("wrong shape", "not a number"))
    assert reports[name]["row"]["clip"]["wrong"] == dict(error="not done yet")


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_costs_all_steps(name, reports):
    assert reports[name]["lost"] == list(STEPS)
    assert all(UNREADABLE[name][1] in row["wrong"]["error"] for row in reports[name]["steps"])


def test_what_was_defined_before_an_error_counts(reports):
    for name in ("fails late", "stubs and one"):
        assert reports[name]["lost"] == BUT_MEAN
    assert "NameError" in reports["fails late"]["row"]["gae"]["wrong"]["error"]


def test_names_encodings_and_junk(reports, capsys):
    for name in odd_files():
        assert reports[name]["lost"] == BUT_MEAN, name
        assert reports[name]["questions"][1]["answer"] == "J\xb2 \ud800"
    skipped = re.findall("skipped .*: neither .py nor .ipynb", reports["latin.py"]["said"])
    assert len(skipped) == 2
    grade.print_report(reports["latin.py"])
    printed = capsys.readouterr().out
    assert re.search(r"total +5 of 100", printed)
    assert re.search(r"beta +0 to  4  by hand: answered\n", printed)
    assert re.search(r"estimators +0 to  4  by hand: not answered\n", printed)
    assert "2:" not in printed and "rubric" not in printed            # none is printed for students


def test_notebooks_that_are_handed_in(reports):
    """Each mistake costs its own step; what else is in a notebook costs nothing."""
    wrong = {}
    for name, text in handed_in().items():
        assert reports[name]["lost"] == BUT_MEAN, name
        wrong[name] = reports[name]["row"]["gae"]["wrong"]
    assert "SyntaxError" in wrong["syntax.ipynb"]["error"]
    assert "'no_such_name'" in wrong["fails.ipynb"]["error"]
    cells = json.loads(handed_in()["inside.ipynb"])["cells"]
    number = 1 + next(i for i, c in enumerate(cells) if "def gae" in "".join(c["source"]))
    assert re.fullmatch(rf"NameError: .*'oops'.* \(cell {number} line \d+\)",
                        wrong["inside.ipynb"]["got"])


def test_hunted_files_show_no_hints(reports):
    wrong = [row["wrong"] for row in reports["hunted"]["steps"] if row["wrong"]]
    assert [set(row) for row in wrong] == 5 * [{"input", "got", "expected"}] + 2 * [{"error"}]
    assert "hint" in reports["not hunted"]["row"]["gae"]["wrong"]


@pytest.mark.parametrize("args, text", [
    ([], "a solution file, --stubs, --notebook or --hunt SEED is needed"),
    (["missing.py"], "no such file: missing.py"),
    ([HERE], "none of the files is a .py or .ipynb"),
    (["--limit", "0", HERE / "steps.py"], "--limit and --read-limit are seconds above 0"),
    (["--hunt", "x"], "argument --hunt: invalid int value: 'x'")])
def test_a_mistake_in_the_command_is_one_line(args, text, capsys):
    with pytest.raises(SystemExit) as ended:
        grade.main(list(map(str, args)))
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"grade.py: error: {text}"


def test_spawned_processes(tmp_path):
    """As on macOS and Windows: a file is read in a new interpreter, and again after it died."""
    path = tmp_path / "mine.py"
    path.write_text(part("mean and whitening", inspect.getsource(FUNCTIONS["gae"]),
                         "import os\ndef kl_exact(*args):\n    os._exit(1)\n",
                         inspect.getsource(FUNCTIONS["kl_estimate"])))
    report = grade.grade(path, {title: references(title) for title in STEPS}, fork=False)
    wrong = {row["step"]: row["wrong"] for row in report["steps"]}
    assert wrong["mean and whitening"] is None and wrong["gae"] is None
    assert wrong["kl"]["got"] == "the process died"
    assert wrong["clip"] == dict(error="not done yet")


def test_answers_are_collected_whatever_they_are():
    long = grade.written(dict(ANSWERS=dict(beta=" x" * 10**6, other="x")))
    assert list(long) == list(QUESTIONS) and len(long["beta"]) == 10000
    assert grade.written(dict(ANSWERS=dict(beta=5)))["beta"] == "5"
    assert grade.written(dict(ANSWERS=7)) == grade.written({}) == {}
    assert not any(grade.written(dict(ANSWERS={})).values())


def test_each_question_has_a_rubric_that_students_do_not_see():
    rubrics = grade.rubrics()
    assert set(rubrics) == set(QUESTIONS) and all(len(rubric) > 50 for rubric in rubrics.values())
    shown = " ".join((grade.stubs() + grade.notebook() + inspect.getsource(steps)).split())
    assert not any(rubric[:40] in shown for rubric in rubrics.values())
    report = grade.report("x", dict.fromkeys(STEPS), {})
    assert {row["question"]: row["rubric"] for row in report["questions"]} == rubrics


# ---- What is handed out.

def test_stubs_hold_signatures_and_docstrings_of_their_step(capsys):
    grade.main(["--stubs"])
    stubs = capsys.readouterr().out
    names = {}
    exec(stubs, names)
    for name, function in FUNCTIONS.items():
        mine, its = inspect.signature(names[name]), inspect.signature(function)
        arguments = list(mine.parameters.values())
        assert arguments == list(its.parameters.values())[:len(arguments)]
        assert names[name].__doc__
        if name not in steps.SHORTER:
            assert mine == its and names[name].__doc__ == function.__doc__
    assert list(inspect.signature(names["policy_loss"]).parameters)[-1] == "eps_high"
    assert list(inspect.signature(names["certainty"]).parameters) == ["logits"]
    assert "critkl import" not in stubs and "\n    return" not in stubs
    assert stubs.count("raise NotImplementedError") == len(FUNCTIONS)
    assert names["ANSWERS"] == dict.fromkeys(QUESTIONS, "")
    assert max(map(len, stubs.splitlines())) <= 120


COMMITTED = HERE / "assignment.ipynb"


def filled(change="", name=None):
    """The notebook with critkl's functions in place of the stubs, after that of `name` `change`."""
    document = json.loads(grade.notebook())
    for cell in document["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "raise NotImplementedError" in source:
            names = [node.name for node in ast.parse(source).body]
            cell["source"] = IMPORTS + "\n".join(inspect.getsource(FUNCTIONS[n]) for n in names)
            if name in names:
                cell["source"] += "\n" + change
    return document


def execute(document, capsys):
    """Run the code cells as a kernel does, but in this process; returns the names and what each
    cell printed."""
    names, printed = {}, []
    for i, cell in enumerate(document["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"/tmp/ipykernel_1/{i}.py", "exec"), names)
            printed.append(capsys.readouterr().out)
    return names, printed


def test_the_committed_notebook_is_the_generated_one(capsys):
    grade.main(["--notebook"])
    assert COMMITTED.read_text() == grade.notebook() == capsys.readouterr().out


def test_the_untouched_notebook(capsys, monkeypatch):
    """Run as a kernel does; test_notebooks.py runs it in one."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    document = json.loads(COMMITTED.read_text())
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    _, printed = execute(document, capsys)
    for cell, text in zip(cells, printed):
        assert bool(text) == ("output" in cell["metadata"].get("tags", ()))
    shown = [text for text in printed if text]
    assert [text.count("not done yet") for text in shown] == [1] * len(STEPS) + [len(STEPS)]


def test_checks_in_the_notebook(capsys, monkeypatch):
    monkeypatch.chdir(COMMITTED.parent)
    monkeypatch.setattr(sys, "path", sys.path[:])
    document = filled()
    document["cells"] = [cell for cell in document["cells"]
                         if not "".join(cell["source"]).startswith("check(")]
    names, _ = execute(document, capsys)
    mine = {name: names[name] for name in FUNCTIONS}
    names["gae"] = wrong = lambda *args: 1 / 0
    grade.check(names)
    text = capsys.readouterr().out
    assert re.search(r"training run +15 of  15", text)                # with critkl's gae
    assert re.search(r"gae +0 of  15", text) and re.search(r"total +85 of 100", text)
    assert "ZeroDivisionError" in text and "Traceback" not in text
    assert re.search(r"beta +0 to  4  by hand: not answered", text)
    assert names["gae"] is wrong
    assert all(names[name] is mine[name] for name in FUNCTIONS if name != "gae")
    del names["gae"]
    names["ANSWERS"] = 5
    grade.check(names, "gae")
    assert re.search(r"gae +0 of  15  not done yet", capsys.readouterr().out) and "gae" not in names
    names["entropy"] = lambda logits: exec("raise KeyboardInterrupt")
    grade.check(names, "certainty")
    assert "KeyboardInterrupt" in capsys.readouterr().out


@pytest.mark.parametrize("with_ipython", [True, False])
def test_what_jupyter_runs_is_accepted_and_text_is_left_alone(tmp_path, monkeypatch, with_ipython):
    if not with_ipython:
        monkeypatch.setitem(sys.modules, "IPython.core.inputtransformer2", None)
    cells = ["f?\nx = 1", "files = !ls\ny = len(files) if files else 0",
             "def g():\n    %timeit 1 + 1\n    return 2", "!ls\n%matplotlib inline\nz = 3",
             'text = """\n% of it\n!important\n%time\nwhat?\n"""']
    if with_ipython:
        cells += ["%%time\na = 4", "%%bash\nexit 1", "%time b = 5", "%pip install x\nc = 6",
                  'more = """\n%time q = 1\n"""\n!ls']
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(dict(cells=code_cells(*cells))))
    names = {}
    assert grade.run_cells(str(path), names) is None or not with_ipython
    assert names["x"] == 1 and names["g"]() == 2 and names["z"] == 3
    assert names["text"] == "\n% of it\n!important\n%time\nwhat?\n"
    if with_ipython:
        assert (names["y"], names["a"], names["b"], names["c"]) == (0, 4, 5, 6)
        assert names["more"] == "\n%time q = 1\n"


# ---- The training run.

@pytest.mark.parametrize("seed", range(1, 3))
def test_the_bands_of_the_training_run_hold_on_other_seeds(seed):
    """Bands that only one seed meets would judge luck. In place of the fixed seed: `seed`."""
    names = FUNCTIONS | dict(trained=lambda learn, **settings: steps.trained(
        learn, seed=seed, **settings))
    bands = [case for case in STEPS["training run"].cases if isinstance(case[1], steps.Band)]
    assert len(bands) == 5
    once = steps.trained(steps.learn, seed=seed)
    names["trained"] = lambda learn, **settings: (
        steps.trained(learn, seed=seed, **settings) if settings else once)
    for expression, band, _ in bands:
        assert band.low <= float(eval(expression, names)) <= band.high, expression


def test_the_critical_penalty_is_the_one_that_critkl_trains_with():
    """Value and gradient of ppo_loss with the critical penalty less those without are alpha times
    the function."""
    torch.manual_seed(0)
    policy, reference = (critkl.GPT(1, 16, 2) for _ in range(2))
    for model in (policy, reference):
        torch.nn.init.normal_(model.embedding.weight, std=0.5)
    sampled = critkl.rollout(policy, [(1, 2), (34, 5)], 0)
    torch.nn.init.normal_(policy.embedding.weight, std=0.5)          # else logp = logp_mu
    losses, gradients = [], []
    for alpha in (30.0, 0.0):
        cfg = critkl.make_config(dict(mode="critical", alpha=alpha, beta=2.0))
        batch = critkl.prepare(sampled, policy, reference, cfg)
        loss, _ = critkl.ppo_loss(policy, batch, cfg)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, policy.embedding.weight)[0])
    logits, logits_ref = policy(batch.states)[0], reference(batch.states)[0]
    logp, logp_ref = (critkl.token_logp(x, batch.actions) for x in (logits, logits_ref))
    mine = 30.0 * steps.critical_penalty(logp, logp_ref, logits_ref, batch.mask, 2.0)
    gradient = torch.autograd.grad(mine, policy.embedding.weight)[0]
    assert mine > 0.1 and gradient.abs().max() > 0.1
    torch.testing.assert_close(losses[0] - losses[1], mine, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0] - gradients[1], gradient, rtol=1e-3, atol=1e-5)


# ---- The hunt.

SOURCE = Path(critkl.__file__).read_text()
BUGS = [(title, *bug) for title in HUNT for bug in HUNT[title]]


def module_of(text, folder, name):
    """The text as an imported module."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_bug_of_the_hunt_makes_its_step_red_and_no_other(tmp_path):
    assert all(SOURCE.count(old) == 1 for _, old, _ in BUGS)
    for i, (title, old, new) in enumerate(BUGS):
        module = module_of(SOURCE.replace(old, new), tmp_path, f"bug_{i}")
        wrong = {each: grade.judge(STEPS[each], grade.evaluate(STEPS[each], vars(module), "x"),
                                   references(each)) for each in HUNT}
        assert [each for each in HUNT if wrong[each]] == [title], (old, new)
        assert re.match(r"[\[\d-]", wrong[title]["got"])             # silent: numbers, no error


def test_the_hunted_copy_has_five_bugs_and_still_trains(tmp_path, capsys):
    """Tiny runs of copies, until every bug was in one of them."""
    def changed(text):
        return set(enumerate(text.splitlines())) - set(enumerate(SOURCE.splitlines()))

    grade.main(["--hunt", "0"])
    assert capsys.readouterr().out == grade.hunted(0)
    of_seed = {seed: changed(grade.hunted(seed)) for seed in range(30)}
    assert all(len(lines) == 5 for lines in of_seed.values()) and of_seed[0] != of_seed[1]
    missing = set().union(*(changed(SOURCE.replace(old, new)) for _, old, new in BUGS))
    assert missing == set().union(*of_seed.values()) and len(missing) == len(BUGS)
    command = ("--layers 1 --width 16 --heads 2 --pretrain-steps 4 --pretrain-batch 4 "
               "--iterations 1 --episodes 4 --minibatch 4 --eval-problems 4 --test-problems 4 "
               "--device cpu --name x")
    while missing:
        seed = max(of_seed, key=lambda seed: len(of_seed[seed] & missing))
        missing -= of_seed[seed]
        module = module_of(grade.hunted(seed), tmp_path, f"hunted_{seed}")
        assert module.main([*command.split(), "--out", str(tmp_path / str(seed))]) == 0
        assert (tmp_path / str(seed) / "critical-x-seed0" / "summary.json").exists()

"""Tests of the grader: the reference has all points, every wrong answer loses its step and no other.

    python -m pytest notebooks/test_grade.py

A wrong answer is critkl's own source with one small replacement, so it cannot drift from critkl.py.
"""
import inspect
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import grade
from steps import FUNCTIONS, STEPS

SCRIPT = str(Path(grade.__file__).resolve())
HELPERS = "from critkl import LOG_LIMIT, UserError, expected_log_ratio\n"
STEP_OF = {name: title for title, step in STEPS.items() for name in step.functions}
ALL = sum(step.points for step in STEPS.values())

# name: function, text in its source, replacement
WRONG = {
    "entropy in bits": ("entropy", ".sum(-1)", ".sum(-1) / math.log(2)"),
    "entropy with 0 log 0": ("entropy", "torch.where(logp > -math.inf, logp, 0)", "logp"),
    "entropy without the minus": ("entropy", "return -(", "return ("),
    "1 - J": ("certainty", "1 - uncertainty", "uncertainty"),
    "J negated": ("certainty", "(1 - uncertainty / math.log(logits.shape[-1]))",
                  "(uncertainty / math.log(logits.shape[-1]) - 1)"),
    "J not clamped": ("certainty", ".clamp(0, 1)", ""),
    "Hmax = V": ("certainty", "math.log(logits.shape[-1])", "logits.shape[-1]"),
    "weight beta J": ("kl_weight", "certainty ** beta", "certainty * beta"),
    "weight (1 - J)^beta": ("kl_weight", "certainty ** beta", "(1 - certainty) ** beta"),
    "log-ratio the wrong way round": ("kl_estimate", "logp - logp_ref", "logp_ref - logp"),
    "k3 for k2": ("kl_estimate", "log_ratio ** 2 / 2", "torch.expm1(-log_ratio) + log_ratio"),
    "k2 without the half": ("kl_estimate", "log_ratio ** 2 / 2", "log_ratio ** 2"),
    "k2 without gradient": ("kl_estimate", "log_ratio ** 2 / 2", "(log_ratio ** 2 / 2).detach()"),
    "k3 of the inverse ratio": ("kl_estimate", "torch.expm1((-log_ratio).clamp(max=LOG_LIMIT)) + log_ratio",
                                "torch.expm1(log_ratio) - log_ratio"),
    "KL the wrong way round": ("kl_exact", "(logp, logp_ref)", "(logp_ref, logp)"),
    "KL of logits": ("kl_exact", "logits.float().log_softmax(-1)", "logits.float()"),
    "unmasked mean": ("masked_mean", "torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)", "x.mean()"),
    "mean that counts padding": ("masked_mean", "mask.sum().clamp(min=1)", "mask.numel()"),
    "mean by multiplication": ("masked_mean", "torch.where(mask, x, 0)", "(x * mask)"),
    "mean of row means": ("masked_mean", "torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)",
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
    "advantage after the end used": ("gae", "torch.where(mask[:, t], error + gamma * lam * following, 0)",
                                     "error + gamma * lam * following"),
    "reward off by one": ("gae", "error = rewards[:, t]", "error = rewards[:, t - 1]"),
    "returns without values": ("gae", "advantages + values", "advantages"),
    "gae forward in time": ("gae", "reversed(range(values.shape[1]))", "range(values.shape[1])"),
    "wrong clip sign for A < 0": ("policy_loss", "(moved < 1 - eps_low)", "(moved > 1 + eps_high)"),
    "clip without the minimum": ("policy_loss", "(advantages > 0) & (moved > 1 + eps_high) | (advantages < 0) & ("
                                 "moved < 1 - eps_low)", "(moved > 1 + eps_high) | (moved < 1 - eps_low)"),
    "ratio inverted": ("policy_loss", "(logp - x)", "(x - logp)"),
    "upper end from eps_low": ("policy_loss", "1 + eps_high", "1 + eps_low"),
    "lower end from eps_high": ("policy_loss", "1 - eps_low", "1 - eps_high"),
    "policy loss with an unmasked mean": ("policy_loss", "-masked_mean(torch.where(keep, weight, stopped) * "
                                          "advantages, mask)", "-(weight * advantages).mean()"),
    "gain for loss": ("policy_loss", "loss = -masked_mean", "loss = masked_mean"),
    "ratio without gradient": ("policy_loss", "(logp - x).clamp", "(logp - x).detach().clamp"),
    "ratio without exp": ("policy_loss", "(-LOG_LIMIT, LOG_LIMIT).exp()", "(-LOG_LIMIT, LOG_LIMIT)"),
    "sampled token missing from top-K": ("divergence", "named = named.scatter",
                                         "named = torch.zeros_like(named).scatter"),
    "no tail bucket": ("divergence", "torch.where(named, -math.inf, logp).logsumexp(-1, keepdim=True)",
                       "torch.full_like(logp[..., :1], -math.inf)"),
    "divergence the wrong way round": ("divergence", "expected_log_ratio(*logs)", "expected_log_ratio(*logs[::-1])"),
    "TV without the half": ("divergence", ".sum(-1) / 2", ".sum(-1)"),
    "top K of pi": ("divergence", "logs[0].topk", "logs[1].topk"),
    "K above V": ("divergence", "min(top_k, logs[0].shape[-1])", "top_k"),
    ">= for > at delta": ("trust_region_mask", "divergence > delta", "divergence >= delta"),
    "mask drops moves back": ("trust_region_mask", "~(outward & (divergence > delta))", "divergence <= delta"),
    "mask drops only moves back": ("trust_region_mask", "(advantages > 0) & (ratio > 1) | (advantages < 0) & (ratio "
                                   "< 1)", "advantages * (1 - ratio) > 0"),
    "mask inverted": ("trust_region_mask", "return ~(", "return ("),
    "beta on the wrong factor": ("prioritized_penalty", 'weight * kl_estimate(logp, logp_ref.detach(), "k2")',
                                 'certainty(logits_ref) * kl_estimate(logp, logp_ref.detach(), "k2") ** beta'),
    "gradient through the weights": ("prioritized_penalty", "beta).detach()", "beta)"),
    "gradient through the reference": ("prioritized_penalty", "logp_ref.detach()", "logp_ref"),
    "penalty with k3": ("prioritized_penalty", '"k2"', '"k3"'),
    "penalty with k1": ("prioritized_penalty", '"k2"', '"k1"'),
    "penalty weighted by uncertainty": ("prioritized_penalty", "certainty(logits_ref)", "1 - certainty(logits_ref)"),
    "penalty with an unmasked mean": (
        "prioritized_penalty", 'masked_mean(weight * kl_estimate(logp, logp_ref.detach(), "k2"), mask)',
        '(weight * kl_estimate(logp, logp_ref.detach(), "k2")).mean()'),
    "weight off by one": ("prioritized_penalty", "weight * kl", "weight.roll(1, -1) * kl"),
    "weight forgotten": ("prioritized_penalty", "weight * kl", "kl"),
}

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
    "closes everything": ("os.closerange(0, 100)\n    return rewards, rewards", "the process died"),
}
ENDLESS = {
    "endless": "while True: pass",
    "endless printing": "while True: print('x' * 1000)",
    "endless and deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    subprocess.Popen([sys.executable, '-c', "
                        "'import time; time.sleep(60)'])\n    time.sleep(60)",
}


def solution(name=None, old="", new=""):
    """A file with the reference functions, `old` in the source of `name` replaced by `new`."""
    parts = [grade.HEADER, HELPERS]
    for function in FUNCTIONS:
        source = inspect.getsource(FUNCTIONS[function])
        if function == name:
            assert old in source, f"critkl's {name} no longer holds {old!r}"
            source = source.replace(old, new)
        parts.append(source)
    return "\n".join(parts)


def with_gae(body):
    """The reference with another gae, and a file that prints when it is imported."""
    imports = "import os, signal, subprocess, sys, time\nprint('garbage {')\n\nclass Mute(Exception):\n" \
              "    def __str__(self):\n        raise ValueError\n\n"
    return solution() + "\n" + imports + "def gae(rewards, values, mask, gamma, lam):\n    " + body + "\n"


def run(*args):
    """Standard output of the grader, which must end well."""
    done = subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def grade_all(folder, sources, *args):
    """{name: {step: row}} for files made of `sources`, in one call of the grader."""
    for i, source in enumerate(sources.values()):
        (folder / f"{i}.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    lines = run("--json", *args, *(folder / f"{i}.py" for i in range(len(sources)))).splitlines()
    reports = [json.loads(line) for line in lines]
    assert len(reports) == len(sources)
    for report in reports:
        assert report["of"] == ALL and report["total"] == sum(row["points"] for row in report["steps"])
    return {name: {row["step"]: row for row in report["steps"]} for name, report in zip(sources, reports)}


def lost(rows):
    return [title for title, row in rows.items() if row["points"] != STEPS[title].points]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    sources = {"reference": solution()} | {name: solution(*change) for name, change in WRONG.items()}
    sources |= {name: with_gae(body) for name, (body, _) in BROKEN.items()}
    return grade_all(tmp_path_factory.mktemp("files"), sources)


def test_reference_has_all_points(reports):
    assert lost(reports["reference"]) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answer_loses_its_step_only(name, reports):
    title = STEP_OF[WRONG[name][0]]
    assert lost(reports[name]) == [title]
    row = reports[name][title]
    assert row["points"] == 0 and set(row["wrong"]) == {"input", "got", "expected", "hint"}
    assert row["wrong"]["got"] != row["wrong"]["expected"]
    assert f"{WRONG[name][0]}(" in row["wrong"]["input"] or WRONG[name][0] == "entropy"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answer_loses_its_step_only(name, reports):
    assert lost(reports[name]) == ["gae"]
    assert BROKEN[name][1] in reports[name]["gae"]["wrong"]["got"]


def test_endless_answers_end_in_time(tmp_path):
    began = time.monotonic()
    for rows in grade_all(tmp_path, {name: with_gae(body) for name, body in ENDLESS.items()}, "--limit", 3).values():
        assert lost(rows) == ["gae"] and rows["gae"]["wrong"]["got"] == "out of time"
    assert time.monotonic() - began < 30


def test_files_that_cannot_be_imported(tmp_path):
    sources = {"crash": "1 / 0", "exit": "import sys\nsys.exit(0)", "syntax": "def gae(:", "bytes": b"\xff\x00\xfe",
               "raises": "raise NotImplementedError", "hard exit": "import os\nos._exit(0)"}
    for name, rows in grade_all(tmp_path, sources).items():
        assert lost(rows) == list(STEPS), name
    assert "ZeroDivisionError" in run(tmp_path / "0.py") and "line 1" in run(tmp_path / "0.py")
    assert "cannot be imported" in run(tmp_path / "missing.py") and "cannot be imported" in run(tmp_path)


def test_stubs_are_not_done_yet_and_one_function_is_enough_for_its_step(tmp_path):
    stubs = run("--stubs")
    for name, function in FUNCTIONS.items():
        assert inspect.getdoc(function).splitlines()[0] in stubs and f"def {name}(" in stubs
    assert "critkl import" not in stubs and stubs.count("raise NotImplementedError") == len(FUNCTIONS)
    assert "\n    return" not in stubs
    with_one = stubs + "\n\n" + HELPERS + textwrap.dedent(inspect.getsource(FUNCTIONS["gae"]))
    rows = grade_all(tmp_path, {"stubs": stubs, "empty": "", "one": with_one})
    for name in ("stubs", "empty"):
        assert lost(rows[name]) == list(STEPS)
        assert all(row["wrong"] == dict(error="not done yet") for row in rows[name].values())
    assert lost(rows["one"]) == [title for title in STEPS if title != "gae"]


def test_the_text_report_shows_one_small_example(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(solution(*WRONG["KL the wrong way round"]))
    text = run(path)
    for part in ("kl                     0 of  15", "input", "got       0.3681", "expected  0.5108", "hint",
                 f"total                 {ALL - 15} of {ALL}"):
        assert part in text


def test_a_file_that_imports_critkl_and_one_that_spoils_it(tmp_path):
    rows = grade_all(tmp_path, {
        "spoils": solution() + "\nimport critkl, steps\ncritkl.whiten = critkl.gae = None\nsteps.STEPS.clear()\n"
                               "sys = None\ntorch.where = None\n",
        "imports": "from critkl import *\nfrom steps import prioritized_penalty\n"})
    assert lost(rows["spoils"]) and lost(rows["imports"]) == []
    assert not (tmp_path / "__pycache__").exists()

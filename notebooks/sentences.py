"""sentences: those of README.md and results.md with numbers that runs or settings decide.

SENTENCES has of each file pairs: the words, with {} for every number, and a function of the data
(collect.load) that gives the numbers in their order. tables.py writes them into the text, where
the words must occur just so; where lines are broken does not matter. A {} stands for a number, a
number word up to twelve, or several with ±, / or "to" between them: 98 / 97.

ALLOWED are the other numbers of the parts that test_tables.py looks through: patterns of phrases
whose numbers are names, settings in passing, or others' results.
"""
import math

from collect import (
    Missing, both, by_seed, differences, mean, paired, pick, plain, strained, values)

import critkl
import torch

DEFAULT = critkl.Config()
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()

def count(rows):
    """How many seeds, in words."""
    n = len(by_seed(rows))
    return WORDS[n] if n < len(WORDS) else str(n)

def runs(data, mode, seed=None, **given):
    """The finished runs of a mode and settings, of one seed or all."""
    found = [row for row in pick(data.runs, mode=mode, **given) if seed in (None, row["seed"])]
    if not found:
        raise Missing(f"no runs with {dict(mode=mode, **given)}")
    return found

def evaluations(data):
    """Those of the default pretrained models."""
    found = pick(data.evaluations, mode="evaluate")
    if not found:
        raise Missing("no runs with --mode evaluate")
    return found

def elsewhere(data, mode):
    """Runs on another machine, made with --note AVX-512."""
    found = pick(data.all_runs, mode=mode, note="AVX-512")
    if not found:
        raise Missing("no runs with --note AVX-512")
    return found

def moved(data, mode, column):
    """From the default machine to the other, paired by seed."""
    return paired(elsewhere(data, mode), runs(data, mode), column)

def farthest(data, column):
    found = differences(elsewhere(data, "critical"), runs(data, "critical"), column)
    return f"{max(map(abs, found)):.1f}"

def measured(data, *names):
    try:
        return [data.measured[name] for name in names]
    except KeyError as error:
        raise Missing(f"measured.json has no {error}") from None

def whole(data):
    """Minutes of the main command with one thread and two, and its memory in GB."""
    one, two = [measured(data, "whole process")[0][f"{n} thread{s}"]
                for n, s in (("one", ""), ("two", "s"))]
    minutes = [f"{run['seconds'] / 60:.0f}" for run in (one, two)]
    return [*minutes, f"{one['peak MB'] / 1000:.1f}"]

def gap(data, mode, other, column="N+1 after"):
    return paired(runs(data, mode), runs(data, other), column)

def of_seeds(data, *cases):
    """ "84 / 88" for each pair (mode, seed)."""
    return [both(runs(data, mode, seed)) for mode, seed in cases]

def machine(data):
    row = runs(data, "critical", 0)[0]
    return [*measured(data, "GFLOP/s a core"), row["python"].rpartition(".")[0],
            row["torch"].partition("+")[0]]

def definition(data):
    rows = evaluations(data)
    names = "listed", "uncertain", "uncertain and decisive", "all three"
    counts = [sum(values(rows, name, 1)) / len(values(rows, name, 1)) for name in names]
    return [count(rows), *(f"{x:.0f}" for x in (*counts, 100 * counts[3] / counts[2]))]

def answers(data):
    """Right answers at N+1 in %: sampled and greedy."""
    return [mean(evaluations(data), f"varying N+1 {kind}") for kind in ("sampled", "greedy")]

def critical_less(data, column, **given):
    """Runs with other settings less the default ones, paired."""
    return paired(runs(data, "critical", **given), runs(data, "critical"), column)

def least(data, **given):
    return f"{min(values(runs(data, 'critical', **given), 'N after')):.0f}"

def mask_less_clip(data, column, *modes):
    return [paired(runs(data, mode, method="dppo"), runs(data, mode), column) for mode in modes]

def dropped(data, method):
    """Of 1,000 tokens how many clip or mask drop: none, standard, critical."""
    return [mean(runs(data, mode, method=method), "masked mean", 2, 1000)
            for mode in ("none", "standard", "critical")]

def at_N(data, *regions):
    return [plain(rows, "N after") for rows in strain(data, *regions)]

def bold(data):
    """A learning rate of 1e-3: seeds, critical, less standard with alpha 0.2, lowest at N+1."""
    critical = runs(data, "critical", lr=1e-3)
    standard = runs(data, "standard", lr=1e-3, alpha=0.2)
    worst = [f"{min(values(rows, 'N+1 after')):.0f}" for rows in (critical, standard)]
    return [count(critical), both(critical), paired(critical, standard), *worst]

def strain(data, *regions):
    """The runs under strain of each method."""
    return [[row for row in strained(data) if row["region"] == name] for name in regions]

def penalized(data, region):
    """The same with the critical penalty."""
    return [row for row in strained(data, "critical") if row["region"] == region]

def rewards(data, *regions):
    return [mean(rows, "reward last") for rows in strain(data, *regions)]

def reward_gap(data, first, second):
    return paired(*strain(data, first, second), "reward last")

def fallen(data, region):
    """How many seeds end with less than 5% of reward."""
    rows, = strain(data, region)
    return WORDS[sum(reward < 5 for reward in values(rows, "reward last"))]

def lowest(data, region):
    rows, = strain(data, region)
    return f"{min(values(rows, 'reward last')):.0f}"

def scientific(x):
    """3e-4, not 0.0003 or 3e-04."""
    return f"{x:.0e}".replace("e-0", "e-")

def choice(data):
    """Two characters, the right one as likely as the n+1 commas before RL; J and J^beta."""
    p = round(float(plain(runs(data, "critical"), "commas before")) / 100, 2)
    V = len(critkl.VOCABULARY)
    logits = torch.full((V,), -math.inf)
    logits[:2] = torch.tensor([p, 1 - p]).log()
    J = critkl.certainty(logits)
    weight = critkl.kl_weight(J, DEFAULT.beta).item()
    return [f"{p:.2f}", f"{1 - p:.2f}", f"{J.item():.2f}", scientific(weight)]

def answer_length(digits):
    """Mean number of tokens of an answer, to ten."""
    problems = critkl.test_set(digits, 300, seed=0)
    mean_length = sum(len(critkl.scratchpad(a, b)) for a, b in problems) / len(problems)
    return round(mean_length, -1)

FALLS_SHORT = [("critical", 0), ("critical", 3), ("none", 0), ("none", 3)]

PPO, DPPO, HIGHER = "`ppo`", "`dppo`", "`grpo_clip_higher`"
KL, RECOMPUTED = "`dppo`, divergence binary_kl, delta 0.05", "`dppo`, anchor recomputed"

README = [
    ("A language model of {} parameters",
     lambda data: [f"{runs(data, 'critical', 0)[0]['parameters']:,.0f}"]),
    ("up to {} digits (N = {})", lambda data: [WORDS[DEFAULT.digits], f"{DEFAULT.digits}"]),
    ("reinforcement learning on {} (N+1)", lambda data: [WORDS[DEFAULT.digits + DEFAULT.extra]]),
    ("With beta = {} only sure tokens are held", lambda data: [f"{DEFAULT.beta:g}"]),
    ("(a choice of {} to {} has J = {} and the weight {})", choice),
    ("Mean over {} seeds and its 95% interval.",
     lambda data: [str(len(by_seed(runs(data, "critical"))))]),
    ("At the same alpha = {} the standard", lambda data: [f"{DEFAULT.alpha:g}"]),
    ("# {} minutes on one thread, {} with --threads 2; {} GB", whole),
    ("# {} minutes on two cores", lambda data: measured(data, "tests, minutes")),
    ("some {} GFLOP/s in float32 a core; Linux, Python {}, torch {}, CPU", machine),
    ("end at {} (none), {} (standard) and {} (critical; N / N+1)",
     lambda data: [both(elsewhere(data, mode), "after", 1)
                   for mode in ("none", "standard", "critical")]),
    ("from {} before RL, and the command takes {} minutes, {} with two threads",
     lambda data: [both(elsewhere(data, "critical"), "before", 1),
                   *(f"{run['seconds'] / 60:.1f}"
                     for run in measured(data, "AVX-512")[0].values())]),
    ("At alpha = {} critical ends {} points above standard at N+1 (paired), and {} above none "
     "at N.",
     lambda data: [f"{DEFAULT.alpha:g}", gap(data, "critical", "standard"),
                   gap(data, "critical", "none", "N after")]),
    ("with alpha {} the standard penalty reaches as much at N+1 ({} at N / N+1), so alpha {} is "
     "badly tuned for it; at N they cannot be told apart (critical with alpha 2 ends {} above it).",
     lambda data: ["0.2", both(runs(data, "standard", alpha=0.2)), f"{DEFAULT.alpha:g}",
                   paired(runs(data, "critical"), runs(data, "standard", alpha=0.2), "N after")]),
    ("At three times the learning rate only critical holds on every seed ({}; none {}, standard "
     "with alpha 0.2 {}; {} seeds).",
     lambda data: [both(runs(data, "critical", lr=1e-3)), both(runs(data, "none", lr=1e-3)),
                   both(runs(data, "standard", lr=1e-3, alpha=0.2)),
                   count(runs(data, "critical", lr=1e-3))]),
    ("(critical {} and {}, none {} and {}), the freed comma",
     lambda data: of_seeds(data, *FALLS_SHORT)),
    ("the reward falls to {}% without a trust region ({} seeds) and rises to {}% with the clip of "
     "PPO and {}% with the mask of DPPO.",
     lambda data: [*rewards(data, "`pg_is`"), count(strain(data, "`pg_is`")[0]),
                   *rewards(data, PPO, DPPO)]),
    ("(mask less clip: {} points, paired, {} seeds)",
     lambda data: [reward_gap(data, DPPO, PPO), count(strain(data, DPPO)[0])]),
    ("what-one-learns-from-both): {}% ({} seeds).",
     lambda data: [mean(penalized(data, "`pg_is`"), "reward last"),
                   count(penalized(data, "`pg_is`"))]),
    ("`dial` = {} of the pretraining problems", lambda data: [f"{DEFAULT.dial:g}"]),
    ("with probability `mistakes` = {}", lambda data: [f"{DEFAULT.mistakes:g}"]),
    ("right before RL ({}% at N+1)", lambda data: [answers(data)[1].split(".")[0]]),
    ("Model: {} layers of width {} with {} heads",
     lambda data: [str(x) for x in (DEFAULT.layers, DEFAULT.width, DEFAULT.heads)]),
    ("PPO: {} epochs over {} episodes in minibatches of {}",
     lambda data: [WORDS[DEFAULT.epochs], str(DEFAULT.episodes), str(DEFAULT.minibatch)]),
    ("Defaults: alpha {}, learning rate {}, value coefficient {}",
     lambda data: [f"{DEFAULT.alpha:g}", scientific(DEFAULT.lr), f"{DEFAULT.value_coef:g}"]),
    ("the end, some {} tokens late",
     lambda data: [f"{answer_length(DEFAULT.digits + DEFAULT.extra):.0f}"]),
    ("cut to [-{}, {}] before `exp`", lambda data: 2 * [f"{critkl.LOG_LIMIT:g}"]),
    ("with a log-ratio beyond {}", lambda data: [f"{critkl.LOG_LIMIT:g}"]),
    ("the default: N = {}, planted mistakes", lambda data: [f"{DEFAULT.digits}"]),
    ("N = {}, dial {}: nothing longer",
     lambda data: [f"{critkl.PRESETS['laptop7'][name]:g}" for name in ("digits", "dial")])]

RESULTS = [
    ("at N+1: pretrained {}, none {}, standard {}, critical {} points; at N: none {}, standard {}, "
     "critical {}.",
     lambda data: [moved(data, "critical", "N+1 before"),
                   *(moved(data, mode, column) for column in ("N+1 after", "N after")
                     for mode in ("none", "standard", "critical"))]),
    ("by more than {} points at N+1; after it with the critical penalty by up to {} there, and by "
     "up to {} at N",
     lambda data: [farthest(data, column) for column in ("N+1 before", "N+1 after", "N after")]),
    ("N = {} unless said", lambda data: [f"{DEFAULT.digits}"]),
    ("the critical penalty ends {} points above the standard one at N+1, paired by seed",
     lambda data: [gap(data, "critical", "standard")]),
    ("the standard penalty holds the n+1 commas ({}% before, {}% after), the critical one frees "
     "them ({}%)",
     lambda data: [plain(runs(data, "standard"), "commas before"),
                   plain(runs(data, "standard"), "commas after"),
                   plain(runs(data, "critical"), "commas after", 1)]),
    ("at N critical ends {} above none, at N+1 {}.",
     lambda data: [gap(data, "critical", "none", "N after"), gap(data, "critical", "none")]),
    ("(0 and 3: {} and {}, none {} and {})", lambda data: of_seeds(data, *FALLS_SHORT)),
    ("in % (mean over {} seeds)", lambda data: [count(runs(data, "critical"))]),
    ("critical with alpha 2 ends {} above standard with alpha 0.2, paired over {} seeds",
     lambda data: [paired(runs(data, "critical"), runs(data, "standard", alpha=0.2), "N after"),
                   count(runs(data, "standard", alpha=0.2))]),
    ("cannot be below {} (log 2 / log {})",
     lambda data: [f"{-math.log(2) / math.log(len(critkl.VOCABULARY)):.3f}",
                   str(len(critkl.VOCABULARY))]),
    ("in the mean of {} seeds: {} are on the paper's list, {} are uncertain (J below 0.9 and among "
     "the ten lowest of the answer), {} of these are decisive, and {} of these are on the list "
     "({}%)", definition),
    ("Sampled answers are right in {}% at N+1, greedy ones in {}%", answers)]

BIG = dict(beta=10000.0)
AUTHORS = dict(certainty="max_prob", certainty_temperature=4.0)
RESULTS += [
    ("`--beta 10` ends {} points below 150 (paired)",
     lambda data: [critical_less(data, "N+1 after", beta=10.0).replace("-", "")]),
    ("with 10000 the lowest seed ends at {}% (150: {}%), the mean {} from that of 150",
     lambda data: [least(data, **BIG), least(data), critical_less(data, "N after", **BIG)]),
    ("Over {} seeds critical with alpha 2 ends at {}, {} points above standard with alpha 0.2 at "
     "N+1 (paired), its lowest seed at {}%, that of standard at {}%", bold),
    ("with 1e-4 none ends at {}, standard with alpha 0.2 at {}, critical with alpha 2 at {}",
     lambda data: [both(runs(data, "none", lr=1e-4)),
                   both(runs(data, "standard", lr=1e-4, alpha=0.2)),
                   both(runs(data, "critical", lr=1e-4))]),
    ("With mistakes 0.4 success at N+1 goes from {} to {}% in as many iterations, with 0.2 from {} "
     "to {}%",
     lambda data: [mean(rows, f"N+1 {when}") for rows in (
         runs(data, "critical", mistakes=0.4), runs(data, "critical"))
         for when in ("before", "after")]),
    ("(`--dial 0.2`, two seeds) starts at {} and ends at {}%",
     lambda data: [mean(runs(data, "critical", dial=0.2), f"N+1 {when}")
                   for when in ("before", "after")]),
    ("Alone, `max_prob` gives {} points at N+1 and {} at N, paired",
     lambda data: [critical_less(data, name, certainty="max_prob")
                   for name in ("N+1 after", "N after")]),
    ("at N {} points from the default, as far down as {}%",
     lambda data: [critical_less(data, "N after", **AUTHORS), least(data, **AUTHORS)]),
    ("the pretrained model solves {}% at N and {}% at N+1, and RL ends at {} / {}",
     lambda data: [plain(runs(data, "critical", temperature=2.0, **AUTHORS), f"{x} {when}", 1)
                   for when in ("before", "after") for x in ("N", "N+1")]),
    ("the mask less the clip is {} points at N+1 without a penalty, {} with the standard one and "
     "{} with the critical one; at N {}, {} and {}",
     lambda data: [*mask_less_clip(data, "N+1 after", "none", "standard", "critical"),
                   *mask_less_clip(data, "N after", "none", "standard", "critical")]),
    ("of 1,000 tokens the clip drops {}, {} and {}, the mask {}, {} and {}",
     lambda data: [*dropped(data, "ppo"), *dropped(data, "dppo")]),
    ("success at N falls from {}% to {}% with the clip and {}% with the mask, while the reward "
     "rises; with the critical penalty it ends at {}% and {}%",
     lambda data: [plain(strain(data, PPO)[0], "N before"), *at_N(data, PPO, DPPO),
                   *(plain(penalized(data, name), "N after") for name in (PPO, DPPO))]),
    ("without any, the reward ends at {}% in place of {}%, and success at N / N+1 at {}",
     lambda data: [mean(penalized(data, "`pg_is`"), "reward last"), *rewards(data, "`pg_is`"),
                   both(penalized(data, "`pg_is`"))]),
    ("clip and penalty end at {}, mask and penalty at {}",
     lambda data: [both(penalized(data, name)) for name in (PPO, DPPO)]),
    ("the reward, {}% at first, falls to {}% (`pg_is`) and {}% (`cispo`); {} and {} of {} seeds "
     "end below 5%",
     lambda data: [plain(strain(data, PPO)[0], "reward first"),
                   *rewards(data, "`pg_is`", "`cispo`"), fallen(data, "`pg_is`"),
                   fallen(data, "`cispo`"), count(strain(data, "`cispo`")[0])]),
    ("With the clip it rises to {}%, with the mask to {}%",
     lambda data: rewards(data, PPO, DPPO)),
    ("ends {} points of reward above the clip, paired over {} seeds; above `grpo_clip_higher` it "
     "is {}, over {}",
     lambda data: [reward_gap(data, DPPO, PPO), count(strain(data, DPPO)[0]),
                   reward_gap(data, DPPO, HIGHER), count(strain(data, HIGHER)[0])]),
    ("Anchored at mu `dppo` ends {} above itself with the anchor recomputed, `grpo_clip_higher` {} "
     "above `minirl`",
     lambda data: [reward_gap(data, DPPO, RECOMPUTED), reward_gap(data, HIGHER, "`minirl`")]),
    ("the lowest seed of `dppo` ends at {}%, with the anchor recomputed at {}%",
     lambda data: [lowest(data, DPPO), lowest(data, RECOMPUTED)]),
    ("`minirl_tis` ends {} below `minirl`",
     lambda data: [reward_gap(data, "`minirl`", "`minirl_tis`")]),
    ("{} of {} seeds falls below 5% (mean {}). With 0.8, or the anchor recomputed, it is {} and {}",
     lambda data: [fallen(data, "`negative_only`"), count(strain(data, "`negative_only`")[0]),
                   *rewards(data, "`negative_only`", "`negative_only`, delta 0.8",
                            "`negative_only`, anchor recomputed")]),
    ("the high end {}, the low end {}, both {} points",
     lambda data: [reward_gap(data, f"`grpo_clip_higher`, relax {ends}", HIGHER)
                   for ends in ("high", "low", "both")]),
    ("Top-K less binary: {} points for TV, {} for KL",
     lambda data: [reward_gap(data, "`dppo`, divergence topk_tv", DPPO),
                   reward_gap(data, "`dppo`, divergence topk_kl, delta 0.05", KL)])]

SPEED = [
    ("two virtual cores, some {} GFLOP/s", lambda data: measured(data, "GFLOP/s a core")),
    ("took {} s on the Xeon where it was measured, and takes {} s on it",
     lambda data: [str(x) for x in measured(data, "pretraining of 1.2, s")[0]])]

SENTENCES = {
    "README.md": README, "notebooks/results.md": RESULTS, "notebooks/speed.md": SPEED}

ALLOWED = [
    r"`[^`]*`", r"\]\([^)]*\)", r"(?<!\w)--?[a-z-]+ \w+", r"arXiv [\d.]+",
    r"[Vv]ersions? [\d.]+( to [\d.]+)?",
    r"\[[VQ]\] fig\. \d", r"notebook \d", r"[Nn]\+\d", r"95% interval", r"Intervals are 95%",
    r"[Ss]eeds? \d( (and|to) \d)?", r"[Aa]lpha [\d.]+( and \d)?( or less)?",
    r"beta = 0 is", r"J below 0\.9", r"lines? \d( to \d)?", r"\d+\+\d+", r"50 answers", r"log 2 /",
    r"float32", r"Zen 3", r"AVX2", r"AVX-512", r"1 where it is sure", r"0 and 3:",
    r"\[\d,\d", r"1e-3 in place of 3e-4|than with 3e-4|lr\s3e-4|rate 1e-4",
    r"critical does not even at 20", r"after 10 iterations|where 20 take them; 40",
    r"(and|in) 20 iterations",
    r"from 50 up does as well as 150|below 150 \(paired|with 10000 the|\(150: #",
    r"mean # from that of 150", r"of 1,000 tokens", r"At temperature 4|at temperature 2", r"C1, C2",
    r"end at 94 to 96", r"departure C1|temperature of 4|rate of (3e-4|1e-3)",
    r"within 0\.3 points|differs by 3", r"85M parameters, N = 7",
    # names, equations, and what the papers or their code have
    r"\| \[[VQ]\][^|]*\|", r"\*\*[DC]\d+\*\*", r"D\d+(, D\d+ to D\d+)?", r"Eq\. \d+", r"bfloat16",
    r"A2C with 85M|GPT-2, 85M|A2C, 50 episodes|A2C\b|on 50 generations|Table 1 of",
    r"a (GPU|card) of 24 GB",
    r"5 or 10, 1e-6, 0\.1, 0\.0005", r"entropy coefficient 0\.001", r"\(released: (0\.95|10|1e-8)",
    r"1 \+ log\(max p\) / log V at temperature 4", r"temperature 1\.|logits by 2",
    r"[Ll]ambda = 1\b", r"falls to 0", r"the ratio is 1\b", r"its 1/r", r"with reward 0",
    r"A [<>] 0", r"mu - pi >= 0\.5", r"k3", r"N = 2, pretrains", r"\[\d_\w+", r"N = 3", r"N = 13",
    r"With mistakes 0\.4|with 0\.2 from", r"with 1e-4", r"32 fixed problems",
    r"would have said 10\.4 ± 6\.0", r"table 1, on #",
    r"tables 4 and 5", r"and 0 beyond", r"pass 0 or 100", r"J is 1\b",
    r"10 points with a power of 80%", r"below 5%", r"max_prob at temperature 4",
    r"\(5\.\d\)|\(6\)|\(7\.3\)", r"With 0\.5 #|With 0\.8, or",
    # how things were measured before
    r"success at # is 0", r"commas are right with 97 to 99%", r"began at 97 to 99%", r"at 1 - #",
    r"promised 95\.6 / 46\.7|gave 99\.3 / 78\.6", r"400 steps of( 16 problems)?", r"60 problems",
    r"dial and mistakes 0\.3", r"2 layers, 1,200 steps", r"300 problems", r"N = 7 as in",
    r"block sees 8 tokens", r"3 layers, 4 heads, 1,600 steps|with 4% of longer|80 iterations of RL",
    r"3 layers(, width 64)?, 4 heads(, 41 tokens)?", r"transformers 5\.24 with a GPT-2",
    r"counted as 2 for|and 2 T C for|At 40% of|an H100 \(989|a 4090 \(165\)|at 2 ms a pass",
    r"64 answers of|on 8 GPUs|8 problems each|200 GB/s|20,000 steps"]

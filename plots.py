"""plots: every picture and table that a set of critkl run folders allows.

    python plots.py runs                        draw all of runs/, into runs/
    python plots.py runs/a runs/b --out figures some runs only, into another folder

Reads config.json and the results of each run (metrics.csv and summary.json, evaluation.json, inspect.json or
bench.json), nothing else; writes each picture as PNG and PDF, and the numbers as results.md. Runs that differ in
their seed alone are a group. Shown are its mean and the 95% interval of that mean (Student t).

    learning_curves     expected success at N+k and at N while training, [V] fig. 3, 4
    pretraining         the same for several degrees of pretraining (digits, dial, pretrain_steps), [V] fig. 3
    critical_tokens     probability of the right n+1 comma while training, [V] fig. 4, 7
    trust_region        reward, masked tokens, pi - mu while training, by method and trust region, [Q] fig. 3
    beta_sweep          success at the end against beta, [V] fig. 6; alpha_sweep: against kl_coef (alpha)
    frontier            success at the end, N+k against N, for each alpha; of each penalty the best is ringed
    crossed             success at the end, penalties by trust regions
    accuracy_by_digits  success of sampled answers at N to N+3, [V] fig. 2
    mismatch            sampler against trainer at equal weights, [Q] fig. 2
    coloured_text       an answer coloured by certainty, [V] fig. 5
    growth              time and memory against digits, episodes, width

A run still going is drawn as far as it goes. Compared are groups alike in all other settings; of several such
comparisons each has a picture, whose name ends in what sets it apart from the first. Of many groups one of each
kind is shown: that with the most seeds, then usual settings, then settings most like those of the others.
"""
import argparse
import csv
import itertools
import json
import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure  # without pyplot: no display, no backend to choose

matplotlib.rcParams.update({
    "font.size": 11, "axes.titlesize": 11, "legend.fontsize": 10, "legend.frameon": False, "legend.handlelength": 3,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.linewidth": 1.8, "lines.markersize": 5, "savefig.dpi": 150, "pdf.fonttype": 42})

# mode of RL: colour (Okabe and Ito), line style, marker; other modes: the file of their results; FREE: settings
# that make no group of their own
MODES = {"none": ("#D55E00", ":", "s"), "standard": ("#0072B2", "--", "^"), "critical": ("#009E73", "-", "o"),
         "dppo": ("#CC79A7", "-.", "D")}
OTHER = {"evaluate": "evaluation.json", "inspect": "inspect.json", "bench": "bench.json"}
COLOURS = ("black", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999")
LINES = ("-", "--", "-.", ":")
FREE = ("seed", "out", "name", "problem", "checkpoint", "json", "preset", "eval_every", "eval_problems")
PENALTY = ("beta", "certainty", "certainty_temperature", "kl_coef", "kl_kind")
CLIP, DIVERGENCE = ("eps_low", "eps_high", "relax", "relax_below"), ("divergence", "top_k", "delta")
METHOD = ("trust_region", "ratio_cap", "anchor", *CLIP, *DIVERGENCE)      # what --method sets
PENALTIES, REGIONS = ("mode", "penalty", *PENALTY), ("mode", "method", *METHOD)
DEGREE = ("digits", "dial", "pretrain_steps")                             # of pretraining
METHODS = ("ppo", "pg_is", "cispo", "grpo_clip_higher", "minirl", "minirl_tis", "dppo", "negative_only")
LIKE = {"divergence": "dppo", "negative": "negative_only", "none": "pg_is"}     # trust region: the method that has it
USUAL = dict(ratio_cap=math.inf, eps_high=0.2, anchor="rollout", relax="none", certainty="negentropy", fixed=0,
             certainty_temperature=0.0, temperature=1.0, kl_kind="k2", advantage="gae", sampler_dtype="float32",
             staleness=1, window=0)        # older runs lack some of these; no label names them
SHORT = {"kl_coef": "alpha", "digits": "N", "extra": "k", "pretrain_steps": "steps"}
LENGTHS = ("N", "N+1", "N+2", "N+3")       # of the evaluated problems


# ----------------------------------------------------------------------------------------------------
# Reading. What is torn, missing or not a number is left out.

@dataclass
class Run:
    folder: Path
    config: dict
    rows: dict        # iteration to {column: number}, in order; of a repeated iteration the last
    end: dict         # what the run wrote at its end; empty while it is going


@dataclass
class Group:
    key: dict         # the settings in effect
    runs: dict        # seed to Run

    @property
    def target(self):
        return f"N+{show(self.key.get('extra', 1))}"

    def final(self, *path, kind=None):
        """What each finished run wrote at its end at a path of keys: numbers, or what is of a kind."""
        ended = [run.end for run in self.runs.values() if run.end]
        return [at(end, *path, kind=kind) if kind else number(end, *path) for end in ended]

    def column(self, name):
        """The numbers in a column of metrics.csv, a list for each finished run that has some."""
        found = [[number(row, name) for row in run.rows.values()] for run in self.runs.values() if run.end]
        return [[x for x in values if x == x] for values in found if not np.isnan(values).all()]

    def curve(self, column):
        """Iterations, means and half widths in % over the seeds that have the column there: (3, n). Left out are
        iterations at which a run that went further was not evaluated."""
        at = sorted({i for run in self.runs.values() for i in run.rows})
        at = [i for i in at if all(i in run.rows or i > max(run.rows, default=0) for run in self.runs.values())]
        points = [(i, *interval([100 * number(run.rows, i, column) for run in self.runs.values()])) for i in at]
        return np.array([point for point in points if not math.isnan(point[1])]).reshape(-1, 3).T

    def graded(self, kind, digits, measure):
        """[mean, low, high] of each seed from the rows of evaluation.json."""
        return [row.get(measure) for rows in self.final("rows", kind=list) for row in map(at, rows)
                if (row.get("set"), row.get("digits")) == (kind, digits)]

    def without(self, *names):
        return json.dumps({name: value for name, value in self.key.items() if name not in names}, sort_keys=True)


def at(value, *path, kind=dict):
    """What lies at a path of keys into nested dicts, if it is of this kind, or an empty one."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, kind) else kind()


def number(value, *path):
    """The finite float at a path of keys into nested dicts, or nan."""
    try:
        value = float(at(value, *path, kind=object))
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if math.isfinite(value) else math.nan


def read_json(path):
    try:
        return at(json.loads(path.read_text(errors="replace")))
    except (OSError, ValueError, RecursionError):
        return {}


def read_metrics(path):
    """Iteration to {column: number}. A whole line ends in a newline and is as long as the header."""
    try:
        header, *table = list(csv.reader(path.read_text(errors="replace").split("\n")[:-1])) or [[]]
    except (OSError, csv.Error):
        return {}
    rows = [dict(zip(header, map(number, row))) for row in table if len(row) == len(header)]
    return dict(sorted({row["iteration"]: row for row in rows if not math.isnan(number(row, "iteration"))}.items()))


def in_effect(settings):
    """The settings that shape a run, without those that its penalty and its trust region do not use. However
    it was asked for, the same trust region has the same method and the same run the same mode."""
    settings = USUAL | settings
    if settings["mode"] in OTHER:
        kept = {"inspect": ("problem", "seed"), "bench": ("threads",)}.get(settings["mode"], ())
        return dict(policy=re.sub(r"-seed\d+$", "", Path(str(settings.get("checkpoint") or "")).name)) | {
            name: value for name, value in settings.items() if name not in FREE or name in kept}
    penalty, region = settings.setdefault("penalty", settings["mode"]), settings.setdefault("trust_region", "clip")
    if settings.setdefault("method", "ppo") == "ppo":
        settings["method"] = LIKE.get(str(region), "ppo")
    settings["mode"] = "dppo" if (penalty, settings["method"]) == ("none", "dppo") else penalty
    idle = {"none": PENALTY, "standard": PENALTY[:3]}.get(str(penalty), ()) + {
        "clip": DIVERGENCE, "divergence": CLIP, "negative": CLIP + DIVERGENCE[:2]}.get(str(region), CLIP + DIVERGENCE)
    idle += ("relax_below",) * (settings["relax"] == "none") + ("group",) * (settings["advantage"] == "gae")
    return {name: value for name, value in settings.items() if name not in FREE + idle}


def read_groups(folders):
    """All runs in or below the folders, by group, in the order of MODES and METHODS. Raises OSError."""
    runs, groups = {}, {}
    for folder in map(Path, folders):
        for path in sorted(folder.rglob("config.json")):
            config = read_json(path)
            end = path.with_name(OTHER.get(str(at(config, "settings").get("mode")), "summary.json"))
            runs[path.resolve()] = Run(path.parent, config, read_metrics(path.with_name("metrics.csv")), read_json(end))
    for run in sorted(runs.values(), key=lambda run: (not run.end, -len(run.rows))):       # longest first
        settings = at(run.config, "settings")
        mode, seed = str(settings.get("mode")), str(settings.get("seed"))
        key = in_effect(settings) if mode in {**MODES, **OTHER} else {}
        if str(key.get("mode")) not in {**MODES, **OTHER}:
            print(f"{run.folder}: left out, it holds nothing to draw (mode {mode})")
            continue
        group = groups.setdefault(json.dumps(key, sort_keys=True), Group(key, {}))
        if group.runs.setdefault(seed, run) is not run:                                    # a seed counts once
            print(f"{run.folder}: left out, it has the settings and the seed of {group.runs[seed].folder}")
        elif not run.end:
            print(f"{run.folder}: not finished" + f", at iteration {max(run.rows, default=0):g}" * (mode in MODES))
    if not groups:
        raise FileNotFoundError(f"{', '.join(folders)}: no runs to draw (a run is a folder with a config.json)")
    return sorted(groups.values(), key=lambda g: (
        [*MODES, *OTHER].index(g.key["mode"]), g.key.get("method") in METHODS and METHODS.index(g.key["method"]),
        [(np.nan_to_num(number(value)), str(value)) for value in g.key.values()]))


# ----------------------------------------------------------------------------------------------------
# Statistics over seeds.

T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,     # 1 to 20 degrees of freedom
        2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def interval(values):
    """Mean and half width of its 95% interval, t s / sqrt(n) with n - 1 degrees of freedom; nan where none."""
    values = np.array([value for value in values if not math.isnan(value)])
    n = len(values)
    if n < 2:
        return values.sum() if n else math.nan, math.nan
    t = T975[n - 2] if n - 2 < len(T975) else 1.96 + 2.5 / (n - 1)
    return values.mean(), t * values.std(ddof=1) / math.sqrt(n)


def bounds(values):
    """Mean over seeds, and the widths of its interval below and above. Values: numbers, or [mean, low, high] of
    each seed; where there is one, the interval is its own."""
    values = [[number(x) for x in (value if isinstance(value, list) else [value])] for value in values]
    values = [value for value in values if value and not math.isnan(value[0])]
    if len(values) == 1 and len(values[0]) == 3:
        return values[0][0], values[0][0] - values[0][1], values[0][2] - values[0][0]
    mean, half = interval([value[0] for value in values])
    return mean, half, half


def ends(groups, name):
    """Means and half widths in % of the success at the end: (2, groups)."""
    return np.array([interval([100 * v for v in g.final("accuracy", name)]) for g in groups]).T


def bench_series(groups):
    """For each setting that bench runs differ in alone: its name, its values and {curve: (its values in s or MB,
    the exponent p of the power law x^p nearest to them in logarithms)}."""
    for name, *also in (("digits",), ("episodes", "minibatch"), ("width",)):
        for family in families(groups, name, *also)[:1]:
            mean = lambda *path: np.array([interval(g.final("phases", *path))[0] for g in family])
            phases = dict.fromkeys(phase for g in family for found in g.final("phases", kind=dict) for phase in found)
            x, y = np.array([number(g.key, name) for g in family]), {p: mean(p, "seconds") for p in phases}
            y["peak memory"] = np.fmax.reduce([x * np.nan] + [mean(p, "peak_memory_mb") for p in phases])
            yield name, x, {k: (v, np.polyfit(np.log(x), np.log(v), 1)[0] if (v * x > 0).all() else np.nan)
                            for k, v in y.items()}


# ----------------------------------------------------------------------------------------------------
# Which groups to show together, and how each looks.

def comparisons(groups, *names):
    """The groups in lists that are alike in all but these settings, without fixed problems first, then by runs."""
    found = {}
    for g in groups:
        found.setdefault(g.without(*names), []).append(g)
    return sorted(found.values(), key=lambda e: (number(e[0].key, "fixed") > 0, -sum(len(g.runs) for g in e)))


def families(groups, name, *also):
    """The comparisons in which a numeric setting (and perhaps others with it) has several values, in its order."""
    found = comparisons([g for g in groups if not math.isnan(number(g.key, name))], name, *also)
    return [sorted(family, key=lambda g: number(g.key, name)) for family in found
            if len({number(g.key, name) for g in family}) > 1]


def named(found, *names):
    """Comparisons over these settings by what ends their names: nothing, or as much as it takes of what sets them
    apart from the first."""
    result, rank = {}, lambda name: name not in ("fixed", "penalty", "digits", "dial")
    for groups in found:
        key, first = groups[0].key, found[0][0].key
        parts = [f"_{SHORT.get(name, name)}_{show(key[name])}" for name in sorted(key, key=rank)
                 if name not in ("mode", *names) and name in first and first[name] != key[name]]
        ends = [re.sub(r"[^\w.+-]+", "_", "".join(parts[:n]))[:80] for n in range(len(result) > 0, len(parts) + 1)]
        result[next((end for end in ends if end not in result), f"_{len(result) + 1}")] = groups
    return result


def choose(groups, *names, limit=8):
    """All groups, or of more than the limit one for each combination of the named settings."""
    kinds = {}
    for g in groups:
        kinds.setdefault(repr([g.key.get(name) for name in names]), []).append(g)
    rank = lambda g: (len(g.runs), sum(g.key.get(name) == value for name, value in USUAL.items()),
                      sum(g.key[name] == other.key.get(name) for other in groups for name in g.key))
    return groups if len(groups) <= limit else [max(kind, key=rank) for kind in kinds.values()]


def cross(groups):
    """(penalty, trust region) to the group whose settings of both occur most often, where each occurs twice."""
    alike = lambda g, names: sum(h.without(*names) == g.without(*names) for h in groups)
    rank = lambda g: (alike(g, REGIONS), alike(g, PENALTIES), len(g.runs))
    region = lambda g: show(g.key.get("divergence" if g.key["trust_region"] == "divergence" else "trust_region"))
    found = {(g.key["penalty"], region(g)): g for g in sorted(groups, key=rank)}
    for i in (0, 1):
        found = {pair: g for pair, g in found.items() if sum(other[i] == pair[i] for other in found) > 1}
    return dict(sorted(found.items(), key=lambda item: ([*MODES].index(item[0][0]), "clip" != item[0][1], item[0][1])))


def alpha_families(groups):
    """The families over alpha, no penalty, and variants with the same beta that have one alpha only; and of each
    the group with the highest success at N+k at the end."""
    found = families(groups, "kl_coef")
    known = {g.key.get("beta") for family in found for g in family}
    found = [[g] for g in groups if g.key["penalty"] == "none"] + found + [[g] for g in groups if (
        "kl_coef" in g.key and g.key.get("beta") in known and all(g not in family for family in found))]
    return found, [max(family, key=lambda g: np.nan_to_num(ends([g], g.target)[0, 0], nan=-1)) for family in found]


def show(value):
    return str(value) if not isinstance(value, (int, float)) else f"{value:.5g}" if value == value else ""


def labels(groups, *but):
    """Penalty, method and the settings in which the groups differ (but some): "critical, alpha 0.1"."""
    values = lambda name: {repr(g.key[name]) for g in groups if name in g.key}
    names = [name for name in dict.fromkeys(name for g in groups for name in g.key)
             if name not in ("mode", "penalty", "method", "policy", *but) and len(values(name)) > 1]
    unpenalized, found = {g.key.get("penalty") for g in groups} == {"none"}, []
    for g in groups:
        penalty, method = g.key.get("penalty"), g.key.get("method")
        parts = [penalty] * (penalty != "none" or method == "ppo") + [method] * (method != "ppo")
        if "policy" in g.key or unpenalized:
            parts = [g.key.get("policy", method) or "pretrained"]
        alike = [h.key for h in groups if h.key.get("method") == method]  # what a method always has is not said
        parts += [f"{SHORT.get(name, name)} {show(g.key[name])}" for name in names
                  if name in g.key and g.key[name] != USUAL.get(name)
                  and not (name in METHOD and len({repr(key.get(name)) for key in alike}) == 1)]
        label = ", ".join(map(str, parts)).replace("_", " ")
        found.append(f"{label} #{len(found) + 1}" if label in found else label)    # if one lacks a setting
    return found


def styles(groups):
    """Plot keywords for each group: the look of its mode, from light to dark if several have it; where more than
    three do, each group has a look of its own."""
    modes, found = [g.key["mode"] for g in groups], []
    for i, mode in enumerate(modes):
        colour, line, marker = COLOURS[i % len(COLOURS)], LINES[i % 4], "os^Dv<>P*X"[i % 10]
        if mode in MODES and max(map(modes.count, modes)) <= 3:
            colour, line, marker = MODES[mode]
            if modes.count(mode) > 1:
                place = modes[:i].count(mode)
                shade, marker = 0.4 - 0.9 * place / (modes.count(mode) - 1), "os^"[place]
                colour = tuple((1 - abs(shade)) * np.array(to_rgb(colour)) + max(shade, 0))
        found.append(dict(color=colour, linestyle=line, marker=marker))
    return found


def looks(shown, *but, count=lambda g: len(g.final())):
    """(groups, label with the number of seeds, plot keywords) of each list of groups, by the first of it."""
    heads = [groups[0] for groups in shown]
    for groups, label, style in zip(shown, labels(heads, *but), styles(heads)):
        low, *_, high = 2 * sorted(map(count, groups))
        yield groups, f"{label} ({low}{f' to {high}' if low < high else ''} seed{'s' if high != 1 else ''})", style


def add_legend(figure, title=None):
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    columns = min(len(handles), max(1, 104 // (8 + max(map(len, handles)))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, columnspacing=1.5, title=title)
    figure.set_figheight(figure.get_figheight() + 0.21 * (math.ceil(len(handles) / columns) + bool(title)))
    return figure


# ----------------------------------------------------------------------------------------------------
# Pictures: functions of the groups that return a Figure, or a text that says what it lacks.

# picture: {(title, label of y): columns of metrics.csv}, rows of panels, height, limits of y
PANELS = {
    "learning_curves": ({("at TARGET digits: what RL trains", "expected success, %"): ["accuracy_TARGET"],
                         ("at N digits: what it knew before", ""): ["accuracy_N"]}, 1, 3.6, (0, 103)),
    "critical_tokens": ({
        (f"line {line}, {operand} operand", "probability of the\nright token, %" if line == 1 else ""):
        [f"line{line}_{operand}_n+1_comma"] for operand in ("first", "second") for line in (1, 2, 3)
    }, 2, 5, (None, 101)),
    "trust_region": ({("episodes solved (reward)", "share of rollouts, %"): ["reward"],
                      ("masked tokens", "share of tokens, %"): ["masked"],
                      ("largest and smallest π − μ", "probability, %"): ["drift_max", "drift_min"],
                      ("mean π − μ", "probability, %"): ["drift"]}, 2, 5.6, None)}


def panels(groups, picture):
    """A panel for each title and label of y, in it a curve for each group, with a band if they are few."""
    (columns, rows, height, limits), drawn = PANELS[picture], lambda g: sum(bool(run.rows) for run in g.runs.values())
    figure, target = Figure((8, height), layout="constrained"), " or ".join(sorted({g.target for g in groups}))
    for i, ((title, ylabel), names) in enumerate(columns.items()):
        axes = figure.add_subplot(rows, len(columns) // rows, i + 1, ylabel=ylabel,
                                  sharey=figure.axes[0] if i and limits else None)
        for ([g], label, style), name in itertools.product(looks([[g] for g in groups], count=drawn), names):
            x, mean, half = g.curve(name.replace("TARGET", g.target))
            if len(x):
                axes.plot(x, mean, markevery=max(1, len(x) // 8), label=label, **style)
            if len(groups) <= 6:
                axes.fill_between(x, mean - half, mean + half, color=style["color"], linewidth=0, alpha=0.12)
        axes.set(title=title.replace("TARGET", target), xlabel="RL iteration" * (
            i >= len(columns) - len(columns) // rows))
    figure.axes[0].set_ylim(limits)
    if not any(axes.lines for axes in figure.axes):
        return "no rows yet in any metrics.csv"
    return add_legend(figure, "mean over seeds" + "; band: 95% interval of the mean" * (len(groups) <= 6))


def pair(titles, xlabel, ylabel, curves, ticks, names=(), limits=(0, 103)):
    """Two panels with intervals. Curves: (label, style, x, for each panel means and the widths of intervals).
    Without names the ticks are numbers on a logarithmic scale, and 0."""
    figure = Figure((8, 3.6), layout="constrained")
    for i, title in enumerate(titles):
        axes = figure.add_subplot(1, 2, i + 1, title=title, xlabel=xlabel, ylabel="" if i else ylabel)
        for label, style, x, panel in curves:
            mean, *bars = panel[i]
            axes.errorbar(x, mean, [bars[0], bars[-1]], capsize=3, elinewidth=1, label=label, **style)
        if not names:
            axes.set_xscale("symlog", linthresh=min((x for x in ticks if x > 0), default=1))
        axes.set_xticks(ticks, names or map(show, ticks), rotation=45 * (len(ticks) > 5))
        axes.xaxis.minorticks_off()
        axes.set_ylim(limits)
    return add_legend(figure)


def sweep(groups, name):
    """Success at N+k and N against a setting of the penalty, a curve for each family."""
    curves, same, target = [], lambda g: g.without("mode", "penalty", *PENALTY[:3]), groups[0].target
    for family, label, style in looks(families(groups, name), name):
        if name == "beta" and family[0].key[name] > 0:                     # beta 0 is the standard penalty
            family = [g for g in groups if "beta" not in g.key and same(g) == same(family[0])][:1] + family
        curves.append((label, style, [number(g.key, name) if name in g.key else 0 for g in family],
                       [ends(family, digits) for digits in (target, "N")]))
    xlabel = {"beta": "beta (0: the standard penalty)", "kl_coef": "alpha, the coefficient of the penalty"}[name]
    return pair([f"at {target} digits", "at N digits"], xlabel, "expected success at the end, %", curves,
                sorted({x for _, _, at, _ in curves for x in at}))


def frontier(groups):
    figure, (found, tops), target = Figure((8, 4.6), layout="constrained"), alpha_families(groups), groups[0].target
    axes = figure.add_subplot(xlabel="expected success at N, %", ylabel=f"expected success at {target}, %")
    axes.set_title(f"numbers: alpha; ring and 95% intervals: the alpha with the highest {target}", fontsize=10)
    for i, (top, (family, label, style)) in enumerate(zip(tops, looks(found, "kl_coef"))):
        (x, _), (y, _) = ends(family, "N"), ends(family, target)
        axes.plot(x, y, linewidth=1, label=label, **style | dict(markersize=7))
        for g, *point in zip(family, x, y):
            axes.annotate(show(g.key.get("kl_coef", "")), point, (6, (-13, 5)[i % 2]), textcoords="offset points",
                          color=style["color"], fontsize=9)
        (x, dx), (y, dy) = ends([top], "N"), ends([top], target)
        axes.errorbar(x, y, dy, dx, fmt="none", ecolor=style["color"], elinewidth=0.8)
        axes.plot(x, y, "o", markersize=14 * (len(family) > 1), mfc="none", color="black", zorder=1)
    for i, same in enumerate(comparisons([g for family in found for g in family], *PENALTIES)):    # by temperature
        ended = {seed: run.end for g in same for seed, run in g.runs.items() if run.end}   # each once
        before = [[100 * number(end, "pretrained_accuracy", name) for end in ended.values()]
                  for name in ("N", target)]
        axes.plot(*[interval(v)[0] for v in before], "*", color="black", mfc=("black", "white")[i % 2], markersize=11,
                  label="pretrained" + f", temperature {show(same[0].key['temperature'])}" * (i > 0))
    return add_legend(figure)


def crossed(groups):
    found, target = cross(groups), groups[0].target
    regions = list(dict.fromkeys(region for _, region in found))
    shown = [{region: g for (p, region), g in found.items() if p == penalty} for penalty in MODES]
    shown = [there for there in shown if there]
    curves = [(label, style | dict(linestyle="none", markersize=7), [regions.index(r) + i / 5 - 0.2 for r in shown[i]],
               [ends(there, name) for name in (target, "N")])
              for i, (there, label, style) in enumerate(looks([list(there.values()) for there in shown]))]
    return pair([f"at {target} digits", "at N digits"], "trust region", "expected success at the end, %", curves,
                range(len(regions)), regions, None)


def accuracy_by_digits(groups):
    curves = [(label, style, np.arange(4) + 0.3 * ((i + 0.5) / len(groups) - 0.5), [
        100 * np.array([bounds(g.graded(kind, digits, "sampled")) for digits in LENGTHS]).T
        for kind in ("identical", "varying")]) for i, ([g], label, style) in enumerate(looks([[g] for g in groups]))]
    return pair(["identical lengths", "varying lengths"], "digits of the longer operand",
                "success of sampled answers, %", curves, range(4), LENGTHS, (-3, 103))


def mismatch(groups):
    pairs = [[number(x) for x in at(pair, kind=list)] for g in groups for end in g.final("sampler", kind=list)
             for pair in end]
    mu, pi = np.array([pair for pair in pairs if len(pair) == 2 and all(x > 0 for x in pair)]).reshape(-1, 2).T
    if not len(mu):
        return "no pairs of mu and pi in any evaluation.json"
    figure = Figure((8, 3.6), layout="constrained")
    for i, (y, ylabel) in enumerate(((pi / mu, "ratio π / μ"), (abs(pi - mu), "|π − μ|"))):
        axes = figure.add_subplot(1, 2, i + 1, ylabel=ylabel, xscale="log", xlabel="μ, the sampler's probability")
        axes.plot(mu, y, "o", color=COLOURS[2], markersize=3, alpha=0.35, markeredgewidth=0, rasterized=True)
        axes.axhline(1 - i, color="black", linewidth=0.8)
    figure.suptitle(f"sampler (μ) and trainer (π) at equal weights, {len(mu)} tokens", fontsize=11)
    return figure


def coloured_text(groups):
    end = next(run.end for run in groups[0].runs.values())
    text, J = at(end, "text", kind=str), [number(x) for x in at(end, "certainty", kind=list)]
    if not text or len(J) != len(text) or any(map(math.isnan, J)):
        return "needs one certainty for each character"
    lines = [list(zip(line.group().replace("\n", "↵"), J[line.start():])) for line in re.finditer(".*\n|.+", text)]
    columns, least = max(map(len, lines)), sorted(J)[:5][-1]
    width, low = 7 / max(columns, 40), min(0.8, math.floor(10 * min(J)) / 10)           # of a character, in inches
    figure = Figure((8, 1.2 + 2.1 * width * len(lines)), layout="constrained")
    answer = {True: "right", False: "wrong"}.get(end.get("correct"), "")
    axes = figure.add_subplot(title=f"{end.get('problem', '')} {answer}; framed: the least certain characters")
    axes.axis("off")
    shown = axes.imshow([[j for _, j in line] + [math.nan] * (columns - len(line)) for line in lines],
                        cmap="magma", vmin=low, vmax=1, aspect=2.1)
    for y, line in enumerate(lines):
        for x, (character, j) in enumerate(line):
            axes.text(x, y, character, ha="center", va="center", family="monospace", fontsize=104 * width,
                      color="white" if j < (low + 1) / 2 else "black",
                      bbox=dict(fill=False, edgecolor="deepskyblue", linewidth=1.5, pad=0.8) if j <= least else None)
    figure.colorbar(shown, orientation="horizontal", fraction=0.06, pad=0.02, aspect=50,
                    label="certainty J of the pretrained model on each character")
    return figure


def growth(groups):
    found = list(bench_series(groups))
    figure = Figure((8, 3 * len(found)), layout="constrained")
    for (i, (name, x, curves)), memory in itertools.product(enumerate(found), (False, True)):
        axes = figure.add_subplot(len(found), 2, 2 * i + memory + 1, xscale="log", yscale="log", xlabel=name,
                                  ylabel="memory of the process, MB" if memory else "time, s")
        for k, (label, (y, exponent)) in enumerate(curves.items()):
            if (label == "peak memory") == memory:
                axes.plot(x, y, color=COLOURS[k % len(COLOURS)], linestyle=LINES[k % 4], marker="os^D"[k % 4],
                          label=f"{label}, exponent {exponent:.2f}")
        axes.set_xticks(x, map(show, x))
        axes.xaxis.minorticks_off()
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.6)                    # room for the legend
        axes.legend(fontsize=9, handlelength=2.5, loc="upper left")
    return figure


def plan(groups):
    """The pictures: {name: (function, what it needs, {end of the name: groups to draw})}."""
    of = {mode: [g for g in groups if g.key["mode"] == mode and g.final()] for mode in OTHER}
    rl, both = [g for g in groups if g.key["mode"] in MODES], (*PENALTIES, *REGIONS)
    done = [g for g in rl if not np.isnan(ends([g], "N")[0]).all()]
    main = comparisons(rl, *both)
    main = named([choose(e, "mode") for e in main if e is main[0] or len({g.key["penalty"] for g in e}) > 1], *both)
    trust = {}
    for end, e in named([e for e in comparisons(rl, *REGIONS) if len(e) > 1], *REGIONS).items():
        trust[end] = choose(e, "method", limit=10)
        trust |= {f"{end}_{same[0].key['method']}": same for same in comparisons(e, *METHOD)
                  if 1 < len(same) < len(e) and len(e) > 10}               # variants of one method
    degrees = sorted([e for e in comparisons(rl, *DEGREE) if len(e) > 1], key=len, reverse=True)
    alphas = [e for e in comparisons(done, *PENALTIES, "temperature") if families(e, "kl_coef")]
    wide = [e for e in comparisons(done, *both) if cross(e)]
    some = lambda groups, found=True: named([groups] * bool(groups and found))
    evaluated, alone = some(of["evaluate"]), "runs that differ in {} alone".format
    return {
        "learning_curves": (lambda e: panels(e, "learning_curves"), "runs of RL", main),
        "pretraining": (lambda e: panels(e, "learning_curves"), alone(" or ".join(DEGREE)), named(degrees, *DEGREE)),
        "critical_tokens": (lambda e: panels(e, "critical_tokens"), "runs of RL", main),
        "trust_region": (lambda e: panels(e, "trust_region"), alone("method or trust region"), trust),
        "beta_sweep": (lambda e: sweep(e, "beta"), alone("beta"), some(done, families(done, "beta"))),
        "alpha_sweep": (lambda e: sweep(e, "kl_coef"), alone("kl_coef"), some(done, families(done, "kl_coef"))),
        "frontier": (frontier, alone("kl_coef"), named(alphas, *PENALTIES, "temperature")),
        "crossed": (crossed, "runs of several penalties by several trust regions", named(wide, *both)),
        "accuracy_by_digits": (accuracy_by_digits, "runs of --mode evaluate", evaluated),
        "mismatch": (mismatch, "runs of --mode evaluate", evaluated),
        "coloured_text": (coloured_text, "runs of --mode inspect", named([[g] for g in of["inspect"]])),
        "growth": (growth, "bench " + alone("digits, episodes or width"),
                   some(of["bench"], list(bench_series(of["bench"]))))}


# ----------------------------------------------------------------------------------------------------
# Tables.

def cell(values, scale=100, places=1):
    """Mean ± half width of what `bounds` takes, or mean (low to high) where these are not alike."""
    mean, below, above = scale * np.array(bounds(values))
    texts = [f"{x:.{places}f}" for x in (mean, below, above, mean - below, mean + above)]
    if math.isnan(mean) or math.isnan(below):
        return "" if math.isnan(mean) else texts[0]
    return f"{texts[0]} ± {texts[1]}" if texts[1] == texts[2] else f"{texts[0]} ({texts[3]} to {texts[4]})"


def results(groups, pictures, command):
    """The text of results.md: the numbers behind the pictures, of the finished runs."""
    runs = [run for g in groups for run in g.runs.values()]
    versions = {f"critkl {run.config.get('version')}, torch {run.config.get('torch')}" for run in runs}
    text = ["# Results", "", f"`{command}` with {len(runs)} runs of {'; '.join(sorted(versions))}.",
            "Mean over seeds ± half the width of its 95% interval (Student t); of one evaluated seed over",
            "problems. Seeds: finished of started.", ""]

    def table(title, head, rows, note=""):
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
        text.extend(["## " + title.replace("_", " "), "", *[note, ""] * bool(note), *lines, ""] if rows else [])

    def of_groups(title, shown, head, row, note=""):
        table(title, ["group", "seeds", *head], [[label, f"{len(g.final())} of {len(g.runs)}", *row(g)]
                                                 for g, label in zip(shown, labels(shown))], note)

    rl, both = [g for g in groups if g.key["mode"] in MODES], (*PENALTIES, *REGIONS)
    names = lambda field: sorted({name for g in rl for found in g.final(field, kind=dict) for name in found})
    accuracy = [(name, when, field) for name in names("accuracy")
                for when, field in (("before", "pretrained_accuracy"), ("after", "accuracy"))]
    for end, e in named(comparisons(rl, *both), *both).items():
        common = [f"{k} {show(v)}" for k, v in e[0].key.items() if all(g.key.get(k) == v for g in e)]
        of_groups(f"Expected success at the end, %{end}", e, [f"{name}, {when}" for name, when, _ in accuracy] + [
            "seconds"], lambda g: [cell(g.final(field, name)) for name, _, field in accuracy] + [
            cell(g.final("seconds", "total"), 1, 0)], f"All of them: {', '.join(common)}.")
    for end, e in pictures["frontier"].items():
        (found, tops), k = alpha_families(e), e[0].target
        success = lambda g: {seed: number(run.end, "accuracy", k) for seed, run in g.runs.items()}
        usual = [success(g) for g in tops if g.key["penalty"] == "standard"][:1]
        table(f"Best against best, %{end}", ["penalty", "alphas", "best", "seeds", k, "N", f"{k} less standard's"], [
            [label, ", ".join(show(h.key.get("kl_coef", "")) for h in family), show(g.key.get("kl_coef", "")),
             len(g.final()), cell(g.final("accuracy", k)), cell(g.final("accuracy", "N")),
             cell([success(g)[seed] - s[seed] for s in usual for seed in s if seed in success(g) and s != success(g)])]
            for family, g, label in zip(found, tops, labels([family[0] for family in found], "kl_coef"))],
            f"The best alpha has the highest success at {k} on these same runs; differences seed by seed.")
    for (end, e), name in itertools.product(pictures["crossed"].items(), ("TARGET", "N")):
        cells, name = cross(e), name.replace("TARGET", e[0].target)
        penalties, regions = (list(dict.fromkeys(found)) for found in zip(*cells))
        table(f"Penalty by trust region, at {name}, % (seeds){end}", ["penalty", *regions], [[penalty] + [
            f"{cell(g.final('accuracy', name))} ({len(g.final())})" if g else "" for g in (
                cells.get((penalty, region)) for region in regions)] for penalty in penalties])
    for end, e in named([e for e in comparisons(rl, *REGIONS) if len(e) > 1], *REGIONS).items():
        columns = {"drift_max": 1, "drift_min": 1, "drift": 4, "masked": 3, "bad": 4}
        of_groups(f"Trust regions, %{end}", e, ["reward at the end", *columns], lambda g: [
            cell([x[-1] for x in g.column("reward")])] + [
            cell([float(np.mean(x)) for x in g.column(name)], 100, p) for name, p in columns.items()],
            "Reward since the last evaluation; the other columns are means over the iterations, drift is π − μ.")
    for end, e in pictures["critical_tokens"].items():
        change = lambda g, name: " → ".join(cell(g.final("critical_tokens", name, k)) for k in ("before", "after"))
        table(f"Probability of the right token on critical tokens before → after, %{end}", ["token", *labels(e)], [
            [name.replace("_", " "), *(change(g, name) for g in e)] for name in names("critical_tokens")])
    shown = pictures["accuracy_by_digits"].get("", [])
    for kind, measure in itertools.product(("identical", "varying"), ("sampled", "greedy", "expected")):
        of_groups(f"Success, {measure}, {kind} lengths, % ([V] table {'54'[kind == 'identical']})", shown, LENGTHS,
                  lambda g: [cell(g.graded(kind, digits, measure)) for digits in LENGTHS])
    kinds = ("critical", "non-critical")
    of_groups("Certainty on a token less its mean on the others ([V] table 1)", shown, kinds, lambda g: [
        cell(g.final("certainty_gap", name, kind=list), 1, 4) for name in kinds])
    keys = dict.fromkeys(key for g in shown for found in g.final("definition", kind=dict) for key in found)
    table("Tokens by the definition of critical, mean over seeds", ["", *labels(shown)], [
        [key] + [show(interval(g.final("definition", key))[0]) for g in shown] for key in keys])
    for name, x, curves in bench_series(pictures["growth"].get("", [])):
        table(f"Time in s and peak memory in MB against {name}", [name, *curves], [
            [show(at)] + [f"{y[i]:.4g}" for y, _ in curves.values()] for i, at in enumerate(x)]
            + [["exponent"] + [f"{exponent:.2f}" for _, exponent in curves.values()]])
    return "\n".join(text)


# ----------------------------------------------------------------------------------------------------
# Command line.

def main(argv=None):
    parser = argparse.ArgumentParser(prog="plots.py", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="run folders, or folders that hold them")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the first FOLDER)")
    args = parser.parse_args(argv)
    out = Path(args.out or args.folders[0])
    try:
        groups = read_groups(args.folders)
        out.mkdir(parents=True, exist_ok=True)
        pictures = plan(groups)
        for name, (draw, needs, found) in pictures.items():
            if not found:
                print(f"{name}: not drawn: needs finished {needs}")
            for end, shown in found.items():
                figure, path = draw(shown), out / (name + end)
                if isinstance(figure, str):
                    print(f"{path.name}: not drawn: {figure}")
                    continue
                figure.savefig(f"{path}.png")
                figure.savefig(f"{path}.pdf", metadata={"CreationDate": None})
                print(f"{path.name}: {path}.png and .pdf, from {len(shown)} of {len(groups)} groups")
        command = shlex.join(["python", "plots.py", *(sys.argv[1:] if argv is None else argv)])
        text = results(groups, {name: found for name, (_, _, found) in pictures.items()}, command)
        (out / "results.md").write_text(text, encoding="utf-8")
        print(f"results: {out / 'results.md'}, from {len(groups)} groups")
        return 0
    except OSError as error:
        print(f"plots.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

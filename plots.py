"""plots: every picture and table that a set of critkl run folders allows.

    python plots.py runs                        draw all of runs/, into runs/
    python plots.py runs/a runs/b --out figures some runs only, into another folder

Reads config.json, metrics.csv and summary.json of each run, nothing else; writes each picture as PNG and
PDF, and the numbers as results.md. Runs that differ in their seed alone are a group. Shown are the mean
over the seeds of a group and the 95% interval of that mean (Student t; none for one seed).

    learning_curves   expected success at N+k and at N while training, [V] fig. 3, 4
    critical_tokens   probability of the right n+1 comma while training, [V] fig. 4, 7
    trust_region      reward, masked tokens, pi - mu while training, [Q] fig. 3; needs a run without the usual clip
    beta_sweep        success at the end against beta, [V] fig. 6; needs finished runs that differ in beta alone
    frontier          success at the end, N+k against N; needs finished runs that differ in kl_coef (alpha) alone

A run still going is drawn as far as it goes. Of more than 8 groups, the first three show one of each mode
(or trust region): that with the most seeds, among equals the one most like the others.
"""
import argparse
import csv
import itertools
import json
import math
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

# mode: colour (Okabe and Ito), line style, marker; the penalty, method and trust region that it implies
MODES = {"none": ("#D55E00", ":", "s", "none", "ppo", "clip"),
         "standard": ("#0072B2", "--", "^", "standard", "ppo", "clip"),
         "critical": ("#009E73", "-", "o", "critical", "ppo", "clip"),
         "dppo": ("#CC79A7", "-.", "D", "none", "dppo", "divergence")}
COLOURS = ("black", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7")
FREE = ("seed", "out", "name", "problem", "checkpoint", "json", "preset", "threads")  # make no group of their own
PENALTY = ("beta", "certainty", "certainty_temperature", "kl_coef", "kl_kind")
CLIP, DIVERGENCE = ("eps_low", "eps_high", "relax", "relax_below"), ("divergence", "top_k", "delta")
METHOD = ("trust_region", "ratio_cap", "anchor", *CLIP, *DIVERGENCE)      # what --method sets
SHORT = {"kl_coef": "alpha", "digits": "N", "extra": "k", "method": ""}


# ----------------------------------------------------------------------------------------------------
# Reading. What is torn, missing or not a number is left out.

@dataclass
class Run:
    folder: Path
    config: dict
    rows: dict        # iteration to {column: number}, in order; of a repeated iteration the last
    summary: dict     # empty while the run is going


@dataclass
class Group:
    key: dict         # the settings in effect
    runs: dict        # seed to Run

    @property
    def target(self):
        return f"N+{self.key.get('extra', 1)}"

    def final(self, *path):
        """The number at a path of keys into the summary.json of each finished run."""
        return [number(run.summary, *path) for run in self.runs.values() if run.summary]


def number(value, *path):
    """The finite float at a path of keys into nested dicts, or nan."""
    for name in path:
        value = dictionary(value).get(name)
    try:
        return float(value) if math.isfinite(float(value)) else math.nan
    except (TypeError, ValueError):
        return math.nan


def dictionary(value):
    return value if isinstance(value, dict) else {}


def read_json(path):
    try:
        return dictionary(json.loads(path.read_text(errors="replace")))
    except (OSError, ValueError):
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
    """The settings that shape a run, without those that its penalty and its trust region do not use."""
    penalty, region = settings.get("penalty"), settings.get("trust_region")
    idle = (FREE + {"none": PENALTY, "standard": PENALTY[:3]}.get(penalty, ())
            + {"clip": DIVERGENCE, "divergence": CLIP, "negative": CLIP + DIVERGENCE[:2]}.get(
                region, CLIP + DIVERGENCE))
    return {name: value for name, value in settings.items() if name not in idle}


def read_groups(folders):
    """All runs in or below the folders, by group, in the order of MODES. Raises OSError."""
    runs, groups = {}, {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder}: no such folder")
        found = [Run(path.parent, read_json(path), read_metrics(path.with_name("metrics.csv")),
                     read_json(path.with_name("summary.json"))) for path in sorted(folder.rglob("config.json"))]
        if not found:
            raise FileNotFoundError(f"{folder}: no runs in it (a run is a folder with a config.json)")
        runs |= {run.folder.resolve(): run for run in found}
    for run in sorted(runs.values(), key=lambda run: (not run.summary, -len(run.rows))):   # longest first
        settings = dictionary(run.config.get("settings"))
        if settings.get("mode") not in MODES:
            print(f"{run.folder}: left out, it holds no RL (mode {settings.get('mode')})")
            continue
        key, seed = in_effect(settings), str(settings.get("seed"))
        group = groups.setdefault(json.dumps(key, sort_keys=True), Group(key, {}))
        if group.runs.setdefault(seed, run) is not run:                                    # a seed counts once
            print(f"{run.folder}: left out, it has the settings and the seed of {group.runs[seed].folder}")
        elif not run.summary:
            print(f"{run.folder}: not finished, at iteration {max(run.rows, default=0):g}")
    if not groups:
        raise FileNotFoundError(f"{', '.join(folders)}: no runs to draw in it")
    return sorted(groups.values(), key=lambda g: ([*MODES].index(g.key["mode"]), [
        (np.nan_to_num(number(value)), str(value)) for value in g.key.values()]))


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


def curve(group, column):
    """Iterations, means and half widths in % over the seeds that have the column there: (3, n)."""
    at = sorted({iteration for run in group.runs.values() for iteration in run.rows})
    points = [(i, *interval([100 * number(run.rows, i, column) for run in group.runs.values()])) for i in at]
    return np.array([point for point in points if not math.isnan(point[1])]).reshape(-1, 3).T


def ends(groups, name):
    """Means and half widths in % of the success at the end: (2, groups)."""
    return np.array([interval([100 * v for v in g.final("accuracy", name)]) for g in groups]).T


# ----------------------------------------------------------------------------------------------------
# Which groups to show together, and how each looks.

def without(group, *names):
    return json.dumps({name: value for name, value in group.key.items() if name not in names}, sort_keys=True)


def families(groups, name):
    """The lists of two or more groups that differ in this setting alone, in its order."""
    found = {}
    for g in groups:
        if not math.isnan(number(g.key, name)):
            found.setdefault(without(g, name), []).append(g)
    return [sorted(family, key=lambda g: g.key[name]) for family in found.values() if len(family) > 1]


def choose(groups, *names):
    """All groups, or of more than 8 one for each combination of the named settings."""
    kinds = {}
    for g in groups:
        kinds.setdefault(repr([g.key.get(name) for name in names]), []).append(g)
    rank = lambda g: (len(g.runs), sum(g.key[name] == other.key.get(name) for other in groups for name in g.key))
    return groups if len(groups) <= 8 else [max(kind, key=rank) for kind in kinds.values()]


def show(value):
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def labels(groups, but=None):
    """The mode of each group and the settings in which the groups differ (but one): "critical, alpha 0.1"."""
    names = dict.fromkeys(name for g in groups for name in g.key if name not in ("mode", but))
    names = [name for name in names if len({repr(g.key[name]) for g in groups if name in g.key}) > 1]
    found = []
    for g in groups:
        usual = dict(zip(("penalty", "method", "trust_region"), MODES[g.key["mode"]][3:]),
                     ratio_cap=math.inf, eps_high=0.2, anchor="rollout", relax="none")
        if g.key.get("method", usual["method"]) != usual["method"]:       # another method: what it always has is usual
            like = [h.key for h in groups if (h.key["mode"], h.key.get("method")) == (g.key["mode"], g.key["method"])]
            usual |= {name: g.key.get(name) for name in METHOD if len({repr(key.get(name)) for key in like}) == 1}
        label = ", ".join([g.key["mode"]] + [
            f"{SHORT.get(name, name).replace('_', ' ')} {show(g.key[name])}".strip()
            for name in names if name in g.key and g.key[name] != usual.get(name)])
        found.append(f"{label} #{len(found) + 1}" if label in found else label)    # if one lacks a setting
    return found


def styles(groups):
    """Plot keywords for each group: the look of its mode; several of one mode go from light to dark, or
    where there is no other mode and they are many, each has a look of its own."""
    modes, found = [g.key["mode"] for g in groups], []
    for i, mode in enumerate(modes):
        colour, line, marker = MODES[mode][:3]
        if modes.count(mode) > 1:
            place = modes[:i].count(mode)
            shade, marker = 0.5 - place / (modes.count(mode) - 1), "os^Dv<>P*X"[place % 10]
            colour = tuple((1 - abs(shade)) * np.array(to_rgb(colour)) + max(shade, 0))
            if 3 < modes.count(mode) == len(groups):
                colour, line = COLOURS[place % len(COLOURS)], ("-", "--", "-.", ":")[place % 4]
        found.append(dict(color=colour, linestyle=line, marker=marker))
    return found


def seeds(counts):
    low, high = min(counts), max(counts)
    return f" ({low}{f' to {high}' if low < high else ''} seed{'s' if high > 1 else ''})"


def add_legend(figure):
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    columns = min(len(handles), max(1, 104 // (8 + max(map(len, handles)))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, columnspacing=1.5)
    figure.set_figheight(figure.get_figheight() + 0.21 * math.ceil(len(handles) / columns))
    return figure


# ----------------------------------------------------------------------------------------------------
# Pictures: functions of the groups that return a Figure, or a text that says what it lacks.

def panels(groups, columns, rows, height, limits=(None, None)):
    """A panel for each {(title, label of y): columns of metrics.csv}, in it a curve with band for each group."""
    figure = Figure((8, height), layout="constrained")
    for i, ((title, ylabel), names) in enumerate(columns.items()):
        axes = figure.add_subplot(rows, len(columns) // rows, i + 1, title=title, ylabel=ylabel)
        if i >= len(columns) - len(columns) // rows:
            axes.set_xlabel("RL iteration")
        for (g, label, style), name in itertools.product(zip(groups, labels(groups), styles(groups)), names):
            x, mean, half = curve(g, name.replace("TARGET", g.target))
            if len(x):
                axes.plot(x, mean, markevery=max(1, len(x) // 8), **style,
                          label=label + seeds([sum(bool(run.rows) for run in g.runs.values())]))
                axes.fill_between(x, mean - half, mean + half, color=style["color"], linewidth=0,
                                  alpha=0.6 / max(4, len(groups)))
        axes.set_ylim(*limits)
    return add_legend(figure) if any(axes.lines for axes in figure.axes) else "no rows yet in any metrics.csv"


def learning_curves(groups):
    title = f"at {' or '.join(sorted({g.target for g in groups}))} digits: what RL trains"
    return panels(groups, {(title, "expected success, %"): ["accuracy_TARGET"],
                           ("at N digits: what it knew before", ""): ["accuracy_N"]}, 1, 3.6, (0, 103))


def critical_tokens(groups):
    return panels(groups, {
        (f"line {line}, {operand} operand", "probability of the\nright token, %" if line == 1 else ""):
        [f"line{line}_{operand}_n+1_comma"] for operand in ("first", "second") for line in (1, 2, 3)}, 2, 5, (0, 103))


def trust_region(groups):
    if all(g.key.get("method", "ppo") == "ppo" and g.key.get("trust_region", "clip") == "clip"
           and math.isnan(number(g.key, "ratio_cap")) for g in groups):
        return "all runs have the usual clip; needs some of another --method, --trust-region or --ratio-cap"
    return panels(groups, {
        ("episodes solved (reward)", "share of rollouts, %"): ["reward"],
        ("masked tokens", "share of tokens, %"): ["masked"],
        ("largest and smallest π − μ", "probability, %"): ["drift_max", "drift_min"],
        ("mean π − μ", "probability, %"): ["drift"]}, 2, 5.6)


def beta_sweep(groups):
    found = families(groups, "beta")
    if not found:
        return "needs finished runs of the critical penalty that differ in beta alone"
    figure, heads, ticks = Figure((8, 3.8), layout="constrained"), [family[0] for family in found], set()
    axes = figure.add_subplot(xlabel="beta, the exponent of the certainty", ylim=(0, 103),
                              ylabel="expected success at the end, %")
    axes.set_xscale("symlog", linthresh=1)
    for family, label, style in zip(found, labels(heads, "beta"), styles(heads)):
        same = lambda g: without(g, "mode", "penalty", *PENALTY[:3])
        if family[0].key["beta"] > 0:                                      # beta 0 is the standard penalty
            family = [g for g in groups if "beta" not in g.key and same(g) == same(family[0])][:1] + family
        beta = [g.key.get("beta", 0) for g in family]
        ticks.update(beta)
        for name, look in ((family[0].target, dict(linestyle="-")), ("N", dict(linestyle="--", mfc="white"))):
            axes.errorbar(beta, *ends(family, name), capsize=3, elinewidth=1, **style | look,
                          label=f"{label}, at {name}" + seeds([len(g.final()) for g in family]))
    axes.set_xticks(sorted(ticks), map(show, sorted(ticks)))
    axes.minorticks_off()
    return add_legend(figure)


def frontier(groups):
    found = families(groups, "kl_coef")
    if not found:
        return "needs finished runs that differ in kl_coef (alpha) alone"
    same, target = lambda g: without(g, "mode", "penalty", *PENALTY), found[0][0].target
    alike = {same(family[0]) for family in found}
    found = [[g] for g in groups if g.key.get("penalty") == "none" and same(g) in alike] + found
    figure, heads = Figure((8, 4.6), layout="constrained"), [family[0] for family in found]
    axes = figure.add_subplot(xlabel="expected success at N at the end, %",
                              ylabel=f"expected success at {target} at the end, %")
    axes.set_title("numbers: alpha, the coefficient of the KL penalty; bars: 95% intervals", fontsize=10)
    for i, (family, label, style) in enumerate(zip(found, labels(heads, "kl_coef"), styles(heads))):
        style["marker"] = MODES[family[0].key.get("penalty", "critical")][2]
        (x, dx), (y, dy) = ends(family, "N"), ends(family, family[0].target)
        axes.errorbar(x, y, dy, dx, elinewidth=0.8, markersize=8, linewidth=1, **style,
                      label=label + seeds([len(g.final()) for g in family]))
        for g, *point in zip(family, x, y):
            axes.annotate(show(g.key.get("kl_coef", "")), point, (6, (-13, 5)[i % 2]), textcoords="offset points",
                          color=style["color"], fontsize=10)
    before = [interval([100 * v for family in found for g in family for v in g.final("pretrained_accuracy", name)])
              for name in ("N", target)]
    axes.plot(before[0][0], before[1][0], "k*", markersize=11, label="pretrained")
    return add_legend(figure)


# ----------------------------------------------------------------------------------------------------
# Tables.

def table(head, rows):
    return ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]


def cell(values, scale=100, places=1):
    mean, half = interval([scale * value for value in values])
    return "" if math.isnan(mean) else f"{mean:.{places}f}" + ("" if math.isnan(half) else f" ± {half:.{places}f}")


def results(groups, command):
    """The text of results.md: success and critical tokens before and after RL, from the finished runs."""
    runs = [run for g in groups for run in g.runs.values()]
    names = lambda field: sorted({name for run in runs for name in dictionary(run.summary.get(field))})
    starts = [[label, f"{len(g.final())} of {len(g.runs)}"] for g, label in zip(groups, labels(groups))]
    common = [f"{name} {value}" for name, value in groups[0].key.items()
              if all(g.key.get(name) == value for g in groups)]
    versions = sorted({f"critkl {run.config.get('version')}, torch {run.config.get('torch')}" for run in runs})
    success = [start + [cell(g.final(field, name)) for name in names("accuracy")
                        for field in ("pretrained_accuracy", "accuracy")] + [cell(g.final("seconds", "total"), 1, 0)]
               for g, start in zip(groups, starts)]
    tokens = [[name, *start] + [cell(g.final("critical_tokens", name, when)) for when in ("before", "after")]
              for name in names("critical_tokens") for g, start in zip(groups, starts) if g.final()]
    return "\n".join([
        "# Results", "", f"`{command}` with {len(runs)} runs of {'; '.join(versions)}.",
        "Mean over seeds ± half the width of its 95% interval (Student t). Seeds: finished of started.", "",
        f"Settings that all runs share: {', '.join(common)}.", "", "## Expected success at the end, %", "",
        *table(["group", "seeds"] + [f"{name}, {when}" for name in names("accuracy") for when in ("before", "after")]
               + ["seconds"], success), "",
        "## Probability of the right token on critical tokens, %", "",
        *table(["token", "group", "seeds", "before", "after"], tokens), ""])


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
        done = [g for g in groups if not np.isnan(ends([g], "N")[0]).all()]
        out.mkdir(parents=True, exist_ok=True)
        modes = choose(groups, "mode")
        regions = choose(groups, "mode", "method", *METHOD)
        for draw, shown in ((learning_curves, modes), (critical_tokens, modes), (trust_region, regions),
                            (beta_sweep, done), (frontier, done)):
            figure, path = draw(shown), out / draw.__name__
            if isinstance(figure, str):
                print(f"{draw.__name__}: not drawn: {figure}")
                continue
            figure.savefig(f"{path}.png")
            figure.savefig(f"{path}.pdf", metadata={"CreationDate": None})
            print(f"{draw.__name__}: {path}.png and .pdf, from {len(shown)} of {len(groups)} groups")
        command = shlex.join(["python", "plots.py", *(sys.argv[1:] if argv is None else argv)])
        (out / "results.md").write_text(results(groups, command), encoding="utf-8")
        print(f"results: {out / 'results.md'}, {len(done)} of {len(groups)} groups have finished runs")
        return 0
    except OSError as error:
        print(f"plots.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

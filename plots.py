"""plots: every picture and table that a set of critkl run folders allows.

    python plots.py runs                         draw all of runs/, into runs/
    python plots.py runs/a runs/b --out figures  some runs only, into another folder
    python plots.py runs --where lr=0.001        only runs with this setting (or that do not use it)

Reads config.json and what each run wrote: metrics.csv and summary.json, or evaluation.json,
inspect.json, bench.json. Writes the pictures of FIGURES (below) as PNG and PDF, their numbers as
results.md, and answers.html, a page to touch. Three rules say what is compared:

  1. Runs that differ in the seed alone are a group. Shown are the mean over its seeds and the 95%
     interval of that mean (Student t). A curve ends where the first of its seeds does.
  2. A picture is about some settings and shows groups that are alike in all others. Of several
     such sets that with the most runs is drawn; --where or other folders choose another.
  3. A picture of penalties or methods shows one group of each: that with the most runs, then the
     one with the most common settings.
"""
import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # also during the slow imports below

import argparse
import csv
import itertools
import json
import math
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure  # not pyplot: no display, no backend to choose

STYLE = {  # whatever a user's matplotlibrc says; without parse_math "$" is a dollar sign
    "font.size": 10, "axes.titlesize": 10, "legend.frameon": False, "legend.handlelength": 3,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.markersize": 5, "savefig.dpi": 150, "pdf.fonttype": 42, "text.parse_math": False}
COLOURS = ("black", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#999999")
LINES, MARKERS = ("-", "--", "-.", ":"), "os^Dv<>P"
LOOKS = {  # of each penalty
    "none": dict(color="#D55E00", linestyle=":", marker="s"),
    "standard": dict(color="#0072B2", linestyle="--", marker="^"),
    "critical": dict(color="#009E73", linestyle="-", marker="o")}

RESULT = {  # of each mode the file that a run writes at its end
    "evaluate": "evaluation.json", "inspect": "inspect.json", "bench": "bench.json",
    **dict.fromkeys(("none", "standard", "critical", "dppo"), "summary.json")}
PLAIN = (str, int, float, type(None))
SHAPES = {  # what a file must hold: [x] a list of x, {str: x} any names, float a finite number
    "config.json": {"settings": {str: PLAIN}},
    "summary.json": {"accuracy": {str: float}},
    "evaluation.json": {
        "rows": [{"set": str, "digits": str, "sampled": [float]}], "sampler": [[float]],
        "certainty_gap": {str: [float]}, "definition": {str: float}},
    "inspect.json": {
        "text": str, "problem": str, "certainty": [float], "weight": [float],
        "pretrained": [[[PLAIN]]], "policy": [[[PLAIN]]]},
    "bench.json": {"phases": {str: {"seconds": float}}}}

FREE = (
    "mode", "seed", "out", "name", "preset", "json", "eval_every", "eval_problems", "checkpoint")
PENALTY = ("penalty", "alpha", "kl_kind", "beta", "certainty", "certainty_temperature")
CLIP, MASK = ("eps_low", "eps_high", "relax", "relax_below"), ("divergence", "top_k", "delta")
BOUNDS = ("trust_region", "ratio_cap", "anchor", *CLIP, *MASK)
REGION, BUDGET = ("method", *BOUNDS), ("iterations", "lr")
DEGREE, SIZES = ("digits", "dial", "mistakes", "pretrain_steps"), ("digits", "episodes", "width")
IDLE = {  # settings that have no effect beside another
    ("penalty", "none"): PENALTY[1:], ("penalty", "standard"): PENALTY[3:],
    ("trust_region", "clip"): MASK, ("trust_region", "divergence"): CLIP,
    ("trust_region", "negative"): CLIP + MASK[:2], ("trust_region", "none"): CLIP + MASK,
    ("relax", "none"): ("relax_below",), ("advantage", "gae"): ("group",)}

class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""

def say(text):
    """Print a line. A standard output that is closed or cannot show a name stops nothing."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        print(str(text).encode("ascii", "backslashreplace").decode(), flush=True)
    except (OSError, ValueError):
        sys.stdout = None

# ---- Reading. What is damaged is named in a line and left out.

@dataclass(eq=False)
class Run:
    folder: Path
    settings: dict
    rows: dict  # iteration to {column: number}
    end: dict   # what the run wrote at its end; empty while it is going

@dataclass(eq=False)
class Group:
    key: dict   # the settings in effect
    runs: list

    def final(self, *path):
        """What each finished run wrote at its end under a path of keys."""
        found = [at(run.end, *path) for run in self.runs if run.end]
        return [value for value in found if value is not None]

    def success(self, digits, field="accuracy"):
        """Mean success at the end in %, with its interval."""
        values = self.final("intervals", field, digits) or self.final(field, digits)
        return 100 * np.array(interval(values))

    def curve(self, columns):
        """Iterations, and in % the mean of the columns that match, with its interval, over all
        seeds that have them, where all of these do: a mean over fewer would jump where one ends."""
        seeds = []
        for run in self.runs:
            found = {i: [x for name, x in row.items() if fnmatchcase(name, columns)]
                     for i, row in run.rows.items()}
            seeds.append({i: 100 * np.mean(values) for i, values in found.items() if values})
        for run, seed in zip(self.runs, seeds):
            if run.rows and not seed and any(seeds):
                say(f"{run.folder}: left out of a curve, it has no {columns}")
        seeds = [seed for seed in seeds if seed]
        common = sorted(set.intersection(*map(set, seeds))) if seeds else []
        return common, [interval([seed[i] for seed in seeds]) for i in common]

def at(value, *path):
    """What lies under a path of keys into nested dicts, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value

def number(value):
    """The value as a finite float, or nan."""
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return value if math.isfinite(value) else math.nan

def show(value):
    """A setting as text. JSON has null for infinity."""
    return "inf" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)

def cut(text):
    """A name short enough for titles and legends."""
    return text if len(text) <= 55 else f"{text[:34]}…{text[-20:]}"

def read(path, parse):
    """What a file holds; {} if there is none or it is damaged."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise ValueError("not an ordinary file")
        return parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        say(f"{path}: left out, {' '.join(str(error).split())}")
        return {}

def read_json(path):
    """A JSON object of the shape that its name says. Lists about a text are as long as it."""
    def parse(text):
        content = json.loads(text)
        for name, shape in SHAPES[path.name].items():
            value = at(content, name)
            proper = value and fits(value, shape)
            if proper and path.name == "inspect.json" and isinstance(value, list):
                proper = len(value) == len(content["text"])
            if not proper:
                raise ValueError(f"it holds no proper {name}")
        return content
    return read(path, parse)

def fits(value, shape):
    """Whether a JSON value has a shape (SHAPES)."""
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(x, shape[0]) for x in value)
    if isinstance(shape, dict) and str in shape:
        return isinstance(value, dict) and all(fits(x, shape[str]) for x in value.values())
    if isinstance(shape, dict):
        return all(fits(at(value, name), part) for name, part in shape.items())
    if shape is float:
        return isinstance(value, (int, float)) and not math.isnan(number(value))
    return isinstance(value, shape)

def parse_metrics(text):
    """Iteration to {column: number}; of a repeated iteration the last row. A spreadsheet may have
    saved it: semicolons or tabs between the columns, decimal commas."""
    delimiter = next((mark for mark in ";\t" if mark in text.partition("\n")[0]), ",")
    header, *table = csv.reader(text.splitlines(), delimiter=delimiter) if text else [[]]
    rows = {}
    for cells in filter(any, table):
        if len(cells) != len(header):
            raise ValueError(f"a row has {len(cells)} numbers for {len(header)} columns")
        row = {name: float(x.replace(",", ".")) for name, x in zip(header, cells) if x}
        row = {name: x for name, x in row.items() if math.isfinite(x)}
        rows[row.get("iteration")] = row
    if not rows or None in rows:
        raise ValueError("it has no iterations")
    return dict(sorted(rows.items()))

def run_folders(folders):
    """Every folder with a config.json in or below these, each once. Links are followed."""
    seen, found = set(), []
    for top in folders:
        if not os.path.isdir(top):
            raise UserError(f"{top}: no such folder")
        for folder, below, files in os.walk(top, followlinks=True, onerror=say):
            real = os.path.realpath(folder)
            if real in seen:  # by a second link, or one that leads in a circle
                below.clear()
                continue
            seen.add(real)
            below.sort()
            found += [Path(folder)] if "config.json" in files else []
            for path in (os.path.join(folder, name) for name in files):
                if not os.path.exists(path):
                    say(f"{path}: left out, a link to nowhere")
    return found

def in_effect(settings):
    """The settings that shape a run, without those that have no effect beside others."""
    idle = {name for setting in settings.items() for name in IDLE.get(setting, ())}
    key = {name: x for name, x in settings.items() if name not in FREE and name not in idle}
    if RESULT[settings["mode"]] != "summary.json":
        policy = Path(str(settings.get("checkpoint") or "pretrained")).name
        key |= {"mode": settings["mode"], "policy": re.sub(r"-seed\d+$", "", policy)}
    return key

def read_groups(folders, where=()):
    """The runs in or below the folders by group, in the order of their penalties and settings."""
    runs, groups, seeds = [], {}, {}
    for folder in run_folders(folders):
        settings = read_json(folder / "config.json").get("settings", {})
        if settings.get("mode") not in RESULT or settings.get("penalty", "none") not in LOOKS:
            if settings:
                say(f"{folder}: left out, nothing to draw in mode {show(settings.get('mode'))}")
        elif all(show(in_effect(settings).get(name, value)) == value for name, value in where):
            rows = read(folder / "metrics.csv", parse_metrics)
            end = read_json(folder / RESULT[settings["mode"]])
            runs.append(Run(folder, settings, rows, end))

    for run in sorted(runs, key=lambda run: (not run.end, -max(run.rows, default=-1))):
        key = in_effect(run.settings)
        name = json.dumps(key, sort_keys=True)
        first = seeds.setdefault((name, run.settings.get("seed")), run)
        if first is not run:
            say(f"{run.folder}: left out, it has the settings and the seed of {first.folder}")
            continue
        groups.setdefault(name, Group(key, [])).runs.append(run)
        if not run.end:
            say(f"{run.folder}: not finished, {len(run.rows)} rows in its metrics.csv")
    if not groups:
        raise UserError(f"{', '.join(folders)}: no runs to draw")
    return sorted(groups.values(), key=lambda group: (
        list(LOOKS).index(group.key.get("penalty", "none")),
        [(name, np.nan_to_num(number(x)), show(x)) for name, x in group.key.items()]))

# ---- Statistics over seeds.

T975 = (  # Student's t for 1 to 20 degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)

def interval(values):
    """Mean over seeds and the widths below and above of its 95% interval, t s / sqrt(n). Values:
    of each seed a number or [mean, low, high]; of a single seed its own interval is taken."""
    seeds = [[number(x) for x in (seed if isinstance(seed, list) else [seed])] for seed in values]
    seeds = [seed for seed in seeds if seed and not math.isnan(seed[0])]
    n, means = len(seeds), np.array([seed[0] for seed in seeds])
    if n == 0:
        return math.nan, math.nan, math.nan
    if n == 1:
        mean, low, high = seeds[0] if len(seeds[0]) == 3 else [means[0], math.nan, math.nan]
        return mean, max(mean - low, 0.0), max(high - mean, 0.0)
    t = T975[n - 2] if n - 2 < len(T975) else 1.96 + 2.5 / (n - 1)
    half = t * means.std(ddof=1) / math.sqrt(n)
    return means.mean(), half, half

# ---- Which groups to show together, and how each looks.

def alike(groups, about):
    """The groups in sets that are alike in all but these settings, most runs first."""
    sets = {}
    for group in groups:
        rest = {name: value for name, value in group.key.items() if name not in about}
        sets.setdefault(json.dumps(rest, sort_keys=True), []).append(group)
    return sorted(sets.values(), key=lambda found: -sum(len(group.runs) for group in found))

def one_of_each(groups, names):
    """For each value of these the group with the most runs, then the most common settings."""
    best = {}
    for i, group in enumerate(groups):
        common = sum(g.key.get(name) == x for g in groups for name, x in group.key.items())
        value = tuple(group.key.get(name) for name in names)
        best[value] = max(best.get(value, (0,)), (len(group.runs), common, -i))
    return [groups[-i] for _, _, i in best.values()]

def different(groups):
    """The settings with several values among the groups that have them, penalty first."""
    names = dict.fromkeys(name for group in groups for name in group.key)
    names = [n for n in names if len({show(g.key[n]) for g in groups if n in g.key}) > 1]
    return sorted(names, key=lambda name: name not in ("penalty", "method", "policy"))

def labels(groups):
    """For each group what tells it from the others."""
    names, found = different(groups), []
    if len({group.key.get("method") for group in groups}) == len(groups):
        names = [n for n in names if n not in BOUNDS]  # what a method always has is not said
    for group in groups:
        parts = [f"{n} {show(group.key[n])}" for n in names if n in group.key]
        text = re.sub(r"\b(penalty|method|policy) ", "", ", ".join(parts))
        found.append(cut(text or show(group.key.get("policy", group.key.get("penalty")))))
    return found

def styles(groups):
    """Plot keywords for each group: those of its penalty, if each has its own."""
    penalties = [group.key.get("penalty") for group in groups]
    if len(set(penalties)) == len(groups) and set(penalties) <= set(LOOKS):
        return [LOOKS[penalty] for penalty in penalties]
    looks = itertools.islice(zip(*map(itertools.cycle, (COLOURS, LINES, MARKERS))), len(groups))
    return [dict(zip(("color", "linestyle", "marker"), look)) for look in looks]

# ---- Pictures: functions of the groups that return panels of lines, or a figure of their own.

@dataclass
class Panel:
    title: str
    x: str                # its label
    lines: list           # (label, style, values of x, for each of these mean and widths)
    ticks: list = ()      # names of 0, 1, 2 ... on x: points with bars, not curves with bands
    percent: bool = True  # success, so that the axis ends at 100%

def draw(panels):
    """The figure of these panels, with a legend below."""
    columns = 2 if len(panels) % 3 else 3
    rows = math.ceil(len(panels) / columns)
    figure = Figure((9, 2.7 * rows), layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1, title=panel.title, xlabel=panel.x)
        for label, style, x, y in panel.lines:
            mean, below, above = np.reshape(y, (-1, 3)).T
            axes.plot(x, mean, label=label, clip_on=False, in_layout=False, **style)
            if panel.ticks:
                axes.errorbar(x, mean, (below, above), fmt="none", ecolor=style["color"], capsize=3)
            elif len(panel.lines) <= 6:
                band = dict(color=style["color"], alpha=0.15, linewidth=0)
                axes.fill_between(x, mean - below, mean + above, **band)
        if panel.ticks:
            turn = 45 if len(panel.ticks) > 4 else 0
            axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=turn)
        if panel.percent:
            axes.set_ylim(0, 100)
    return add_legend(figure, "mean over seeds and its 95% interval")

def add_legend(figure, title):
    handles, names = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(names), 105 // (8 + max(map(len, names), default=0))))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, title=title)
    height = 0.2 * (1 + math.ceil(len(names) / columns))
    figure.set_figheight(figure.get_figheight() + height)
    return figure

def target(groups):
    """The digits that RL trains, as in the columns of metrics.csv."""
    return f"N+{show(groups[0].key.get('extra', 1))}"

def curves(groups, panels):
    """While training. Panels: titles, and the columns of metrics.csv whose mean each shows."""
    found, groups = [], groups[:8]
    seeds = [sum(bool(run.rows) for run in group.runs) for group in groups]
    names = [f"{label} ({n} seed{'s' * (n != 1)})" for label, n in zip(labels(groups), seeds)]
    for title, columns in panels.items():
        title, columns = (text.replace("TARGET", target(groups)) for text in (title, columns))
        lines = []
        for group, name, style in zip(groups, names, styles(groups)):
            x, y = group.curve(columns)
            lines.append((name, style | {"markevery": max(1, len(x) // 8)}, x, y))
        percent = columns.startswith(("accuracy", "line", "reward"))
        found.append(Panel(title, "RL iteration", lines, percent=percent))
    return found

def at_the_end(groups, name):
    """Success against a setting, for each penalty and budget of RL. A penalty without the setting
    is at 0: alpha 0 is no penalty, beta 0 the standard one."""
    ticks = sorted({g.key.get(name, 0) for g in groups}, key=lambda x: (number(x), show(x)))
    budgets = sorted({tuple(number(g.key.get(n)) for n in BUDGET) for g in groups})
    families = [[g for g in groups if g.key["penalty"] == penalty] for penalty in LOOKS]
    families, panels = [family for family in families if family], []
    for digits, budget in itertools.product((target(groups), "N"), budgets):
        lines = []
        for i, family in enumerate(families):
            here = [g for g in family if tuple(number(g.key.get(n)) for n in BUDGET) == budget]
            x = [ticks.index(group.key.get(name, 0)) + 0.1 * (i - 1) for group in here]
            label = family[0].key["penalty"]
            style = LOOKS[label] | ({"linestyle": "none"} if name == "method" else {})
            others = sorted(set(different(family)) - {name, *BUDGET, *BOUNDS})
            label += f" (several {', '.join(others)})" * bool(others)
            lines.append((label, style, x, [group.success(digits) for group in here]))
        budget = ", ".join(f"{n} {show(x)}" for n, x in zip(BUDGET, budget) if len(budgets) > 1)
        title = f"success at {digits}, %" + f"\n{budget}" * bool(budget)
        panels.append(Panel(title, name, lines, [cut(show(tick)) for tick in ticks]))
    return panels

def accuracy_by_digits(groups, _):
    """Success of sampled answers, [V] tables 4 and 5."""
    panels, lengths, groups = [], ["N", "N+1", "N+2", "N+3"], groups[:8]
    for kind in ("identical", "varying"):
        lines = []
        for i, (group, label) in enumerate(zip(groups, labels(groups))):
            rows = {name: [] for name in lengths}
            for row in itertools.chain(*group.final("rows")):
                if row["set"] == kind and row["digits"] in rows:
                    rows[row["digits"]].append(row["sampled"])
            y = [100 * np.array(interval(values)) for values in rows.values()]
            lines.append((label, styles(groups)[i], np.arange(4) + 0.05 * i, y))
        panels.append(Panel(f"{kind} lengths, %", "digits", lines, lengths))
    return panels

def mismatch(groups, _):
    """Sampler (mu) and trainer (pi) at equal weights, [Q] fig. 2."""
    pairs = [pair for group in groups for found in group.final("sampler") for pair in found]
    pairs = [pair for pair in pairs if len(pair) == 2 and min(pair) > 0]
    mu, pi = np.reshape(pairs, (-1, 2)).T
    figure = Figure((9, 3), layout="constrained")
    for i, (title, y) in enumerate((("pi / mu", pi / mu), ("|pi - mu|", abs(pi - mu)))):
        axes = figure.add_subplot(1, 2, i + 1, title=f"{title} of {len(mu)} tokens")
        axes.set_xlabel("log10 of mu, the sampler's probability")
        axes.plot(np.log10(mu), y, "o", color=COLOURS[2], markersize=3, alpha=0.3, rasterized=True)
    return figure

def growth(groups, names):
    """Time and memory of each phase against each of these settings of bench."""
    panels = []
    measures = (("time, s", "seconds"), ("memory, MB", "peak_memory_mb"))
    for (title, measure), name in itertools.product(measures, names):
        family = alike(groups, (name, "minibatch"))[0]
        if name not in different(family):
            continue
        family.sort(key=lambda group: number(group.key[name]))
        x = [number(group.key[name]) for group in family]
        phases = sorted({phase for g in family for found in g.final("phases") for phase in found})
        lines = []
        for phase, color, marker in zip(phases, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
            y = [interval(group.final("phases", phase, measure)) for group in family]
            lines.append((phase, dict(color=color, marker=marker), x, y))
        panels.append(Panel(f"{title}, by {name}", name, lines, percent=False))
    return panels

def frontier(groups, _):
    """Success at N+k against success at N, a point for each group; names where they fit."""
    figure, digits = Figure((9, 5.5), layout="constrained"), target(groups)
    axes = figure.add_subplot(xlabel="success at N, %", ylabel=f"success at {digits}, %")
    names, notes = [name for name in ON_AXIS[1:] if name in different(groups)], []
    for penalty, style in LOOKS.items():
        family = [group for group in groups if group.key["penalty"] == penalty]
        if not family:
            continue
        x, y = (np.array([group.success(n) for group in family]).T for n in ("N", digits))
        best = [i for i in np.argsort(x[0]) if not any((x[0] > x[0][i]) & (y[0] > y[0][i]))]
        top = best[int(np.argmax(y[0][best]))]
        colour = style["color"]
        axes.plot(x[0], y[0], style["marker"], color=colour, label=penalty, clip_on=False)
        axes.plot(x[0][best], y[0][best], style["linestyle"], color=colour, linewidth=1)
        (right, left, more_right), (up, low, more_up) = x[:, top], y[:, top]
        axes.plot([right - left, right + more_right], [up, up], color=colour)
        axes.plot([right, right], [up - low, up + more_up], color=colour)
        axes.plot(x[0][top], y[0][top], "o", markersize=13, mfc="none", mec="black", clip_on=False)
        named = [top, *best] if len(family) > 8 else range(len(family))
        for i in dict.fromkeys(named):
            text = " / ".join(show(family[i].key[n]) for n in names if n in family[i].key)
            notes.append((i != top, x[0][i], y[0][i], text, colour))
    before = [[g.success(n, "pretrained_accuracy")[0] for g in groups] for n in ("N", digits)]
    axes.plot(*np.mean(before, 1), "*", color="black", markersize=11, label="pretrained")
    axes.set_xlim(right=100)
    axes.set_ylim(top=100)
    add_legend(figure, f"{' / '.join(names)}; line: no other point is better at both; "
                       f"ring: the best at {digits}, with 95% intervals")
    notes.sort(key=lambda note: note[0])  # the rings first
    write_beside(figure, axes, [note[1:] for note in notes])
    return figure

def write_beside(figure, axes, notes):
    """Write each (x, y, text, colour) near its point where it covers nothing, else leave it out."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    taken = []  # left, bottom, right, top of what is drawn, in pixels
    for line in axes.lines:
        points, around = axes.transData.transform(line.get_xydata()), 0.7 * line.get_markersize()
        taken.append(np.hstack([points - around, points + around]))
        for begin, end in itertools.pairwise(points) if line.get_linestyle() != "None" else ():
            between = begin + np.linspace(0, 1, 50)[:, None] * (end - begin)
            taken.append(np.hstack([between - 1, between + 1]))
    taken = np.vstack(taken)
    taken = taken[~np.isnan(taken).any(axis=1)]
    for x, y, text, colour in notes:
        note = axes.annotate(text, (x, y), (0, 0), textcoords="offset points", color=colour,
                             fontsize=9, ha="center", va="center")
        half, point = note.get_window_extent().size / 2, axes.transData.transform((x, y))
        for distance, angle in itertools.product((10, 18, 28, 40, 55), range(0, 360, 30)):
            direction = np.array([np.cos(np.radians(angle)), np.sin(np.radians(angle))])
            shift = direction * (distance + half)
            low, high = point + shift - half, point + shift + half
            inside = axes.bbox.contains(*low) and axes.bbox.contains(*high)
            apart = (taken[:, :2] > high) | (taken[:, 2:] < low)
            if inside and apart.any(axis=1).all():
                taken = np.vstack([taken, [*low, *high]])
                note.set_position(shift * 72 / figure.dpi)
                break
        else:
            note.remove()

def coloured_text(groups, _):
    """An answer coloured by certainty, [V] fig. 5."""
    end = groups[0].runs[0].end
    text, J, rows = end["text"], end["certainty"], []
    for line in re.finditer(".*\n|.+", text):
        cells = list(zip(line.group().replace("\n", "↵"), J[line.start():]))
        rows += [cells[i:i + 100] for i in range(0, len(cells), 100)]
    note = f"; the first 60 of {len(rows)} lines" if len(rows) > 60 else ""
    rows = rows[:60]
    columns = max(60, *map(len, rows))
    width = 8.5 / columns  # of a character, in inches
    low, least = min(0.8, math.floor(10 * min(J)) / 10), sorted(J)[:5][-1]
    figure = Figure((9, 1.1 + 2.1 * width * len(rows)), layout="constrained")
    axes = figure.add_subplot(title=f"{cut(end['problem'])}\nframed: the least certain{note}")
    axes.axis("off")
    values = [[j for _, j in row] + [math.nan] * (columns - len(row)) for row in rows]
    shown = axes.imshow(values, cmap="magma", vmin=low, vmax=1, aspect=2.1)
    look = dict(ha="center", va="center", family="monospace", fontsize=104 * width, in_layout=False)
    frame = dict(fill=False, edgecolor="deepskyblue", linewidth=1.5, pad=0.8)
    for y, row in enumerate(rows):
        for x, (character, j) in enumerate(row):
            axes.text(x, y, character, **look, bbox=frame if j <= least else None,
                      color="white" if j < (low + 1) / 2 else "black")
    figure.colorbar(shown, orientation="horizontal", fraction=0.06, pad=0.02, aspect=50,
                    label="certainty J of the pretrained model on each character")
    return figure

# ---- The table of figures.

@dataclass
class Picture:
    make: object        # function of the groups and `what`
    about: tuple        # the settings in which its groups may differ; None: in any
    varied: tuple = ()  # one of these must have several values
    each: tuple = ()    # one group is shown for each value of these
    what: object = ()   # panels, or the setting on the axis
    mode: str = "RL"

ON_AXIS = ("penalty", "alpha", *BUDGET)
TRAINING = {
    "success at TARGET, %": "accuracy_TARGET", "success at N, %": "accuracy_N",
    "right n+1 comma: probability, %": "line*_n+1_comma"}
TOKENS = {
    f"line {line}, {operand} operand, %": f"line{line}_{operand}_n+1_comma"
    for operand in ("first", "second") for line in (1, 2, 3)}
TRUST = {
    "success at TARGET, %": "accuracy_TARGET", "reward, %": "reward", "masked tokens, %": "masked",
    "mean pi - mu, %": "drift", "largest, %": "drift_max", "smallest, %": "drift_min"}
FIGURES = {
    "learning_curves": Picture(curves, PENALTY, (), ("penalty",), TRAINING),
    "critical_tokens": Picture(curves, PENALTY, (), ("penalty",), TOKENS),  # [V] fig. 7
    "pretraining": Picture(curves, DEGREE, DEGREE, (), TRAINING),  # [V] fig. 3
    "trust_region": Picture(curves, REGION, ("method",), ("method",), TRUST),  # [Q] fig. 3
    "variants": Picture(curves, BOUNDS, BOUNDS, (), TRUST),  # of one method
    "beta_sweep": Picture(  # [V] fig. 6
        at_the_end, ("penalty", *PENALTY[3:]), ("beta",), ("penalty", "beta"), "beta"),
    "alpha_sweep": Picture(at_the_end, PENALTY + BUDGET, ("alpha",), ON_AXIS, "alpha"),
    "frontier": Picture(frontier, PENALTY + BUDGET, ("alpha",), ON_AXIS),
    "crossed": Picture(
        at_the_end, PENALTY + REGION, ("method",), ("penalty", "method"), "method"),
    "accuracy_by_digits": Picture(accuracy_by_digits, None, mode="evaluate"),  # [V] fig. 2
    "mismatch": Picture(mismatch, None, mode="evaluate"),
    "coloured_text": Picture(coloured_text, (), mode="inspect"),
    "growth": Picture(growth, None, SIZES, (), SIZES, mode="bench")}

def plan(groups):
    """(name, picture, its groups) of each that can be drawn; of the others what they need."""
    for name, picture in FIGURES.items():
        usable = [g for g in groups if g.key.get("mode", "RL") == picture.mode and (
            g.final() or picture.make is curves and any(run.rows for run in g.runs))]
        sets = [usable] if picture.about is None else alike(usable, picture.about)
        sets = [found for found in sets if found and (
            not picture.varied or set(different(found)) & set(picture.varied))]
        if not sets:
            varied = " of several " + " or ".join(picture.varied) if picture.varied else ""
            say(f"{name}: not drawn, needs runs of mode {picture.mode}{varied}")
            continue
        apart = set(different([found[0] for found in sets])) - set(picture.about or ())
        if apart:
            choice = ", ".join(sorted(apart))
            say(f"{name}: {len(sets) - 1} more can be chosen by --where {choice}")
        yield name, picture, one_of_each(sets[0], picture.each) if picture.each else sets[0]

# ---- Tables.

def cell(values):
    """Mean ± half width, or mean (low to high), of mean and widths."""
    mean, below, above = values
    places = 1 if mean == 0 or abs(mean) >= 1 or below >= 1 else 4
    if math.isnan(mean) or math.isnan(below):
        return "" if math.isnan(mean) else f"{mean:.{places}f}"
    if round(below, places) == round(above, places):
        return f"{mean:.{places}f} ± {below:.{places}f}"
    return f"{mean:.{places}f} ({mean - below:.{places}f} to {mean + above:.{places}f})"

def table(title, head, rows):
    lines = ["| " + " | ".join(map(markdown, row)) + " |" for row in (head, *rows)]
    lines.insert(1, "|" + " --- |" * len(head))
    return ["", f"## {title}", "", *lines] if rows else []

def markdown(text):
    return re.sub(r"([|$*_<`\\])", r"\\\1", " ".join(show(text).split()))

def numbers(name, panels):
    """A table of what panels show: at each x, or of curves the first and the last."""
    rows, ticks = [], panels[0].ticks
    for i, (label, *_) in enumerate(panels[0].lines):
        lines = [dict(zip(np.round(panel.lines[i][2]), panel.lines[i][3])) for panel in panels]
        for k, tick in enumerate(ticks):
            cells = [cell(line[k]) if k in line else "" for line in lines]
            rows += [[label, tick, *cells]] if any(cells) else []
        if not ticks:
            ends = [list(line.values()) for line in lines]
            rows.append([label] + [f"{cell(y[0])} → {cell(y[-1])}" if y else "" for y in ends])
    return table(name, ["", *[""] * bool(ticks), *(panel.title for panel in panels)], rows)

def results(groups):
    """Success of every group of RL before and after, and the settings in which they differ."""
    groups = [group for group in groups if "mode" not in group.key and group.final()]
    settings, rows = different(groups), []
    for group in groups:
        row = [group.key.get(name, "") for name in settings]
        row.append(f"{len(group.final())} of {len(group.runs)}")
        for digits in ("N", target(groups)):
            row += [cell(group.success(digits, x)) for x in ("pretrained_accuracy", "accuracy")]
        rows.append(row + [cell(interval(group.final("seconds", "total")))])
    head = ["seeds", "N, before", "N, after", "N+k, before", "N+k, after", "seconds"]
    return table("Expected success, %", [*settings, *head], rows)

def best_against_best(groups):
    """Of each penalty the group with the highest success at N+k, less standard's."""
    rows, standard, digits = [], {}, target(groups)
    for penalty in ("standard", "critical", "none"):
        family = [group for group in groups if group.key["penalty"] == penalty]
        if not family:
            continue
        best = max(family, key=lambda group: group.success(digits)[0])
        seeds = {run.settings.get("seed"): at(run.end, "accuracy", digits) for run in best.runs}
        standard = seeds if penalty == "standard" else standard
        pairs = [(number(seeds[seed]), number(standard.get(seed))) for seed in seeds]
        settings = [f"{name} {show(best.key[name])}" for name in ON_AXIS[1:] if name in best.key]
        rows.append([penalty, len(family), ", ".join(settings), len(best.final()),
                     cell(best.success(digits)), cell(best.success("N")),
                     cell(interval([100 * (x - y) for x, y in pairs]))])
    head = ["penalty", "tried", "best", "seeds", digits, "N", f"{digits} above standard's, paired"]
    return table("Best against best (chosen on these same runs), %", head, rows)

def definition(groups):
    """Certainty on a token less its mean on the others, and critical tokens by definition."""
    groups = [group for group in groups if group.key.get("mode") == "evaluate" and group.final()]
    rows = []
    for part in ("certainty_gap", "definition"):
        for name in sorted({name for g in groups for found in g.final(part) for name in found}):
            values = [interval(group.final(part, name)) for group in groups]
            rows.append([part, name, *(f"{mean:.4g} ± {half:.2g}" for mean, half, _ in values)])
    return table("Critical tokens of the pretrained model", ["", "", *labels(groups)], rows)

# ---- answers.html: answers before and after RL, each character with what both policies expected.

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>critkl: answers</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --box: #f3f3f0; --edge: #767676; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181b; --ink: #ececec; --box: #24272b; --edge: #8f8f8f; } }
body { background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 0 auto; padding: 0 1rem 15rem; overflow-wrap: anywhere; }
pre, b { font: 1rem/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: var(--box); border-radius: 6px; padding: .4rem .6rem; margin: .3rem 0 1rem; }
pre span { background: rgb(228 110 0 / var(--doubt)); cursor: pointer; padding: .12em 0; }
span.changed { border-bottom: 3px double currentColor; font-weight: bold; }
span:focus { outline: 3px solid #2a7de1; outline-offset: 1px; }
#about { position: fixed; background: var(--box); border: 1px solid var(--edge); border-radius: 6px;
  padding: .5rem .8rem; pointer-events: none; box-sizing: border-box; font-size: .9rem; }
td, th { text-align: right; padding: 0 .8rem 0 0; font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) {
  #about { left: 0 !important; right: 0; top: auto !important; bottom: 0; } }
</style>
<h1>Answers, character by character</h1>
<p>The more orange, the less certain is the pretrained model: J is 1 where it knows what follows,
and J<sup>\u03b2</sup> is the weight of the KL penalty there.
<span class="changed">Underlined</span>: the policy expects another character than the pretrained
model. Point at a character, tap it, or press Tab and the arrow keys, to see the five likeliest of
both.</p>
<main></main><div id="about" role="status" hidden></div>
<script>
const answers = ANSWERS;
const main = document.querySelector("main"), about = document.getElementById("about");
function add(parent, tag, text) {
  const node = parent.appendChild(document.createElement(tag));
  node.textContent = text;
  return node;
}
function name(c) { return {"\\n": "\u21b5 newline", " ": "\u2423 space"}[c] || c; }
function percent(p) {
  return (p < 0.0001 ? (100 * p).toExponential(1) : (100 * p).toFixed(2)) + "%";
}
answers.forEach((answer, i) => {
  const before = answers[i - 1];
  if (!before || before.problem !== answer.problem) add(main, "h2", answer.problem);
  add(main, "h3", answer.title);
  const pre = add(main, "pre", "");
  [...answer.text].forEach((c, k) => {
    const span = add(pre, "span", c === "\\n" ? "\u21b5\\n" : c);
    span.style.setProperty("--doubt", Math.min(0.75, 4 * (1 - answer.certainty[k])));
    span.tabIndex = k ? -1 : 0;
    span.id = `${i}-${k}`;
    if (answer.policy[k][0][0] !== answer.pretrained[k][0][0]) span.className = "changed";
  });
});
function show(span) {
  const [i, k] = span.id.split("-").map(Number), answer = answers[i];
  about.replaceChildren();
  add(about, "b", name(answer.text[k]));
  const [J, weight] = [answer.certainty[k], answer.weight[k]].map(x => x.toFixed(4));
  add(about, "div", `J = ${J}, J^\u03b2 = ${weight}`);
  const table = add(about, "table", ""), head = add(table, "tr", "");
  for (const title of ["pretrained", "", "policy", ""]) add(head, "th", title);
  answer.pretrained[k].forEach((pair, row) => {
    const line = add(table, "tr", ""), other = answer.policy[k][row];
    for (const [c, p] of [pair, other]) { add(line, "td", name(c)); add(line, "td", percent(p)); }
  });
  about.hidden = false;
  const place = span.getBoundingClientRect(), height = about.offsetHeight + 8;
  const top = place.bottom + height < innerHeight ? place.bottom + 8 : place.top - height;
  about.style.left = Math.max(4, Math.min(place.left, innerWidth - about.offsetWidth - 4)) + "px";
  about.style.top = Math.max(4, top) + "px";
}
function near(span, key) {
  const all = [...span.parentNode.children], sign = {ArrowDown: 1, ArrowUp: -1}[key];
  if (!sign) return all[all.indexOf(span) + (key === "ArrowRight" ? 1 : -1)];
  const below = all.filter(s => sign * (s.offsetTop - span.offsetTop) > 4);
  function far(s) {
    return 99 * Math.abs(s.offsetTop - span.offsetTop) + Math.abs(s.offsetLeft - span.offsetLeft);
  }
  return below.reduce((best, s) => best && far(best) <= far(s) ? best : s, null);
}
for (const kind of ["mouseover", "focusin", "click"])
  main.addEventListener(kind, event => event.target.id && show(event.target));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") about.hidden = true;
  if (!event.key.startsWith("Arrow") || !event.target.id) return;
  event.preventDefault();
  near(event.target, event.key)?.focus();
});
document.getElementById(location.hash.slice(1))?.focus();
</script></html>
"""

def answers(groups):
    """The page with the answers of the inspect runs: of each problem the pretrained one first."""
    found = []
    for group in groups:
        for run in group.runs if group.key.get("mode") == "inspect" else ():
            policy, end = group.key["policy"], run.end
            if end and len(end["text"]) <= 5000:
                verdict = "right" if end.get("correct") else "wrong"
                title = f"{policy}, seed {run.settings.get('seed')}: {verdict}"
                shown = {name: end[name] for name in SHAPES["inspect.json"]} | {"title": title}
                found.append((end["problem"], policy != "pretrained", title, shown))
    data = json.dumps([shown for *_, shown in sorted(found, key=lambda answer: answer[:3])][:30])
    return PAGE.replace("ANSWERS", data.replace("<", "\\u003c")) if found else ""

# ---- Command line.

class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)

def run(argv):
    parser = Parser(prog="plots.py", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="runs, or what holds them")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the first FOLDER)")
    parser.add_argument("--where", metavar="NAME=VALUE", action="append", default=[],
                        help="only runs with this setting")
    args = parser.parse_args(argv)
    where = [text.partition("=")[::2] for text in args.where]
    out = Path(args.out or args.folders[0]).expanduser()
    groups = read_groups(args.folders, where)
    for name, value in where:
        if not any(name in group.key for group in groups):
            raise UserError(f"--where {name}={value}: no run has such a setting")
    out.mkdir(parents=True, exist_ok=True)

    command = shlex.join(["python", "plots.py", *(sys.argv[1:] if argv is None else argv)])
    text = ["# Results", "", markdown(command), "",
            "Mean over seeds ± half the width of its 95% interval (Student t); of a single seed its",
            "interval over problems. Seeds: finished of started.", *results(groups)]
    for name, picture, found in plan(groups):
        figure = picture.make(found, picture.what)
        if isinstance(figure, list):
            text += numbers(name, figure)
            figure = draw(figure)
        if picture.make is frontier:
            text += best_against_best(found)
        figure.savefig(out / f"{name}.png")
        figure.savefig(out / f"{name}.pdf", metadata={"CreationDate": None})
        say(f"{name}: {out / name}.png and .pdf, from {len(found)} of {len(groups)} groups")
    text = "\n".join([*text, *definition(groups), ""])
    for name, content in (("results.md", text), ("answers.html", answers(groups))):
        if content:
            (out / name).write_text(content, encoding="utf-8", errors="replace")
            say(f"{name}: {out / name}")

def main(argv=None):
    try:
        with matplotlib.rc_context(), warnings.catch_warnings():
            matplotlib.rcdefaults()
            matplotlib.rcParams.update(STYLE)
            warnings.simplefilter("ignore")  # of characters that no font has
            run(argv)
        return 0
    except (UserError, OSError) as error:
        print(f"plots.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130

if __name__ == "__main__":
    sys.exit(main())

"""plots: every picture and table that a set of critkl run folders allows.

    python plots.py runs                         draw all of runs/, into runs/
    python plots.py runs/a runs/b --out figures  some runs only, into another folder

Writes FIGURES (below), results.md and answers.html. Runs that differ in the seed alone are a group;
shown are mean and 95% interval. A picture compares groups alike in all but what it is about.
"""
import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # also during the slow imports below

import argparse
import csv
import json
import math
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.figure import Figure  # not pyplot: no display, no backend to choose

STYLE = {  # whatever a user's matplotlibrc says; without parse_math "$" is a dollar sign
    "axes.titlesize": 10, "legend.frameon": False, "axes.grid": True, "grid.alpha": 0.3,
    "lines.markersize": 5, "savefig.dpi": 150, "text.parse_math": False}
PENALTIES = ("none", "standard", "critical")
LOOKS = [  # the first three of the penalties
    dict(color=color, linestyle=line, marker=marker) for color, line, marker in (
        ("#D55E00", ":", "s"), ("#0072B2", "--", "^"), ("#009E73", "-", "o"), ("black", "-", "D"),
        ("#E69F00", "--", "v"), ("#56B4E9", "-.", "<"), ("#CC79A7", "-", ">"), ("#999", ":", "P"))]
RL = ("summary.json", "intervals.accuracy.N")
RESULT = {  # of each mode the file that a run writes at its end, and numbers that it must hold
    "none": RL, "standard": RL, "critical": RL, "dppo": RL,
    "evaluate": ("evaluation.json", "rows.varying N+1.sampled"),
    "inspect": ("inspect.json", "certainty"), "bench": ("bench.json", "phases.update.seconds")}

PENALTY = ("penalty", "alpha", "kl_kind", "beta", "certainty", "certainty_temperature")
IDLE = {"none": PENALTY[1:], "standard": PENALTY[3:]}  # without effect beside this penalty
FREE = (  # they change no result, or its precision alone
    "mode", "seed", "out", "name", "preset", "json", "eval_every", "eval_problems", "checkpoint",
    "test_problems")
BOUNDS = ("trust_region", "ratio_cap", "anchor", "eps_low", "eps_high", "relax", "relax_below",
          "divergence", "top_k", "delta")

def say(text):
    """Print a line. A standard output that is closed stops nothing."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        sys.stdout = None

# ---- Reading and choosing. What is damaged is named in a line and left out.

@dataclass(eq=False)
class Group:
    key: dict   # the settings in effect
    runs: list  # of each seed dict(folder, seed, rows of metrics.csv, end: its result)
    label: str = ""
    style: dict = None

    def final(self, path):
        """Mean and interval of what the runs wrote at their end under this path; shares in %."""
        values = [run["end"].get(f"{path}.0", run["end"].get(path)) for run in self.runs]
        values = [x for x in values if isinstance(x, (int, float))]
        scale = 1 if path.startswith(("certainty_gap", "definition", "phases")) else 100
        return scale * interval(values)

    def curve(self, column):
        """Iterations, and the mean of a column with its interval in %, over all seeds that have
        it, where all of these do: a mean over fewer would jump where one ends."""
        seeds = []
        for run in self.runs:
            seed = {i: row[column] for i, row in run["rows"].items() if column in row}
            seeds += [seed] if seed else []
            if run["rows"] and not seed:
                say(f"{run['folder']}: left out of a curve, it has no {column}")
        common = sorted(set.intersection(*map(set, seeds))) if seeds else []
        return common, [100 * interval([seed[i] for seed in seeds]) for i in common]

def read(path, parse, *needed):
    """What a file holds; {} if there is none or it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8-sig"), *needed)
    except FileNotFoundError:
        return {}
    except Exception as error:  # whatever else was put there
        say(f"{path}: left out, {type(error).__name__}: {' '.join(str(error).split())}")
        return {}

def flatten(value, path=""):
    """{path: value} of everything in nested JSON, as a.b.0. Raises for numbers not finite."""
    found = {path.lstrip("."): value}
    if isinstance(value, (dict, list)):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            found.update(flatten(part, f"{path}.{name}"))
    elif isinstance(value, (int, float)) and not math.isfinite(value):
        raise ValueError(f"{path} is {value}")
    return found

def parse_result(text, needed):
    """What a run wrote at its end, flat, with the numbers that it must hold."""
    content = json.loads(text)
    if "rows" in content:
        content["rows"] = {f"{row['set']} {row['digits']}": row for row in content["rows"]}
    found = flatten(content)
    np.sum(found[needed], dtype=float)  # raises where these are no numbers
    if needed == "certainty" and not len(found["text"]) == len(found["certainty"]) > 0:
        raise ValueError("not one certainty for each character")
    return found

def parse_settings(text):
    """The settings in a config.json: numbers, or else text."""
    settings = json.loads(text)["settings"].items()
    settings = {name: x if isinstance(x, (int, float)) else str(x) for name, x in settings}
    if settings["mode"] not in RESULT or settings["penalty"] not in PENALTIES:
        raise ValueError(f"nothing to draw in mode {settings['mode']}")
    return settings

def parse_metrics(text):
    """Iteration to {column: number}; of a repeated iteration the last row. A spreadsheet may have
    saved it: semicolons or tabs between the columns, decimal commas."""
    delimiter = next((mark for mark in ";\t" if mark in text.partition("\n")[0]), ",")
    header, *table = csv.reader(text.splitlines(), delimiter=delimiter)
    rows = {}
    for cells in filter(any, table):
        cells = zip(header, cells, strict=True)
        row = {name: float(x.replace(",", ".")) for name, x in cells if x}
        commas = [x for name, x in row.items() if name.endswith("n+1_comma")]
        row |= {"commas": sum(commas) / len(commas)} if commas else {}
        rows[row["iteration"]] = {name: x for name, x in row.items() if math.isfinite(x)}
    return dict(sorted(rows.items()))

def run_folders(folders):
    """Every folder with a config.json in or below these, each once. Links are followed."""
    seen, found = set(), []
    for top in folders:
        if not os.path.isdir(top):
            raise FileNotFoundError(f"{top}: no such folder")
        for folder, below, files in os.walk(top, followlinks=True, onerror=say):
            real = os.path.realpath(folder)
            if real in seen:  # by a second link, or one that leads in a circle
                below.clear()
            elif "config.json" in files:
                found.append(Path(folder))
            seen.add(real)
            below.sort()
    return found

def in_effect(settings):
    """The settings that shape a run, without those that have no effect beside its penalty."""
    idle = (*FREE, *IDLE.get(settings["penalty"], ()))
    key = {name: x for name, x in settings.items() if name not in idle}
    if RESULT[settings["mode"]] != RL:
        policy = Path(str(settings.get("checkpoint") or "pretrained")).name
        key |= {"mode": settings["mode"], "policy": re.sub(r"-seed\d+$", "", policy)}
    return key

def read_groups(folders):
    """The runs in or below the folders by group, in the order of their penalties and settings."""
    groups = {}
    for folder in run_folders(folders):
        settings = read(folder / "config.json", parse_settings)
        if not settings:
            continue
        file, needed = RESULT[settings["mode"]]
        run = dict(folder=folder, seed=settings.get("seed"),
                   rows=read(folder / "metrics.csv", parse_metrics),
                   end=read(folder / file, parse_result, needed))
        key = in_effect(settings)
        group = groups.setdefault(json.dumps(key, sort_keys=True), Group(key, []))
        if not run["rows"] and not run["end"]:
            say(f"{folder}: left out, no numbers yet")
        elif any(other["seed"] == run["seed"] for other in group.runs):
            say(f"{folder}: left out, another run has its settings and seed")
        else:
            group.runs.append(run)
    groups = [group for group in groups.values() if group.runs]
    if not groups:
        raise FileNotFoundError(f"{', '.join(folders)}: no runs to draw")
    return sorted(groups, key=lambda group: (
        PENALTIES.index(group.key["penalty"]),
        [(name, isinstance(x, str), x) for name, x in group.key.items()]))

T975 = 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306  # Student's t by degrees of freedom

def interval(values):
    """Mean over seeds and half the width of its 95% interval, t s / sqrt(n)."""
    n = len(values)
    if n < 2:
        return np.array([*values, math.nan, math.nan])[:2]
    t = T975[n - 2] if n < 10 else 1.96 + 2.4 / (n - 1) + 3 / (n - 1) ** 2
    return np.array([np.mean(values), t * np.std(values, ddof=1) / math.sqrt(n)])

def choose(groups, about, each, least, mode):
    """Groups alike in all settings but `about`, for each value of `each` that with the most runs.
    Of several such sets that with the most runs; none of fewer groups than `least`."""
    sets = {}
    for group in sorted(groups, key=lambda group: -len(group.runs)):
        if group.key.get("mode", "RL") == mode:
            rest = {name: value for name, value in group.key.items() if name not in about}
            value = tuple(group.key.get(name) for name in each)
            sets.setdefault(json.dumps(rest, sort_keys=True), {}).setdefault(value, group)
    sets = [list(found.values()) for found in sets.values() if len(found) >= least]
    best = max(sets, key=lambda found: sum(len(group.runs) for group in found), default=[])
    return [group for group in groups if group in best]

def dress(groups):
    """Label each group by what tells it from the others: the settings with several values."""
    names = dict.fromkeys(name for group in groups for name in group.key)
    names = [n for n in names if len({str(g.key[n]) for g in groups if n in g.key}) > 1]
    names = [n for n in names if n not in BOUNDS or "method" not in names]  # which says them
    for i, group in enumerate(groups):
        parts = [f"{name} {group.key[name]}" for name in names if name in group.key]
        text = ", ".join(parts) or str(group.key.get("policy", group.key["penalty"]))
        group.label = re.sub(r"\b(penalty|method|policy) ", "", text)[:55]
        group.style = LOOKS[PENALTIES.index(group.label) if group.label in PENALTIES else i % 8]

# ---- Pictures: functions of the groups and of what FIGURES names for them.

def draw(x_label, panels, ticks=(), band=False):
    """The figure of panels {title: lines}, a line being (label, style, x, mean and interval at
    each). Ticks are the names of 0, 1, 2 ... on x. Intervals are bars, or a band."""
    columns = 3 if len(panels) > 2 else 2
    rows = math.ceil(len(panels) / columns)
    figure = Figure((9, 3.2 * rows), layout="constrained")
    for i, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, i + 1, title=title, xlabel=x_label)
        for label, style, x, values in lines:
            mean, half = np.reshape(values, (-1, 2)).T
            bars = None if band else half
            axes.errorbar(x, mean, bars, label=label, elinewidth=0.8, capsize=2, **style)
            if band:
                axes.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.15)
        if ticks:
            axes.set_xticks(range(len(ticks)), [str(tick)[:30] for tick in ticks])
            axes.tick_params("x", rotation=45 if len(ticks) > 4 else 0)
        if title.endswith("%"):
            axes.set_ylim(0, 100)
    handles, names = axes.get_legend_handles_labels()
    columns = max(1, min(len(names), 105 // (8 + max(map(len, names), default=0))))
    figure.legend(handles, names, loc="outside lower center", ncols=columns,
                  title="mean over seeds and its 95% interval")
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    return figure

def curves(groups, columns):
    """While training: a panel for each title and column of metrics.csv."""
    panels = {}
    for title, column in columns.items():
        panels[title] = [(g.label, g.style, *g.curve(column)) for g in groups[:8]]
    return draw("RL iteration", panels, band=True)

def sweep(groups, name):
    """Success at the end against a setting, at 0 for a penalty without it: alpha, beta."""
    ticks = sorted({g.key.get(name, 0) for g in groups}, key=lambda x: (isinstance(x, str), x))
    panels = {}
    for digits in ("N+1", "N"):
        lines = panels[f"success at {digits}, %"] = []
        for i, penalty in enumerate(PENALTIES):
            family = {ticks.index(group.key.get(name, 0)): group
                      for group in groups if group.key["penalty"] == penalty}
            places = sorted(family)
            y = [family[x].final(f"intervals.accuracy.{digits}") for x in places]
            style = LOOKS[i] | ({"linestyle": "none"} if name == "method" else {})
            lines.append((penalty, style, np.array(places) + 0.1 * (i - 1), y))
    return draw(name, panels, ticks)

def by_digits(groups, names):
    """Success of sampled answers, [V] tables 4 and 5."""
    panels = {}
    for kind in ("identical", "varying"):
        lines = panels[f"sampled answers right, {kind} lengths, %"] = []
        for i, group in enumerate(groups[:8]):
            y = [group.final(f"rows.{kind} {digits}.sampled") for digits in names]
            lines.append((group.label, group.style, np.arange(4) + 0.05 * i, y))
    return draw("digits", panels, names)

def growth(groups, name):
    """Seconds of each phase of bench."""
    x, lines = [group.key[name] for group in groups], []
    for style, phase in zip(LOOKS, ("sampling", "scoring", "update", "pretraining")):
        lines.append((phase, style, x, [g.final(f"phases.{phase}.seconds") for g in groups]))
    return draw(name, {"seconds": lines})

def mismatch(groups, _):
    """Sampler (mu) and trainer (pi) at equal weights, [Q] fig. 2."""
    figure = Figure((6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="log10 of mu, the sampler's probability", ylabel="pi / mu")
    mu, pi = np.reshape(groups[0].runs[0]["end"].get("sampler", []), (-1, 2)).T
    axes.plot(np.log10(mu[mu > 0]), pi[mu > 0] / mu[mu > 0], ".", alpha=0.3)
    return figure

def frontier(groups, _):
    """Success at N+1 against success at N. Named at the right: no other is better at both."""
    figure, notes = Figure((9, 5.5), layout="constrained"), []
    axes = figure.add_subplot(xlabel="success at N, %", ylabel="success at N+1, %")
    for style, penalty in zip(LOOKS, PENALTIES):
        family = [group for group in groups if group.key["penalty"] == penalty]
        x, y = [np.array([group.final(f"intervals.accuracy.{digits}")[0] for group in family])
                for digits in ("N", "N+1")]
        axes.plot(x, y, style["marker"], color=style["color"], label=penalty)
        for i, group in enumerate(family):
            if y[i] >= 0 and not any((x > x[i]) & (y > y[i])):
                notes.append((y[i], x[i], group.label, style["color"]))
    for rank, (y, x, text, color) in enumerate(sorted(notes)):
        axes.annotate(text, (x, y), (1.02, (rank + 0.5) / len(notes)), va="center", color=color,
                      textcoords="axes fraction",
                      arrowprops=dict(arrowstyle="-", color=color, lw=0.4, relpos=(0, 0.5)))
    axes.set(xlim=(None, 100), ylim=(None, 100))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    return figure

def coloured_text(groups, _):
    """The first answer, coloured by certainty, [V] fig. 5."""
    end, places, x, y = groups[0].runs[0]["end"], [], 0, 0
    for character, J in zip(end["text"], end["certainty"]):
        places.append((x, y, character, J))
        x, y = (0, y + 1) if character == "\n" or x == 99 else (x + 1, y)
    y = places[-1][1] + 1
    rows = min(y, 60)
    figure = Figure((9.5, 0.9 + 0.2 * rows))
    figure.suptitle(f"{end.get('problem')!s:.75}\nJ: 0.5 black, 1 yellow; {rows} of {y} lines")
    for x, y, character, J in places:
        if y < rows:
            look = dict(facecolor=matplotlib.colormaps["magma"](2 * J - 1), edgecolor="none", pad=1)
            place = (0.4 + 0.0875 * x) / 9.5, 1 - (0.8 + 0.2 * y) / figure.get_figheight()
            figure.text(*place, character.replace("\n", "↵"), family="monospace", bbox=look,
                        color="white" if J < 0.75 else "black")
    return figure

DEGREE, REGION = ("digits", "dial", "mistakes", "pretrain_steps"), ("method", *BOUNDS)
BUDGET = ("alpha", "lr", "iterations")
SETS = ("N", "N+1", "N+2", "N+3")  # digits of the longer operand
TRAINING = {"success at N+1, %": "accuracy_N+1", "success at N, %": "accuracy_N",
            "right n+1 comma: probability, %": "commas"}
TOKENS = {f"line {line}, {operand} operand, %": f"line{line}_{operand}_n+1_comma"
          for operand in ("first", "second") for line in (1, 2, 3)}
TRUST = {"reward, %": "reward", "masked, in % of the tokens": "masked",
         "smallest pi - mu, in %, mean": "drift_min"}
FIGURES = {  # name: (function, what it shows, settings in which the groups differ, those that are
    # shown once for each value, how many groups it needs, mode of their runs)
    "learning_curves": (curves, TRAINING, PENALTY, ("penalty",), 1, "RL"),
    "critical_tokens": (curves, TOKENS, PENALTY, ("penalty",), 1, "RL"),  # [V] fig. 7
    "pretraining": (curves, TRAINING, DEGREE, DEGREE, 2, "RL"),  # [V] fig. 3
    "trust_region": (curves, TRUST, REGION, ("method",), 2, "RL"),  # [Q] fig. 3
    "beta_sweep": (sweep, "beta", ("penalty", *PENALTY[3:]), ("penalty", "beta"), 3, "RL"),
    "alpha_sweep": (sweep, "alpha", PENALTY, ("penalty", "alpha"), 4, "RL"),
    "frontier": (frontier, None, PENALTY + BUDGET, ("penalty", *BUDGET), 4, "RL"),
    "crossed": (sweep, "method", PENALTY + REGION, ("penalty", "method"), 4, "RL"),
    "accuracy_by_digits": (by_digits, SETS, ("policy",), ("policy",), 1, "evaluate"),
    "mismatch": (mismatch, None, ("policy",), ("policy",), 1, "evaluate"),
    "coloured_text": (coloured_text, None, (), (), 1, "inspect"),
    "growth": (growth, "digits", ("digits",), ("digits",), 2, "bench")}
TABLES = {  # of these figures {title: paths of what is shown}; of the others SUCCESS
    "critical_tokens": {"critical_tokens, %": r"critical_tokens\.\w+\+1_comma\.(before|after)"},
    "accuracy_by_digits": {
        "accuracy_by_digits, %": r"rows\.[^.]+\.sampled", "certainty gap": r"certainty_gap\.[^.]+",
        "critical tokens by definition": r"definition\..+"},
    "growth": {"seconds": r"phases\.\w+\.seconds"}, "mismatch": {}, "coloured_text": {}}
SUCCESS = r"intervals\.\w+\.[^.]+"

def table(title, groups, pattern):
    """Markdown, in each cell what a group wrote under a path that matches."""
    ends = [run["end"] for group in groups for run in group.runs]
    paths = dict.fromkeys(path for end in ends for path in end if re.fullmatch(pattern, path))
    rows = [["", "seeds", *(path.partition(".")[2] for path in paths)]]
    for group in groups:
        seeds = str(sum(bool(run["end"]) for run in group.runs))
        cells = [f"{mean:.4g} ± {half:.2g}" for mean, half in map(group.final, paths)]
        rows.append([group.label, seeds, *(re.sub("(nan)? ± nan", "", text) for text in cells)])
    if len(paths) > len(groups):
        rows = list(zip(*rows))
    rows.insert(1, ["---"] * len(rows[0]))
    escaped = [[re.sub(r"([|$*_<`\\])", r"\\\1", text) for text in row] for row in rows]
    return ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in escaped)] if paths else []

# ---- answers.html: answers before and after RL, each character with what both policies expected.

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>critkl: answers</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; font-family: system-ui; }
body { max-width: 62rem; margin: auto; padding: 0 1rem 15rem; overflow-wrap: anywhere; }
pre, #about { background: color-mix(in srgb, CanvasText 8%, Canvas); padding: .4rem .6rem; }
pre { font: 1rem/1.7 ui-monospace, monospace; white-space: pre-wrap; }
pre span { background: rgb(228 110 0 / var(--doubt)); cursor: pointer; }
.changed { border-bottom: 3px double currentColor; font-weight: bold; }
#about { position: fixed; left: 0; bottom: 0; border: 1px solid gray; pointer-events: none; }
td, th { text-align: right; padding-right: .8rem; }
</style><h1>Answers, character by character</h1>
<p>The more orange, the less certain is the pretrained model: J is 1 where it knows what follows,
J<sup>\u03b2</sup> the weight of the KL penalty. <span class="changed">Underlined</span>: the policy
expects another character. Point at characters, tap them, or press Tab and the arrow keys.</p>
<main></main><div id="about" role="status" hidden></div>
<script>const answers = ANSWERS;
const main = document.querySelector("main"), about = document.getElementById("about");
function add(parent, tag, text) {
  const node = parent.appendChild(document.createElement(tag));
  node.textContent = text;
  return node;
}
function name(c) { return {"\\n": "\u21b5 newline", " ": "\u2423 space"}[c] || c; }
answers.forEach((answer, i) => {
  add(main, "h2", answer.title);
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
  const [i, k] = span.id.split("-"), answer = answers[i];
  about.replaceChildren();
  add(about, "b", name(answer.text[k]));
  add(about, "div", "J = " + answer.certainty[k].toFixed(4));
  add(about, "div", "J^\u03b2 = " + answer.weight[k].toFixed(4));
  const table = add(about, "table", ""), head = add(table, "tr", "");
  for (const title of ["pretrained", "", "policy", ""]) add(head, "th", title);
  answer.pretrained[k].forEach((pair, rank) => {
    const row = add(table, "tr", "");
    for (const [c, p] of [pair, answer.policy[k][rank]]) {
      add(row, "td", name(c));
      add(row, "td", (100 * p).toPrecision(4) + "%");
    }
  });
  about.hidden = false;
}
for (const kind of ["mouseover", "focusin", "click"])
  main.addEventListener(kind, event => event.target.id && show(event.target));
document.addEventListener("keydown", event => {
  if (event.key === "Escape") about.hidden = true;
  const next = {ArrowLeft: "previousSibling", ArrowRight: "nextSibling"}[event.key];
  if (event.target.id) event.target[next]?.focus();
});
</script></html>
"""

def answers(groups):
    """The page with the answers of the inspect runs: of each problem the pretrained one first."""
    names, found = ("problem", "text", "certainty", "weight", "pretrained", "policy"), []
    for group in groups:
        for run in group.runs if group.key.get("mode") == "inspect" else ():
            shown = {name: run["end"].get(name) for name in names}
            if all(shown.values()) and len(shown["text"]) <= 5000:
                title = f"{shown['problem']}: {group.key['policy']}, seed {run['seed']}"
                found.append(shown | {"title": title})
    found.sort(key=lambda shown: (str(shown["problem"]), "pretrained" not in shown["title"]))
    return PAGE.replace("ANSWERS", json.dumps(found[:30]).replace("<", "\\u003c")) if found else ""

def write_all(groups, out):
    out.mkdir(parents=True, exist_ok=True)
    text = ["# Results", "", "Mean over the finished seeds ± half its 95% interval (Student t)."]
    dress(groups)
    text += table("success, %", groups, SUCCESS)
    for name, (make, what, *chosen) in FIGURES.items():
        found = choose(groups, *chosen)
        if not found:
            say(f"{name}: not drawn, needs {chosen[2]} of {chosen[3]} with other {chosen[1]}")
            continue
        dress(found)
        figure = make(found, what)
        figure.savefig(out / f"{name}.png")
        figure.savefig(out / f"{name}.pdf", metadata={"CreationDate": None})
        say(f"{name}: {out / name}.png and .pdf, from {len(found)} of {len(groups)} groups")
        for title, pattern in TABLES.get(name, {f"{name}, %": SUCCESS}).items():
            text += table(title, found, pattern)
    for name, content in (("results.md", "\n".join(text)), ("answers.html", answers(groups))):
        if content:
            (out / name).write_text(content, encoding="utf-8", errors="replace")
            say(f"{name}: in {out}")

def main(argv=None):
    parser = argparse.ArgumentParser("plots.py", argparse.SUPPRESS, __doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="runs, or what holds them")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the first FOLDER)")
    args = parser.parse_args(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that it cannot show
    try:
        with matplotlib.style.context(STYLE, after_reset=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of characters that no font has
            write_all(read_groups(args.folders), Path(args.out or args.folders[0]).expanduser())
    except OSError as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        return 130
    return 0

if __name__ == "__main__":
    sys.exit(main())

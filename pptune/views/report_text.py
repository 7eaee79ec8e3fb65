"""The report's fixed parts: its style, its words and what a reader has to know of each figure."""

STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --faint: #5d6675; --paper: #fff;
  --line: #d9dce3; --card: #f3f6fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --faint: #9aa3b2; --paper: #14171d;
  --line: #363c48; --card: #1d222b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 69rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2rem 0 .25rem; }
p, ul, dl { margin: .4rem 0; }
.faint { color: var(--faint); font-size: .9rem; }
.answer { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .8rem 1rem; }
.answer p:first-child { font-size: 1.15rem; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; white-space: normal; }
.left { text-align: left; }
.strong td { font-weight: 600; }
.dim td { color: var(--faint); }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0; }
.js-plotly-plot :is(.xtick, .ytick, .cbaxis, .annotation) text,
.js-plotly-plot :is(.xtitle, .ytitle, .legendtext) { fill: var(--ink) !important; }
.js-plotly-plot .gridlayer path { stroke: var(--line) !important; }
.js-plotly-plot .errorbars path { stroke: var(--ink) !important; }
.js-plotly-plot .cbtitle text { fill: var(--ink) !important; }
@media print {
  body { max-width: none; padding: 0; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .3rem; }
  section { break-inside: avoid; }
  .js-plotly-plot .modebar { display: none !important; }
}
"""

NO_REQUESTS = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""The page may not fetch anything, whatever a library in it would like to do."""

GLOSSARY = (
    ("V, chunks per rank", "How many stages each rank holds. V = 1 is plain 1F1B: each micro-batch "
     "visits each rank once. With V above 1 (interleaved) it goes round the ranks V times, through "
     "stages 1/V as large, which shortens the bubble and sends V times as many messages."),
    ("b, micro-batch size", "Sequences that a stage works on at once. Small ones use a device "
     "badly; large ones leave fewer micro-batches to fill the pipeline with."),
    ("M, micro-batches", "How many micro-batches each replica's step is cut into. With the global "
     "batch held fixed, M = global batch / (b x replicas)."),
    ("P, ranks", "Devices over which the model's layers are spread."),
    ("Bubble", "Time in which a rank waits because the work it needs does not exist yet."),
    ("Exposed transfer", "Time in which a rank waits for a message that is under way, or is busy "
     "sending or receiving instead of computing."),
    ("Overhead", "What the runtime adds to each action: dispatch, launches, bookkeeping."),
    ("Baseline", "The best 1F1B plan over all b, unless another was asked for."),
    ("Noise", "Half the width of the 95 % confidence interval of a measured time, as a share of "
     "it."),
)  # fmt: skip

CAPTIONS = {
    "step-time": "The best plan of each V and b with the global batch held fixed, so that M falls "
    "as b grows. Empty cells have no legal plan that fits.",
    "parts": "The slowest rank of each plan; the parts sum to its step time.",
    "accuracy": "Lines at the ends of the measured bars are the noise.",
    "timeline": "One row per rank. White space is bubble and waiting.",
    "memory": "Peak of each rank.",
    "layer-times": "Forward and backward of one block; both axes are logarithmic. The gap between "
    "the curve and the dashed line is "
    "what a micro-batch loses by being small.",
    "links": "Both axes are logarithmic. Lines are latency + size / bandwidth.",
    "pareto": "No plan in the search is better than these in both time and memory.",
}

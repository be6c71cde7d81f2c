"""The style sheet of the report page: light and dark, narrow and wide screens."""

CSS = """
:root {
  color-scheme: light dark;
  --bg: #f6f7f9; --card: #ffffff; --ink: #1c2430; --dim: #657083; --edge: #dfe3ea; --grid: #e9edf2;
  --policy: #dff3e4; --policy-edge: #3f9d5f; --env: #eceef2; --env-ink: #5b6576; --special: #7a4fd0;
  --bad: #c2413b; --good: #23864a;
  --k0: #2f6fdb; --k1: #e07b25; --k2: #2a9d5b; --k3: #b04ad1; --k4: #c9a21a; --k5: #1f9fb5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161c; --card: #1a2029; --ink: #e6eaf0; --dim: #93a0b4; --edge: #2b3442; --grid: #262f3b;
    --policy: #1c3d2a; --policy-edge: #58c27d; --env: #262c36; --env-ink: #9aa6b8; --special: #b79cf5;
    --bad: #ef7a72; --good: #62c98a;
    --k0: #6ea3ff; --k1: #f5a054; --k2: #5fcf8d; --k3: #d68af0; --k4: #e6c74d; --k5: #56cbe0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 18px 60px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 12px; }
.sub, .note, .hint { color: var(--dim); margin: 0; }
.sub { overflow-wrap: anywhere; }
.note, .hint { font-size: 12.5px; }
.hint { margin-bottom: 12px; }
.tiles { display: grid; gap: 12px; margin-top: 18px; grid-template-columns: repeat(auto-fill, minmax(185px, 1fr)); }
.tile, .card, details.rollout { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 10px 14px; }
.tile span { display: block; font-size: 12.5px; color: var(--dim); }
.tile b { font-size: 19px; white-space: nowrap; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile small { display: block; color: var(--dim); }
.grid-of-cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); }
.card { margin: 0; padding: 12px 14px 10px; display: flex; flex-direction: column; }
.card svg { margin-top: auto; }
figcaption { font-weight: 600; font-size: 14px; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
svg .grid { stroke: var(--grid); }
svg .tick { fill: var(--dim); font-size: 10.5px; font-variant-numeric: tabular-nums; }
svg .raw { fill: none; stroke: var(--k); stroke-width: 1; opacity: .33; }
svg .line { fill: none; stroke: var(--k); stroke-width: 2; stroke-linejoin: round; }
svg .band { fill: var(--k); opacity: .1; }
svg .dot { fill: var(--k); }
svg .hover { fill: var(--k); opacity: 0; }
svg .hover:hover { opacity: .8; }
.c0 { --k: var(--k0); } .c1 { --k: var(--k1); } .c2 { --k: var(--k2); }
.c3 { --k: var(--k3); } .c4 { --k: var(--k4); } .c5 { --k: var(--k5); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12.5px; color: var(--dim); }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.key i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; background: var(--k); margin-right: 5px; vertical-align: 3px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--edge); }
th, td { padding: 6px 14px; text-align: right; border-bottom: 1px solid var(--edge); font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-size: 12.5px; color: var(--dim); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
details.rollout { margin-bottom: 10px; padding: 0 14px; }
details.rollout > summary { cursor: pointer; padding: 10px 0; display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: baseline; }
summary .q { flex: 1 1 260px; overflow-wrap: anywhere; }
.tag { font-size: 12.5px; border: 1px solid var(--edge); border-radius: 20px; padding: 0 9px; color: var(--dim); white-space: nowrap; }
.tag.good { color: var(--good); border-color: currentColor; }
.tag.bad { color: var(--bad); border-color: currentColor; }
.tokens { font: 13px/1.95 ui-monospace, "SF Mono", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; padding: 2px 0 12px; margin: 0; }
.tokens span { border-radius: 3px; padding: 2px 0; }
.policy { background: var(--policy); border-bottom: 2px solid var(--policy-edge); }
.env { background: var(--env); color: var(--env-ink); }
.prompt { color: var(--env-ink); }
.tokens .s { color: var(--special); font-weight: 600; }
.policy + .policy { margin-left: 1px; }
.fold > summary { cursor: pointer; color: var(--dim); font-size: 12.5px; margin-bottom: 4px; }
.swatches { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; font-size: 13px; margin-bottom: 12px; }
.swatches span { padding: 1px 7px; border-radius: 3px; }
.swatches .s { color: var(--special); font-weight: 600; font-family: ui-monospace, Menlo, Consolas, monospace; }
dl.facts { display: flex; flex-wrap: wrap; gap: 2px 22px; margin: 0 0 10px; font-size: 13px; }
dl.facts div { display: flex; gap: 6px; }
dl.facts dt { color: var(--dim); } dl.facts dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 40px; color: var(--dim); font-size: 12.5px; }
"""

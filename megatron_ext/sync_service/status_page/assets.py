# SPDX-License-Identifier: Apache-2.0
"""Style and script of the page, which are parts of it: it loads nothing else."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f6f8; color: #1c2733; font: 15px/1.45 system-ui, "Segoe UI", sans-serif; }
header, main, footer { max-width: 1200px; margin: 0 auto; padding: 0 20px; }
header { display: flex; justify-content: space-between; align-items: baseline; gap: 16px; padding-top: 18px; }
header h1 { font-size: 17px; font-weight: 600; margin: 0; }
header p { margin: 0; }
header p, footer { color: #5b6875; font-size: 13px; }
footer { padding-top: 4px; padding-bottom: 28px; }
a { color: #0062a3; }
section { margin: 14px 0 28px; }
h2 { font-size: 20px; margin: 0; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 8px; }
.card { background: #fff; border: 1px solid #dde3e9; border-radius: 10px; padding: 14px 16px; margin-top: 14px; }
.health { border-left: 8px solid #2e9e5b; }
.health.attention { border-left-color: #d99500; background: #fffaf0; }
.health.problem { border-left-color: #cf2e2e; background: #fff5f4; }
.health.idle { border-left-color: #8796a5; }
.health p { margin: 4px 0 0; }
.word { display: inline-block; border-radius: 999px; color: #fff; background: #23804a; padding: 3px 12px;
  margin-left: 10px; font-size: 14px; font-weight: 600; vertical-align: 2px; }
.attention .word { background: #a86a00; }
.problem .word { background: #c02626; }
.idle .word { background: #66737f; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 14px; margin-top: 14px; }
.facts div { background: #fff; border: 1px solid #dde3e9; border-radius: 10px; padding: 10px 14px; }
.facts span { display: block; color: #5b6875; font-size: 13px; }
.facts b { font-size: 21px; font-weight: 600; }
.facts small { color: #5b6875; font-size: 13px; margin-left: 4px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 14px; }
.charts { margin-top: 14px; }
.charts .card { margin-top: 0; }
.legend { float: right; color: #5b6875; font-size: 12px; font-weight: 400; }
.legend svg, td svg { width: 10px; height: 10px; margin: 0 5px 0 10px; vertical-align: -1px; }
td svg { margin-left: 0; }
.chart > svg { display: block; width: 100%; height: auto; }
.chart text { font-size: 12px; fill: #5b6875; }
.grid { stroke: #e6ebf0; }
tr.gone td { color: #8796a5; }
.none { color: #5b6875; margin: 6px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-top: 1px solid #e6ebf0; vertical-align: top; }
tr:first-child th { border-top: 0; padding-top: 0; }
th { color: #5b6875; font-size: 13px; font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.text { overflow-wrap: anywhere; min-width: 90px; }
td.when { white-space: nowrap; color: #5b6875; }
.tag { border-radius: 5px; padding: 1px 8px; font-size: 13px; background: #e8edf2; color: #3c4956; }
.tag { white-space: nowrap; }
.tag.done { background: #dff3e6; color: #1b6b3d; }
.tag.warn { background: #fdeecb; color: #7a4d00; }
.tag.bad { background: #fbdfdd; color: #a01d1d; }
#away { display: none; position: sticky; top: 0; background: #c02626; color: #fff; padding: 10px 20px; }
.away #away { display: block; }
.away main { opacity: 0.45; }
@media (max-width: 640px) {
  header, main, footer { padding-left: 12px; padding-right: 12px; }
  header { flex-direction: column; gap: 2px; }
  .wide { display: none; }
  .facts { grid-template-columns: repeat(2, 1fr); gap: 10px; }
  h2 { font-size: 18px; }
  td.when { white-space: normal; }
  .chart text { font-size: 14px; }
}
"""

SCRIPT = """
"use strict";
let answered = Date.now();
let asking = false;
async function refresh() {
  if (asking) return;
  asking = true;
  try {
    // A server that hangs, or whose machine is gone, refuses nothing.
    const reply = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!reply.ok) throw new Error(reply.status);
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const part of ["main", "#made"]) document.querySelector(part).replaceWith(page.querySelector(part));
    document.title = page.title;
    document.body.classList.remove("away");
    answered = Date.now();
  } catch {
    document.body.classList.add("away");
    const seconds = Math.round((Date.now() - answered) / 1000);
    document.querySelector("#away").textContent = `The server has not answered for ${seconds} s: what is below is old.`;
  } finally {
    asking = false;
  }
}
setInterval(refresh, 3000);
"""

#!/usr/bin/env python3
"""Turns the JSON of a bench into Markdown: a matrix of cases and variants, then the goals.

usage: dmalane-bench map-sg --json | bench/matrix.py [--show FIELD] [--suffix TEXT] [--case RE] [--variant RE] [--goals]

FIELD is one of a row (default ns_per_item). A suffix picks the cases that end so and is cut off. RE is a regular
expression that a case (a variant) must match whole.
"""

import argparse
import json
import re
import sys


def number(value):
    if value is None:
        return ""
    if isinstance(value, int) or value >= 1000:
        return f"{value:.0f}"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def main():
    parser = argparse.ArgumentParser(description="JSON of a bench to Markdown")
    parser.add_argument("--show", default="ns_per_item")
    parser.add_argument("--suffix", default="")
    parser.add_argument("--case", default=".*")
    parser.add_argument("--variant", default=".*")
    parser.add_argument("--goals", action="store_true", help="print the goals, not the matrix")
    options = parser.parse_args()
    report = json.load(sys.stdin)
    if options.goals:
        print("| goal | limit | this run | |\n|---|---|---|---|")
        for goal in report["goals"]:
            unit = goal["unit"].removeprefix("ratio, ")
            verdict = {True: "met", False: "**missed**", None: "not judged"}[goal["ok"]]
            got = number(goal["got"])
            # A goal that was missed by little does not look like one that was met.
            got = f"{goal['got']:.4f}" if not goal["ok"] and got == number(goal["goal"]) else got
            print(f"| {goal['name']} | {unit} {number(goal['goal'])} | {got} | {verdict} |")
        return
    cases, variants, cells = [], [], {}
    for row in report["rows"]:
        case, variant = row["case"], row["variant"]
        if not case.endswith(options.suffix) or not re.fullmatch(options.variant, variant):
            continue
        case = case.removesuffix(options.suffix).strip()
        if not re.fullmatch(options.case, case):
            continue
        cases += [case] if case not in cases else []
        variants += [variant] if variant not in variants else []
        cells[case, variant] = row.get(options.show)
    print("| | " + " | ".join(cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for variant in variants:
        print(f"| {variant} | " + " | ".join(number(cells.get((c, variant))) for c in cases) + " |")


main()

"""Named tables and figures, ours and the papers', as lists of runs that one command executes.

ours.toml, papers.toml   the tables; tables.py reads them
plan.py                  a table on given data and weights: its jobs in order, each with its configuration and its key
run.py, process.py       the jobs in processes of their own, several at a time; finished ones are not run again
report.py, plots.py      results.csv, results.md, pareto.png or bars.png, curves.png
command.py               the command: list, show or run
"""

from __future__ import annotations

from .tables import TABLES, Run, Table

__all__ = ["TABLES", "Run", "Table"]

"""Named tables and figures, ours and the papers', as lists of runs that one command executes.

run.py         what a run and a table are
tables.py      our tables
equal_cost.py  every method at a share of static's MACs, for them
papers.py      the papers' tables
plan.py        a table on given data and weights: its jobs in order, each with its full configuration and its key
execute.py     the jobs in processes of their own, several at a time; what is finished is not run again
job.py         such a process: train, evaluate, write the row
report.py      results.csv, results.md, pareto.png or bars.png, curves.png
"""

from __future__ import annotations

from .papers import PAPERS
from .run import Run, Table
from .tables import OURS

TABLES: dict[str, Table] = {table.name: table for table in (*OURS, *PAPERS)}

__all__ = ["OURS", "TABLES", "Run", "Table"]

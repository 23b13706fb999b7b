"""Work made of many runs: quickstart, comparison, benchmark, sweep, reproduction."""

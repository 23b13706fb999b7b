"""Compute budgets: parsed, measured as a cost curve, applied to a policy, held as a limit."""
